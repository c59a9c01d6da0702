"""Keys of a job file that were renamed: the old names stay valid, in files and in logs.

Pure functions. A section declares its renamed keys (`Section.renamed`); everything else sees present names only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.errors import SpecError


class RenamedKey(NamedTuple):
    """The present place of a key."""

    now: str
    """Path of the key, "section.key"."""
    values: Mapping[str, str] = {}
    """Present values by old ones; others are unchanged."""


Renamed = Mapping[str, RenamedKey]
"""By the old path, "section.key"."""


def with_present_names(raw: Mapping[str, Any], renamed: Renamed) -> tuple[dict[str, Any], dict[str, str]]:
    """`raw` with the present names of its keys; and the names that it uses, by present name.

    Raises SpecError for a key that is given under both names.
    """
    found, written = dict(raw), dict[str, str]()
    for old, (now, values) in renamed.items():
        (section, key), (new_section, new_key) = old.split("."), now.split(".")
        if not _has(found, section, key) or not isinstance(found.get(new_section, {}), Mapping):
            continue
        if _has(found, new_section, new_key):
            raise SpecError(f"is the old name of {now}, which is given, too: remove {old}", old)
        value = found[section][key]
        found[section] = {name: each for name, each in found[section].items() if name != key}
        present = values.get(value, value) if isinstance(value, str) else value
        found[new_section] = {**found.get(new_section, {}), new_key: present}
        written[now] = old
    return found, written


def present_path(path: str, renamed: Renamed) -> str:
    """The present path of a key, or of a key below it."""
    for old, (now, _) in renamed.items():
        if path == old or path.startswith(f"{old}."):
            return now + path.removeprefix(old)
    return path


def with_written_names(line: str, written: Mapping[str, str]) -> str:
    """A message that begins with the path of a key, with the name that the file uses."""
    for now, old in written.items():
        if line.startswith((f"{now}:", f"{now}.")):
            return old + line.removeprefix(now)
    return line


def _has(raw: Mapping[str, Any], section: str, key: str) -> bool:
    return isinstance(raw.get(section), Mapping) and key in raw[section]
