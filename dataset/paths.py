"""Which files a source of files has, in which order, and when a folder of them may be read.

A pattern is a glob in which `{name}` stands for a field: like `*` it matches within one part of a path, and files are
ordered by the values of the fields first (numbers as numbers). With a marker (`ready`), files belong to a folder:
the part of the path up to the last field, or the file's own folder where the pattern has none. Deciding is pure,
on names already listed; `matches` and `listed_markers` look at the disk.
"""

import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")

SortKey = tuple[tuple[tuple[int, int, str], ...], ...]


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that takes runs of digits as numbers: "9" before "10"."""
    parts = filter(None, re.split(r"(\d+)", text))
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


@dataclass(frozen=True)
class Pattern:
    """One entry of `paths`."""

    text: str

    @property
    def glob(self) -> str:
        """The pattern with each field as `*`."""
        return FIELD.sub("*", self.text)

    @property
    def num_folder_parts(self) -> int | None:
        """How many parts of a path name its folder; None: all but the file's own name."""
        parts = self.text.split("/")[:-1]
        with_field = [number for number, part in enumerate(parts) if FIELD.search(part)]
        return with_field[-1] + 1 if with_field else None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts: list[str] = []
        seen: set[str] = set()
        for part in re.split(r"(\{[A-Za-z_]\w*\}|\*\*/|\*|\?|\[[^\]]*\])", self.text):
            field = FIELD.fullmatch(part)
            if field is not None:
                parts.append(f"(?P={field[1]})" if field[1] in seen else f"(?P<{field[1]}>[^/]*)")
                seen.add(field[1])
            elif part.startswith("[") and part.endswith("]"):
                parts.append("[^" + part[2:] if part.startswith("[!") else part)
            else:
                parts.append({"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part)))
        return re.compile("".join(parts), re.DOTALL)

    def key(self, path: str) -> SortKey | None:
        """Where a matching path comes in the order; None where a field that stands twice has two values."""
        match = self._regex.fullmatch(path)
        if match is None:
            return None if FIELD.search(self.text) else (natural(path),)
        return (*(natural(value) for value in match.groups()), natural(path))

    def folder(self, path: str) -> str:
        """The folder whose marker says that `path` may be read."""
        return "/".join(path.split("/")[:-1][: self.num_folder_parts])

    def matches(self, root: Path) -> list[str]:
        """Files below `root` that match now, as paths relative to it (or absolute as the pattern is), in order."""
        found = [path for path in glob.iglob(self.glob, root_dir=root, recursive=True) if os.path.isfile(root / path)]
        keyed = [(key, path) for path in found if (key := self.key(path)) is not None]
        return [path for _, path in sorted(keyed)]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a look at the folders decided."""

    files: tuple[str, ...]
    """Files to open now, in order."""
    late: tuple[str, ...]
    """Files that appeared in folders already opened: never read, counted."""
    waiting: tuple[str, ...]
    """Folders seen that lack their marker, in order."""


def open_folders(
    pattern: Pattern,
    paths: Sequence[str],
    marked: Collection[str],
    opened: Collection[str],
    known: Collection[str],
    *,
    in_turn: bool,
) -> Opening:
    """Decide which of `paths` (in order) may be read now.

    `marked` are the folders that have their marker, `opened` those opened before, `known` the files opened or found
    late before. With `in_turn` a folder without its marker holds back those after it, so that a folder is never
    read before an earlier one that holds files; without, it is passed over.
    """
    files: list[str] = []
    late: list[str] = []
    waiting: list[str] = []
    for path in paths:
        folder = pattern.folder(path)
        if path in known:
            continue
        if folder in opened:
            late.append(path)
        elif folder not in marked:
            if folder not in waiting:
                waiting.append(folder)
        elif not (in_turn and waiting):
            files.append(path)
    return Opening(tuple(files), tuple(late), tuple(waiting))


def listed_markers(root: Path, folders: Collection[str], ready: str) -> Iterator[str]:
    """Those of `folders` that hold the marker."""
    return (folder for folder in folders if (root / folder / ready).exists())
