"""The job as operations have left it: the job file with the values that were set, and the job's day. No effects.

Which operations act, and when, is decided in trainer.rank0.operations.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import SpecError
from headrace.keys import key_of_reference, sign_of
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ExportCut,
    ForgetRow,
    SetTables,
    ShrinkRows,
    TableOperation,
)
from headrace.trainer.config import TrainerJob
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ExportOperation,
    ForgetOperation,
    ResizeOperation,
    SetOperation,
    ShrinkOperation,
    SlotOperation,
)
from headrace.trainer.spec.changes import SHARDS, TRAINERS, Overrides, present_names, with_overrides
from headrace.trainer.spec.history_tables import history_tables, keyed_like
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.validation import no_such


class JobInForce:
    """Any thread may read; operations change it, while no pass is open."""

    def __init__(
        self, job: TrainerJob, workers: Mapping[str, int] | None = None, elastic: tuple[int, int] | None = None
    ) -> None:
        """`job` is as in the job file. `workers`: the numbers of this generation, by key; None in a rerun.

        `elastic`: fewest and most trainers, where the launcher chooses their number.
        """
        self.job, self.workers, self.elastic = job, workers, elastic
        self.now = job
        """The job with all values that were set."""
        self.schema = Schema.of(job.slots)
        self.timed = next(iter(job.sources.values())).event_time.kind != "none"
        """Whether the job's days follow the time of its events."""
        self.day = 0
        """The job's day; closes and day ticks advance it."""
        self._overrides: Overrides = {}

    @property
    def overrides(self) -> Overrides:
        """Values that were set and hold."""
        return dict(self._overrides)

    @property
    def tables(self) -> Mapping[str, TableSection]:
        """The tables' sections in force, with overrides."""
        return self.now.tables

    @property
    def tables_on_shards(self) -> Mapping[str, TableSection]:
        """As `tables`, with slices of the dense parameters if shards hold them, and histories."""
        now = self.now
        return tables_on_shards(now.tables, now.dense, now.slots, now.join)

    @property
    def aging_tables(self) -> Mapping[str, TableSection]:
        """As `tables`, with histories."""
        return {**self.now.tables, **history_tables(self.schema)}

    @property
    def schedule(self) -> dict[str, Any]:
        """The schedule of the dense learning rate, as JSON-able data."""
        return dict(self.now.dense.schedule.model_dump(mode="json"))

    def sparse_slot(self, name: object) -> Slot:
        """The sparse slot of this name. Raises SpecError."""
        names = [each.name for each in self.schema.sparse]
        if not isinstance(name, str) or name not in names:
            raise SpecError(no_such("sparse slot", name, names))
        return self.schema.by_name[name]

    def key_of(self, slot: object, sign: object) -> tuple[Slot, int]:
        """A sparse slot, and the key of a feature id (`sign`) in it. Raises SpecError."""
        found = self.sparse_slot(slot)
        if not isinstance(sign, int) or isinstance(sign, bool) or not 0 <= sign < 1 << 64:
            raise SpecError(f"{sign!r} is not a sign: a number of 64 bits")
        return found, key_of_reference(sign, found.group)

    def is_resized_by(self, operations: Iterable[ActingOperation]) -> bool:
        """Whether the operations of a close, taken together, change the numbers of workers of this generation."""
        if self.workers is None:
            return False
        wanted = dict(self.workers)
        for each in operations:
            if isinstance(each, ResizeOperation):
                wanted |= {key: number for key, number in each.keys.items() if key in wanted}
        wanted[SHARDS] = max(wanted[SHARDS], int(wanted[TRAINERS] > 1))
        return wanted != dict(self.workers)

    def forgotten(self, operations: Iterable[ActingOperation]) -> dict[str, list[int]]:
        """By sparse slot: the signs of the rows that the operations delete by name."""
        found: dict[str, list[int]] = {}
        for each in operations:
            if isinstance(each, ForgetOperation):
                others = (((of["table"], of["group"]), key) for of in each.also or () for key in of["keys"])
                rows = [((each.table, each.group), each.key), *others]
                for slot in self.schema.sparse:
                    signs = [sign_of(key, slot.group) for of, key in rows if of == (slot.sparse.table, slot.group)]
                    found.setdefault(slot.name, []).extend(signs)
        return {name: signs for name, signs in found.items() if signs}

    def act(self, operation: ActingOperation) -> list[TableOperation]:
        """Carry out an operation's part in this process; returns the part that tables carry out."""
        match operation:
            case SetOperation() | ResizeOperation():
                return self.set({**self._overrides, **operation.keys})
            case DayTickOperation():
                self.day = max(self.day, operation.to)
                return [AdvanceDay(to=self.day)]
            case ShrinkOperation():
                return [
                    ShrinkRows(
                        table=operation.table,
                        delete_below=operation.delete_below,
                        delete_after_days=operation.delete_after_days,
                        at_once=operation.at_once,
                    )
                ]
            case ForgetOperation():
                where = operation.table, *keyed_like(self.schema, operation.table, operation.group)
                own = [ForgetRow(table=name, group=operation.group, key=operation.key) for name in where]
                rows = ((each["table"], each["group"], key) for each in operation.also or () for key in each["keys"])
                return [*own, *(ForgetRow(table=name, group=group, key=key) for name, group, key in rows)]
            case SlotOperation():
                return [operation.change]
            case ExportOperation():
                return [cut_of(operation)] if operation.clears else []
            case _:
                return []

    def set(self, overrides: Overrides) -> list[TableOperation]:
        """Replace the values that were set; returns the change of the tables' settings."""
        before, self._overrides = self.tables_on_shards, present_names(overrides)
        self.now = with_overrides(self.job, overrides)
        new = {name: table for name, table in self.tables_on_shards.items() if table != before[name]}
        return [SetTables(tables={name: table.model_dump(mode="json") for name, table in new.items()})] if new else []


def cut_of(export: ExportOperation) -> ExportCut:
    """The table operation of an export."""
    assert export.type == "base" or export.parent is not None, "a delta has a parent"
    parent = export.parent if export.type == "delta" else None
    return ExportCut(
        tables=tuple(export.tables),
        since=0 if parent is None else parent.version,
        base_threshold=export.base_threshold,
        delta_threshold=0.0 if parent is None or export.all else export.delta_threshold,
        delta_keep_days=None if parent is None else export.delta_keep_days,
    )
