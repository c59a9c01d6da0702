"""Relative names: names of files as a store, an export, a feed or a message gives them, checked before they are used.

The writer of such a name may be a stranger: whoever may write to an object store, to a folder of exports. So a name is
joined to a folder by this module alone. A name that is not what it should be is InvalidName, a ValueError, which the
owner of the name makes an error of its own (CommitDamaged, FenceDamaged, ExportUnusable).
"""

import re
from pathlib import Path

from headrace.errors import HeadraceError

MAX_PATH_BYTES, MAX_PART_BYTES = 4_095, 255
"""Linux limits of a path and of each name in it."""
MAX_RELATIVE_BYTES = 1_024
"""Longest relative name; Headrace makes names of some 150 bytes at most. It leaves room for the folder."""
MAX_SHOWN = 100
"""Characters of a wrong name that a message repeats."""
SHA256 = re.compile(r"[0-9a-f]{64}")
"""Name of a content."""
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]|[\ud800-\udfff]|://")


def stays_below(name: str) -> bool:
    """Whether a path, joined to a folder, cannot leave it: no empty part, no "." and "..", no NUL."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def check_lengths(path: str) -> None:
    """Raise ValueError where a path, or a name in it, is longer than a file system takes."""
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"has {len(path.encode())} bytes; a path has at most {MAX_PATH_BYTES}")
    longest = max((len(name.encode()) for name in path.split("/")), default=0)
    if longest > MAX_PART_BYTES:
        raise ValueError(f"has a name of {longest} bytes; a file system takes at most {MAX_PART_BYTES}")


class InvalidName(HeadraceError, ValueError):
    """A name is not a relative path, or not of the form of its kind."""


def relative_name(name: object, form: re.Pattern[str] | None = None) -> str:
    """`name`, if it is a relative path of plain parts and matches all of `form`. Raises InvalidName.

    Refused are other types than text, an empty or a very long name, a leading "/", an empty part, ".", "..", control
    characters, a backslash, an address.
    """
    if not isinstance(name, str):
        raise InvalidName(f"{shown(name)} is not a name")
    if _UNSAFE.search(name) or not stays_below(name):
        raise InvalidName(f"{shown(name)} is not a relative path")
    if len(name.encode()) > MAX_RELATIVE_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in name.split("/")):
        raise InvalidName(f"{shown(name)} is too long for a name")
    if form is not None and form.fullmatch(name) is None:
        raise InvalidName(f"{shown(name)} is not a name of this kind")
    return name


def path_below(folder: Path, name: object, form: re.Pattern[str] | None = None) -> Path:
    """The path of `name` in `folder`; the file need not exist. Raises InvalidName, also where a symbolic link in the
    folder leads out of it."""
    path = folder / relative_name(name, form)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidName(f"{shown(name)} leads out of {folder} by a symbolic link")
    return path


def shown(name: object) -> str:
    """A name for a message: bounded, and on one line."""
    if not isinstance(name, str):
        return ascii(name)[:MAX_SHOWN] if isinstance(name, int | float | bool | None) else f"a {type(name).__name__}"
    return ascii(name) if len(name) <= MAX_SHOWN else f"{ascii(name[:MAX_SHOWN])}..."
