"""The slots of a job in a fixed order, resolved from the job file."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from dataset.spec.config import DenseSlot, HistorySection, MetaSlot, SampleSection, SlotEntry, SlotKind, SparseSlot
from millrace.errors import SpecError


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


@dataclass(frozen=True)
class Schema:
    """All slots, in the order of the spec."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, entries: Sequence[SlotEntry]) -> "Schema":
        """Resolve ranges and share groups. Raises SpecError."""
        slots: list[Slot] = []
        names: set[str] = set()
        groups: dict[str, int] = {}
        tables: dict[str, str] = {}
        shares = {name: entry.share for entry in entries if isinstance(entry, SparseSlot) for name in entry.expanded()}
        for number, entry in enumerate(entries):
            for name in entry.expanded():
                if name in names:
                    raise SpecError(f"slot {name!r} is declared twice", f"slots.{number}")
                names.add(name)
                if isinstance(entry, SparseSlot):
                    rows_of = name if entry.history is None or entry.share else entry.history.of
                    share = f"share:{shares[rows_of]}" if shares.get(rows_of) else f"slot:{rows_of}"
                    if tables.setdefault(share, entry.table) != entry.table:
                        if entry.history is not None and not entry.share:
                            message = f"a history has the rows of slot {rows_of!r}: give both the same table"
                            raise SpecError(message, f"slots.{number}.table")
                        raise SpecError(f"slots of share group {entry.share!r} are in two tables", f"slots.{number}")
                    group = groups.setdefault(share, len(groups))
                    slots.append(Slot(name, SlotKind.SPARSE, entry, group))
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
        """The slots that the pipe emits: all but histories, in order; group numbers are those of the whole schema."""
        return Schema(tuple(slot for slot in self.slots if slot not in self.histories))

    @cached_property
    def histories(self) -> tuple[Slot, ...]:
        """Sparse slots that the job fills from earlier samples, in order."""
        return tuple(slot for slot in self.sparse if slot.sparse.history is not None)

    def check_sample(self, sample: SampleSection) -> None:
        """Raise SpecError if the sample section names a slot of the wrong kind."""
        for key, name in (("group", sample.group), ("weight", sample.weight)):
            if name is not None:
                slot = self.by_name.get(name)
                if slot is None or slot.kind is SlotKind.DENSE or (key == "weight" and slot.kind is not SlotKind.META):
                    kinds = "meta slot" if key == "weight" else "meta or sparse slot"
                    raise SpecError(f"{name!r} is not a {kinds}", f"sample.{key}")
