"""The versions that a replica keeps for a rollback, bounded in number and memory.

Versions since the last whole update share tables and are one step apart. Versions before it have tables of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.trainer.replica.dense_graph import Tensors
from headrace.trainer.replica.replica_table import ReplicaTable, TableStep
from headrace.trainer.replica.serving_model import ServingModel


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """Names a state of a model."""

    job: str
    timeline: str
    number: int

    def __str__(self) -> str:
        return f"{self.timeline}-{self.number}"


@dataclass(eq=False)
class TableEpoch:
    """Tables that began with a whole version, and the version they have now."""

    tables: Mapping[str, ReplicaTable]
    at: int = 0
    """The version of the tables, as the number of steps from the first of the epoch."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.num_bytes for table in self.tables.values())


@dataclass(slots=True, eq=False)
class KeptVersion:
    """One version that is kept."""

    version: ServedVersion
    epoch: TableEpoch
    place: int
    """Its number of steps from the first version of its epoch."""
    steps: Mapping[str, TableStep]
    """By table, the step from the version before it in its epoch; empty for the oldest kept one."""
    model: ServingModel
    weights: Tensors
    event_time_s: float | None
    served_at_s: float
    """When it was first served, unix seconds."""
    memories: frozenset[str] = frozenset()
    """The tables of histories and counters that it has."""

    @property
    def num_bytes(self) -> int:
        """Memory that this version adds: its steps, the old rows they keep, its weights."""
        tables, steps = self.epoch.tables, self.steps.items()
        rows = sum(step.num_bytes + step.num_kept * tables[name].row_bytes for name, step in steps)
        return rows + sum(tensor.nbytes for tensor in self.weights.values())


@dataclass
class VersionHistory:
    """Versions from oldest to newest, bounded in number and memory. Any of them may be the served one."""

    max_versions: int
    """Most versions beside the newest."""
    max_bytes: int
    """Most memory beside the newest version."""
    kept: list[KeptVersion] = field(default_factory=list)

    @property
    def newest(self) -> KeptVersion | None:
        """The version applied last."""
        return self.kept[-1] if self.kept else None

    def find(self, number: int, timeline: str | None = None) -> KeptVersion | None:
        """The kept version of a number; without a timeline, the one of the newest timeline that has it."""
        fits = (each for each in reversed(self.kept) if each.version.number == number)
        return next((each for each in fits if timeline in (None, each.version.timeline)), None)

    def num_bytes(self) -> int:
        """Memory of versions beside the newest. Any thread may call."""
        kept = list(self.kept)
        epochs = {id(each.epoch): each.epoch for each in kept if each.epoch is not kept[-1].epoch}
        return sum(each.num_bytes for each in kept) + sum(epoch.num_bytes for epoch in epochs.values())

    def add(self, kept: KeptVersion) -> None:
        """Add the version that was applied last; drop the oldest ones beyond the bounds."""
        self.kept.append(kept)
        total = self.num_bytes()
        while len(self.kept) > 1 and (len(self.kept) > self.max_versions + 1 or total > self.max_bytes):
            total -= self._drop_oldest()

    def _drop_oldest(self) -> int:
        """Drop the oldest version -> the memory that became free."""
        oldest, second = self.kept[0], self.kept[1]
        del self.kept[0]
        if second.epoch is not oldest.epoch:
            return oldest.num_bytes + oldest.epoch.num_bytes
        freed = sum(tensor.nbytes for tensor in oldest.weights.values())
        for name, step in second.steps.items():
            table = second.epoch.tables[name]
            table.forget(step)
            freed += step.num_bytes + step.num_kept * table.row_bytes
        second.steps = {}
        return freed
