"""The slots of a job in a fixed order, resolved from the job file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from headrace.dataset.spec.config import (
    DenseSlot,
    HistorySection,
    MetaSlot,
    RemovedSlot,
    SampleSection,
    SlotEntry,
    SlotKind,
    SparseSlot,
)
from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.errors import SpecError

NUM_GROUPS = 1 << 16
"""Numbers of slot groups are below this."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot."""

    name: str
    kind: SlotKind
    entry: SparseSlot | DenseSlot | MetaSlot
    """Its entry in the job file."""
    group: int = -1
    """Slot group of a sparse slot. Slots with the same `share` name have one group; others have their own."""

    @property
    def shape(self) -> tuple[str, str, str, int]:
        """The slot as a generator sees it: name, kind, type of its values, size; see
        dataset.formats.generator_columns.GeneratorSlot."""
        match self.entry:
            case DenseSlot(size=size):
                return self.name, "dense", "float", size
            case MetaSlot(type=kind):
                return self.name, "meta", kind, 1
            case SparseSlot(values=kind, weighted=weighted):
                return self.name, "sparse", kind, int(weighted)
            case _:
                assert_never(self.entry)

    @property
    def sparse(self) -> SparseSlot:
        """Settings of a sparse slot."""
        assert isinstance(self.entry, SparseSlot)
        return self.entry

    @property
    def history(self) -> HistorySection:
        """The setting of a slot that the job fills."""
        assert self.sparse.history is not None, "one of Schema.histories"
        return self.sparse.history

    @property
    def counters(self) -> CountersSection:
        """The setting of a dense slot that the job fills."""
        assert isinstance(self.entry, DenseSlot) and self.entry.counters is not None, "one of Schema.counters"
        return self.entry.counters

    @property
    def statistics(self) -> StatisticsSection:
        """The setting of a dense slot that tells what rows know."""
        assert isinstance(self.entry, DenseSlot) and self.entry.statistics is not None, "one of Schema.statistics"
        return self.entry.statistics


@dataclass(frozen=True)
class Schema:
    """All slots, in the order of the spec."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, entries: Sequence[SlotEntry]) -> "Schema":
        """Resolve ranges and share groups. Raises SpecError."""
        slots: list[Slot] = []
        names: set[str] = set()
        groups = _groups_of(entries)
        tables: dict[str, str] = {}
        group_names = slot_group_names(entries)
        for number, entry in enumerate(entries):
            for name in () if isinstance(entry, RemovedSlot) else entry.expanded():
                if name in names:
                    raise SpecError(f"slot {name!r} is declared twice", f"slots.{number}")
                names.add(name)
                if isinstance(entry, SparseSlot):
                    share = group_names[name]
                    if tables.setdefault(share, entry.table) != entry.table:
                        if entry.history is not None and not entry.share:
                            message = f"a history has the rows of slot {entry.history.of!r}: give both the same table"
                            raise SpecError(message, f"slots.{number}.table")
                        raise SpecError(f"slots of share group {entry.share!r} are in two tables", f"slots.{number}")
                    slots.append(Slot(name, SlotKind.SPARSE, entry, groups[share]))
                else:
                    assert isinstance(entry, DenseSlot | MetaSlot)
                    slots.append(Slot(name, SlotKind(entry.kind), entry))
        return cls(tuple(slots))

    @cached_property
    def by_name(self) -> dict[str, Slot]:
        """Slots by name."""
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def sparse(self) -> tuple[Slot, ...]:
        """Sparse slots, in order."""
        return tuple(slot for slot in self.slots if slot.kind is SlotKind.SPARSE)

    @cached_property
    def dense(self) -> tuple[Slot, ...]:
        """Dense slots, in order."""
        return tuple(slot for slot in self.slots if slot.kind is SlotKind.DENSE)

    @cached_property
    def meta(self) -> tuple[Slot, ...]:
        """Meta slots, in order."""
        return tuple(slot for slot in self.slots if slot.kind is SlotKind.META)

    @cached_property
    def emitted(self) -> "Schema":
        """The slots that the pipe emits: all that the job does not fill, in order; group numbers are those of the whole
        schema."""
        return Schema(tuple(slot for slot in self.slots if slot not in self.filled))

    @cached_property
    def filled(self) -> tuple[Slot, ...]:
        """Slots that the job fills: from earlier samples, then crosses."""
        return (*self.remembered, *self.crossed)

    @cached_property
    def remembered(self) -> tuple[Slot, ...]:
        """Slots that the job fills from earlier samples: histories, then counters, then statistics of rows."""
        return (*self.histories, *self.counters, *self.statistics)

    @cached_property
    def uncrossed(self) -> "Schema":
        """All slots but crosses, in order."""
        return Schema(tuple(slot for slot in self.slots if slot not in self.crossed))

    @cached_property
    def crossed(self) -> tuple[Slot, ...]:
        """Sparse slots that the job fills with crosses of other slots of the same sample, in order."""
        return tuple(slot for slot in self.sparse if slot.sparse.pairs)

    @cached_property
    def histories(self) -> tuple[Slot, ...]:
        """Sparse slots that the job fills from earlier samples, in order."""
        return tuple(slot for slot in self.sparse if slot.sparse.history is not None)

    @cached_property
    def counters(self) -> tuple[Slot, ...]:
        """Dense slots that the job fills from earlier samples, in order."""
        return tuple(s for s in self.dense if isinstance(s.entry, DenseSlot) and s.entry.counters is not None)

    @cached_property
    def statistics(self) -> tuple[Slot, ...]:
        """Dense slots that the job fills with what rows know, in order."""
        return tuple(s for s in self.dense if isinstance(s.entry, DenseSlot) and s.entry.statistics is not None)

    def check_sample(self, sample: SampleSection) -> None:
        """Raise SpecError if the sample section names a slot of the wrong kind."""
        for key, name in (("group", sample.group), ("weight", sample.weight)):
            if name is not None:
                slot = self.by_name.get(name)
                if slot is None or slot.kind is SlotKind.DENSE or (key == "weight" and slot.kind is not SlotKind.META):
                    kinds = "meta slot" if key == "weight" else "meta or sparse slot"
                    raise SpecError(f"{name!r} is not a {kinds}", f"sample.{key}")


def slot_group_names(entries: Sequence[SlotEntry]) -> dict[str, str]:
    """By sparse slot, the name of its slot group: of the slots that share rows, of the slot that a history remembers,
    or of the slot itself."""
    sparse = {name: entry for entry in entries if isinstance(entry, SparseSlot) for name in entry.expanded()}
    found = {}
    for name, entry in sparse.items():
        rows_of = name if entry.history is None or entry.share else entry.history.of
        share = sparse[rows_of].share if rows_of in sparse else None
        found[name] = f"share:{share}" if share else f"slot:{rows_of}"
    return found


def _groups_of(entries: Sequence[SlotEntry]) -> dict[str, int]:
    """The number of each slot group: the given one, or the next number that is not given to another.

    Raises SpecError for a number that two groups have, or one group has twice.
    """
    names = slot_group_names(entries)
    given: dict[str, int] = {}
    taken: dict[int, str] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, SparseSlot | RemovedSlot) and entry.group is not None:
            for name, group in _given(entry, entry.group, names):
                if taken.setdefault(group, name) != name or given.setdefault(name, group) != group:
                    raise SpecError(f"{group} is the number of two slots, or a slot has two", f"slots.{number}.group")
    free = (group for group in range(NUM_GROUPS) if group not in taken)
    found = dict(given)
    for number, entry in enumerate(entries):
        if isinstance(entry, SparseSlot):
            for name in entry.expanded():
                if (share := names[name]) not in found:
                    if (unused := next(free, None)) is None:
                        raise SpecError(f"there are more than {NUM_GROUPS:,} slot groups", f"slots.{number}")
                    found[share] = unused
    return found


def _given(entry: SparseSlot | RemovedSlot, first: int, names: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """The slot groups of an entry with a number. A removed slot has a group of its own, which no other can name."""
    for index, name in enumerate(entry.expanded()):
        if isinstance(entry, RemovedSlot):
            yield f"removed:{first + index}", first + index
        else:
            yield names[name], first + index if names[name] == f"slot:{name}" else first
