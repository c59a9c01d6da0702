"""What of a source a job takes: which rows go to which of its slots, which dense tensors it loads. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dataset.schema import Schema, Slot
from millrace.errors import BadInput, SpecError
from millrace.mistakes import nearest
from pserver.config import TableSection


def renamed(text: str) -> dict[str, str]:
    """The job's slots with the source's names of them, of "a,price=102". Raises SpecError."""
    names: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, _, theirs = part.partition("=")
        if ours in names:
            raise SpecError(f"slot {ours!r} is named twice", "--slots")
        names[ours] = theirs or ours
    return names


@dataclass
class Choice:
    """Which rows are taken, and how many were by slot."""

    schema: Schema
    tables: tuple[str, ...]
    """The job's tables that take rows."""
    slots: Mapping[str, str] | None
    """The job's slots that take rows, with the source's names of them; None: all, by their own names."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Rows by the job's slot."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Rows by the source's slot."""
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, schema: Schema, tables: Mapping[str, TableSection], only: Sequence[str], slots: Mapping[str, str] | None
    ) -> "Choice":
        """`only`: tables named; () means all. Raises SpecError for a table or a slot that the job does not have."""
        for table in only:
            if table not in tables:
                raise SpecError(f"the job has no table {table!r}; {nearest(table, list(tables))}", "--tables")
        known = [slot.name for slot in schema.sparse]
        for slot in slots or ():
            if slot not in known:
                raise SpecError(f"the job has no sparse slot {slot!r}; {nearest(slot, known)}", "--slots")
        return cls(schema, tuple(only) or tuple(tables), slots)

    def slot_of(self, theirs: str) -> Slot | None:
        """The slot of the job that takes rows of the source's slot `theirs`; None: nothing does."""
        self._seen.add(theirs)
        named = {there: here for here, there in self.slots.items()} if self.slots is not None else None
        ours = theirs if named is None else named.get(theirs)
        slot = self.schema.by_name.get(ours) if ours is not None else None
        if slot is None or slot.group < 0 or slot.sparse.table not in self.tables:
            return None
        return slot

    def why_ignored(self, theirs: str) -> str:
        """For people."""
        if self.slots is not None:
            return "not among --slots"
        slot = self.schema.by_name.get(theirs)
        if slot is None or slot.group < 0:
            return f"the job has no sparse slot {theirs!r}"
        return f"table {slot.sparse.table!r} is not among --tables"

    def count(self, theirs: str, rows: int) -> None:
        """`rows` of the source's slot were read."""
        slot = self.slot_of(theirs)
        counts, name = (self.ignored, theirs) if slot is None else (self.loaded, slot.name)
        counts[name] = counts.get(name, 0) + rows

    def check(self) -> None:
        """After all rows were read. Raises BadInput where a slot asked for was not there, or nothing was taken."""
        for ours, theirs in (self.slots or {}).items():
            if theirs not in self._seen:
                raise BadInput(
                    f"the source has no rows of slot {theirs!r}, for {ours!r}; {nearest(theirs, self._seen)}"
                )
        if self._seen and not any(self.loaded.values()):
            theirs_too = ", ".join(sorted(self._seen)[:12])
            raise BadInput(
                f"no row of the source belongs to a slot of the job; it has the slots {theirs_too}; "
                "say which is which with --slots ours=theirs"
            )


@dataclass(frozen=True, slots=True)
class Tensors:
    """Dense tensors, by what becomes of them."""

    loaded: tuple[str, ...]
    initialised: Mapping[str, str]
    """The model's others, and why each is as the model begins."""
    ignored: tuple[str, ...]
    """The source's others."""


Shape = tuple[int, ...]


def choose_tensors(glob: str, theirs: Mapping[str, Shape], ours: Mapping[str, Shape]) -> Tensors:
    """Those of the source whose names match `glob` and whose shapes are the model's. Raises SpecError for no match."""
    if theirs and not any(fnmatchcase(name, glob) for name in theirs):
        raise SpecError(f"{glob!r} is no tensor of the source; {nearest(glob, list(theirs))}", "--dense")

    def why_not(name: str) -> str:
        if name not in theirs:
            return "the source lacks it"
        if not fnmatchcase(name, glob):
            return "not among --dense"
        return "" if theirs[name] == ours[name] else f"of shape {list(theirs[name])} there, {list(ours[name])} here"

    reasons = {name: why_not(name) for name in ours}
    loaded = tuple(name for name, why in reasons.items() if not why)
    return Tensors(
        loaded, {name: why for name, why in reasons.items() if why}, tuple(n for n in theirs if n not in reasons)
    )
