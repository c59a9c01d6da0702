"""The numbers of slot groups when the slots of a job change: each slot keeps its rows, and no number is used again.

A row's key is made with the number of its slot group (headrace.keys). Without an entry of its own, the number follows
from the order of the slots (dataset.spec.schema). Pure.
"""

from collections.abc import Iterator, Sequence

from headrace.dataset.spec.config import RemovedSlot, SlotEntry, SparseSlot
from headrace.dataset.spec.schema import Schema, slot_group_names
from headrace.errors import SpecError


def settled(old: Sequence[SlotEntry], new: Sequence[SlotEntry]) -> tuple[SlotEntry, ...]:
    """The slots of a job file, `new`, with the numbers that they have in `old`, the slots in force.

    They are unchanged where their order gives these numbers, and no slot was removed. Otherwise each sparse slot has an
    entry with its number, and each removed one an entry that keeps its number. A slot that comes back gets a new one.
    Settling the same file again over the result gives the result. Raises SpecError for another number in the file.
    """
    before, after = _numbers(old), _numbers(new)
    kept = _removed(old) | _removed(new)
    gone = {group: name for name, group in before.items() if name not in after}
    known = {name: before[name] for name in after if name in before}
    if not kept and not gone and all(after[name] == group for name, group in known.items()):
        return tuple(new)
    _check(new, known)
    numbers = dict(known)
    given = {name for entry, name in _sparse(new) if entry.group is not None}
    free = 1 + max([*before.values(), *kept, *(after[name] for name in given)], default=-1)
    for name in after:
        if name not in numbers:
            numbers[name] = after[name] if name in given else free
            free += name not in given
    return (*_written(new, numbers), *_entries_of(kept | {g: _label(old, name) for g, name in gone.items()}))


def _check(new: Sequence[SlotEntry], known: dict[str, int]) -> None:
    names = slot_group_names(new)
    for number, entry in enumerate(new):
        if isinstance(entry, SparseSlot) and entry.group is not None:
            for index, name in enumerate(entry.expanded()):
                group = entry.group + index if names[name] == f"slot:{name}" else entry.group
                if (before := known.get(names[name], group)) != group:
                    raise SpecError(
                        f"slot {name!r} has the number {before} in the store, not {group}; leave `group` out",
                        f"slots.{number}.group",
                    )


def _sparse(entries: Sequence[SlotEntry]) -> Iterator[tuple[SparseSlot, str]]:
    """Each sparse entry with each of its slot groups."""
    names = slot_group_names(entries)
    for entry in entries:
        if isinstance(entry, SparseSlot):
            for name in entry.expanded():
                yield entry, names[name]


def _numbers(entries: Sequence[SlotEntry]) -> dict[str, int]:
    """The number of each slot group, by name, in order."""
    names = slot_group_names(entries)
    return {names[slot.name]: slot.group for slot in Schema.of(entries).sparse}


def _removed(entries: Sequence[SlotEntry]) -> dict[int, str]:
    """The name of each removed slot, by its number."""
    return {
        entry.group + index: name
        for entry in entries
        if isinstance(entry, RemovedSlot)
        for index, name in enumerate(entry.expanded())
    }


def _label(entries: Sequence[SlotEntry], group_name: str) -> str:
    """The first slot of a slot group."""
    return next(name for name, group in slot_group_names(entries).items() if group == group_name)


def _written(entries: Sequence[SlotEntry], numbers: dict[str, int]) -> Iterator[SlotEntry]:
    """The entries, with one for each sparse slot, and without removed ones."""
    names = slot_group_names(entries)
    for entry in entries:
        if isinstance(entry, SparseSlot):
            for name in entry.expanded():
                group = numbers[names[name]]
                yield entry.model_copy(update={"name": name, "names": (), "group": group})
        elif not isinstance(entry, RemovedSlot):
            yield entry


def _entries_of(removed: dict[int, str]) -> Iterator[RemovedSlot]:
    for group, name in sorted(removed.items()):
        yield RemovedSlot(kind="removed", name=name, group=group)
