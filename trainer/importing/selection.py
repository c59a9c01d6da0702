"""The selection of an import: which rows go to which slots of the job, and which dense tensors are loaded. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import BadInput, SpecError
from headrace.pserver.config import TableSection
from headrace.validation import nearest, no_such


def parse_slots(text: str) -> dict[str, str]:
    """Parse "a,price=102": the source's slot name by the job's. Raises SpecError."""
    names: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, _, theirs = part.partition("=")
        if ours in names:
            raise SpecError(f"slot {ours!r} is named twice", "--slots")
        names[ours] = theirs or ours
    return names


@dataclass
class ImportSelection:
    """The rows to import, and their counts by slot."""

    schema: Schema
    tables: tuple[str, ...]
    """The job's tables that receive rows."""
    slots: Mapping[str, str] | None
    """The source's slot name, by the job's slot that receives rows; None: all slots, under the same names."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Number of imported rows, by the job's slot."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Number of ignored rows, by the source's slot."""
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, schema: Schema, tables: Mapping[str, TableSection], only: Sequence[str], slots: Mapping[str, str] | None
    ) -> "ImportSelection":
        """`only`: names of tables; () means all. Raises SpecError for an unknown table or slot."""
        for table in only:
            if table not in tables:
                raise SpecError(no_such("table", table, list(tables)), "--tables")
        known = [slot.name for slot in schema.sparse]
        for slot in slots or ():
            if slot not in known:
                raise SpecError(no_such("sparse slot", slot, known), "--slots")
        return cls(schema, tuple(only) or tuple(tables), slots)

    def slot_of(self, theirs: str) -> Slot | None:
        """The job's slot that receives rows of the source's slot `theirs`; None: they are ignored."""
        self._seen.add(theirs)
        named = {there: here for here, there in self.slots.items()} if self.slots is not None else None
        ours = theirs if named is None else named.get(theirs)
        slot = self.schema.by_name.get(ours) if ours is not None else None
        if slot is None or slot.group < 0 or slot.sparse.table not in self.tables:
            return None
        return slot

    def why_ignored(self, theirs: str) -> str:
        """The reason why rows of the source's slot `theirs` are ignored, for people."""
        if self.slots is not None:
            return "not among --slots"
        slot = self.schema.by_name.get(theirs)
        if slot is None or slot.group < 0:
            return f"the job has no sparse slot {theirs!r}"
        return f"table {slot.sparse.table!r} is not among --tables"

    def count(self, theirs: str, rows: int) -> None:
        """Count `rows` of the source's slot `theirs`."""
        slot = self.slot_of(theirs)
        counts, name = (self.ignored, theirs) if slot is None else (self.loaded, slot.name)
        counts[name] = counts.get(name, 0) + rows

    def check(self) -> None:
        """After all rows were read. Raises BadInput if a requested slot was missing, or if nothing was imported."""
        for ours, theirs in (self.slots or {}).items():
            if theirs not in self._seen:
                raise BadInput(
                    f"the source has no rows of slot {theirs!r}, for {ours!r}; {nearest(theirs, self._seen)}"
                )
        if self._seen and not any(self.loaded.values()):
            theirs_too = ", ".join(sorted(self._seen)[:12])
            raise BadInput(
                f"no row of the source belongs to a slot of the job; it has the slots {theirs_too}; "
                "map them with --slots ours=theirs"
            )


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """The dense tensors of an import."""

    loaded: tuple[str, ...]
    initialised: Mapping[str, str]
    """The model's other tensors, each with the reason why it keeps its initial value."""
    ignored: tuple[str, ...]
    """The source's other tensors."""


Shape = tuple[int, ...]


def choose_tensors(glob: str, theirs: Mapping[str, Shape], ours: Mapping[str, Shape]) -> TensorSelection:
    """The source's tensors that match `glob` and have the model's shapes. Raises SpecError for no match."""
    if theirs and not any(fnmatchcase(name, glob) for name in theirs):
        raise SpecError(f"{glob!r} matches no tensor of the source; {nearest(glob, list(theirs))}", "--dense")

    def why_not(name: str) -> str:
        if name not in theirs:
            return "the source lacks it"
        if not fnmatchcase(name, glob):
            return "not among --dense"
        return "" if theirs[name] == ours[name] else f"of shape {list(theirs[name])} there, {list(ours[name])} here"

    reasons = {name: why_not(name) for name in ours}
    loaded = tuple(name for name, why in reasons.items() if not why)
    return TensorSelection(
        loaded, {name: why for name, why in reasons.items() if why}, tuple(n for n in theirs if n not in reasons)
    )
