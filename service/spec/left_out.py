"""The key `without` of a job file: slots that the job leaves out, though its file declares them. Pure.

It is resolved when the file is read: the job's spec, in its log and everywhere else, lacks these slots and the key.
"""

from collections.abc import Mapping
from typing import Any

from headrace.config import validate
from headrace.dataset.spec.config import SlotEntry
from headrace.errors import SpecError
from headrace.validation import nearest

WITHOUT = "without"


class _Names(SlotEntry):
    """The names of an entry of `slots`."""


def without_left_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec without the slots that its key `without` names. Raises SpecError where one cannot be left out."""
    if WITHOUT not in raw:
        return raw
    names = raw[WITHOUT]
    entries, pipe = raw.get("slots", []), raw.get("pipe", {})
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError('is a list of names of slots: ["user", "hour"]', WITHOUT)
    rest = {key: value for key, value in raw.items() if key != WITHOUT}
    if not names or not isinstance(entries, list) or not isinstance(pipe, Mapping):
        return rest  # what is wrong with the sections is said where they are checked
    kinds = {name: entry.get("kind", "sparse") for entry in entries for name in _names(entry)}
    for number, name in enumerate(names):
        if name not in kinds or kinds[name] not in ("sparse", "dense"):
            inputs = [each for each, kind in kinds.items() if kind in ("sparse", "dense")]
            raise SpecError(f"{name!r} is no slot that the model gets; {nearest(name, inputs)}", f"{WITHOUT}.{number}")
    if pipe.get("kind", "command") == "command":
        if pipe.get("protocol", "multislot") != "arrow":
            raise SpecError(
                'the pipe prints all slots of the file, and protocol = "multislot" has no names to tell them apart; '
                'use protocol = "arrow"',
                WITHOUT,
            )
        rest["pipe"] = {**pipe, "extra": "drop"}
    kept = [part for entry in entries for part in _kept(entry, frozenset(names))]
    _check_crosses(kept, names)
    return {**rest, "slots": kept}


def _names(entry: Any) -> list[str]:
    """The names of an entry; none if it is not valid, which its own check will say."""
    given = {key: entry[key] for key in ("name", "names") if key in entry} if isinstance(entry, Mapping) else {}
    try:
        return validate(_Names, given).expanded()
    except SpecError:
        return []


def _kept(entry: Any, left_out: frozenset[str]) -> list[Any]:
    """The entry with its other names; nothing if there are none."""
    names = _names(entry)
    if not left_out.intersection(names):
        return [entry]
    rest = [name for name in names if name not in left_out]
    return [{**{key: value for key, value in entry.items() if key != "name"}, "names": rest}] if rest else []


def _check_crosses(entries: list[Any], names: list[str]) -> None:
    """Raise SpecError for a slot that crosses one that is left out: the name would then be that of a field."""
    for entry in entries:
        crossed = entry.get("cross") if isinstance(entry, Mapping) else None
        for name in crossed if isinstance(crossed, list) else ():
            if name in names:
                crossing = " and ".join(map(repr, _names(entry)))
                raise SpecError(f"slot {name!r} is crossed by {crossing}: leave that out, too", WITHOUT)
