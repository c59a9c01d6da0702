"""Which versions a replica holds, and what it takes to keep them: the way back to each of them.

Versions since the last whole one share tables and are one step apart; what came before lies in tables of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.replica.graph import Tensors
from trainer.replica.inference import Model
from trainer.replica.table import Step, Table


@dataclass(frozen=True, slots=True)
class Version:
    """Which state of a model."""

    job: str
    timeline: str
    number: int

    def __str__(self) -> str:
        return f"{self.timeline}-{self.number}"


@dataclass(eq=False)
class Epoch:
    """Tables that began with a whole version, and how far they are brought."""

    tables: Mapping[str, Table]
    at: int = 0
    """Which of the epoch's versions its tables have: steps from its first."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.num_bytes for table in self.tables.values())


@dataclass(slots=True, eq=False)
class Kept:
    """One version that is held."""

    version: Version
    epoch: Epoch
    place: int
    """Which of its epoch's versions it is."""
    steps: Mapping[str, Step]
    """By table, from the version before it in its epoch; of the oldest that is kept, none."""
    model: Model
    weights: Tensors
    event_time_s: float | None
    served_at_s: float
    """When it was first served, unix seconds."""

    @property
    def num_bytes(self) -> int:
        """Memory that only this version needs, beside the one before it: its steps, the rows they keep, weights."""
        tables, steps = self.epoch.tables, self.steps.items()
        rows = sum(step.num_bytes + step.num_kept * tables[name].row_bytes for name, step in steps)
        return rows + sum(tensor.nbytes for tensor in self.weights.values())


@dataclass
class History:
    """Versions from the oldest to the newest, bounded in number and memory; the served one may be any of them."""

    max_versions: int
    """Beside the newest."""
    max_bytes: int
    """For what is kept beside the newest version."""
    kept: list[Kept] = field(default_factory=list)

    @property
    def newest(self) -> Kept | None:
        """The last one applied."""
        return self.kept[-1] if self.kept else None

    def find(self, number: int, timeline: str | None = None) -> Kept | None:
        """The kept one of that number; where several timelines have it and none is named, the newest timeline's."""
        fits = (each for each in reversed(self.kept) if each.version.number == number)
        return next((each for each in fits if timeline in (None, each.version.timeline)), None)

    def num_bytes(self) -> int:
        """Memory of what is kept beside the newest version. Any thread may ask."""
        kept = list(self.kept)
        epochs = {id(each.epoch): each.epoch for each in kept if each.epoch is not kept[-1].epoch}
        return sum(each.num_bytes for each in kept) + sum(epoch.num_bytes for epoch in epochs.values())

    def add(self, kept: Kept) -> None:
        """A version was applied: all others are older. What is too much goes, the oldest first."""
        self.kept.append(kept)
        total = self.num_bytes()
        while len(self.kept) > 1 and (len(self.kept) > self.max_versions + 1 or total > self.max_bytes):
            total -= self._drop_oldest()

    def _drop_oldest(self) -> int:
        """-> the memory that came free."""
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
