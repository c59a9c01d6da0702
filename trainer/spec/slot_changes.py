"""How the slots of two specs differ: added, removed, moved, or altered so that their rows would mean another thing.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema, Slot

ROWS = ("table", "share", "values", "history")
"""Keys of a sparse slot that its rows depend on."""


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """The changes from one list of slots to another, by name of the slot."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    """Slots with another place among those that both lists have."""
    altered: Mapping[str, str] = field(default_factory=dict)
    """Slots of both lists that would need other rows or other weights, each with the reason."""
    settings: tuple[str, ...] = ()
    """Slots of both lists with other settings that neither rows nor weights depend on."""

    def words(self) -> str:
        """The changes in words."""
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (
                ("added", self.added),
                ("removed", self.removed),
                ("in another place", self.moved),
                ("with other settings", self.settings),
                ("not carried over:", tuple(f"{name} ({why})" for name, why in self.altered.items())),
            )
            if names
        ]
        return "; ".join(parts) or "none"


def slot_changes(old: Schema, new: Schema) -> SlotChanges:
    """The changes from the slots `old` to the slots `new`."""
    both = [slot.name for slot in new.slots if slot.name in old.by_name]
    before = [slot.name for slot in old.slots if slot.name in new.by_name]
    pairs = [(old.by_name[name], new.by_name[name]) for name in both]
    return SlotChanges(
        added=tuple(slot.name for slot in new.slots if slot.name not in old.by_name),
        removed=tuple(slot.name for slot in old.slots if slot.name not in new.by_name),
        moved=tuple(name for name, there in zip(both, before, strict=True) if name != there),
        altered={was.name: why for was, now in pairs if (why := _altered(was, now))},
        settings=tuple(was.name for was, now in pairs if not _altered(was, now) and _settings(was) != _settings(now)),
    )


def _altered(was: Slot, now: Slot) -> str:
    """The reason why a slot is another one; empty if it is the same."""
    if was.kind is not now.kind:
        return f"it was {was.kind} and is {now.kind}"
    match was.entry, now.entry:
        case SparseSlot() as before, SparseSlot() as after:
            for key in ROWS:
                if (one := getattr(before, key)) != (other := getattr(after, key)):
                    return f"{key} was {one!r} and is {other!r}"
            if (before.pooling == "none") != (after.pooling == "none"):
                return f"pooling was {before.pooling!r} and is {after.pooling!r}"
            if was.group != now.group:
                return f"group was {was.group} and is {now.group}"
        case DenseSlot(size=before_size), DenseSlot(size=after_size) if before_size != after_size:
            return f"size was {before_size} and is {after_size}"
        case DenseSlot(counters=one), DenseSlot(counters=other) if one != other:
            return f"counters was {one!r} and is {other!r}"
        case DenseSlot(statistics=asked), DenseSlot(statistics=asks) if asked != asks:
            return f"statistics was {asked!r} and is {asks!r}"
    return ""


def _settings(slot: Slot) -> object:
    return slot.entry.model_dump(exclude={"name", "names", "group"})
