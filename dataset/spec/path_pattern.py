"""Patterns of paths: which files they match, in which order, and when a folder of them may be read.

A pattern is a glob in which `{name}` is a field: like `*` it matches within one part of a path. Files are ordered by
the values of the fields first (numbers as numbers). `**` as a whole part matches any number of folders. With a marker
file (`ready`), files belong to a folder: the path up to the last field, or the file's own folder if the pattern has no
field. Decisions are pure functions of listed names; `find`, `matches` and `listed_markers` read the disk.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from headrace.dataset.spec.path_part import PathPart
from headrace.dataset.spec.path_search import DEEP, find_files, is_match
from headrace.deadline import Deadline
from headrace.relative_names import check_lengths

MAX_CHARS = 4_096
"""Longest pattern; Linux has no longer paths."""
MAX_FIELDS, MAX_WILDCARDS = 16, 32
"""Most fields and wildcards of a pattern; a field is a wildcard, too. They bound the work for each file."""
MAX_DIGITS = 300
"""A longer run of digits is ordered as text. File names on Linux have at most 255 characters."""

SortKey = tuple[tuple[tuple[int, int, str], ...], ...]


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that compares runs of digits as numbers: "9" before "10"."""
    parts = filter(None, re.split(r"(\d+)", text))
    return tuple(
        (0, int(part), part) if part.isdecimal() and len(part) <= MAX_DIGITS else (1, 0, part) for part in parts
    )


@dataclass(frozen=True)
class Pattern:
    """One entry of `paths`."""

    text: str

    @cached_property
    def parts(self) -> tuple[PathPart, ...]:
        """The parts between the slashes. `**` at the end matches any file at any depth."""
        named = [PathPart(text) for text in split_path(self.text)]
        parts = [part if part.is_literal else PathPart(part.text.lstrip("/")) for part in named]
        return (*parts, PathPart("*")) if parts[-1].text == DEEP else tuple(parts)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of its fields, in order, without repeats."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.fields))

    @property
    def num_folder_parts(self) -> int | None:
        """Number of parts of a path that name its folder; None: all except the file's name."""
        parts = self.text.split("/")[:-1]
        with_field = [number for number, part in enumerate(parts) if PathPart(part).fields]
        return with_field[-1] + 1 if with_field else None

    def check(self) -> None:
        """Raise ValueError if it exceeds the bounds of this module."""
        wildcards = sum(part.num_wildcards for part in self.parts)
        for number, most, what in (
            (len(self.text), MAX_CHARS, "characters"),
            (len(self.fields), MAX_FIELDS, "fields"),
            (wildcards, MAX_WILDCARDS, "wildcards (fields and stars)"),
        ):
            if number > most:
                raise ValueError(f"has {number} {what}; a pattern has at most {most}. Replace wildcards by fixed text")
        check_lengths("/".join(part.text for part in self.parts if part.is_literal))

    def values(self, path: str) -> dict[str, str] | None:
        """The values of the fields in `path`; None if it does not match.

        The first wildcard matches as much as it can, then the second, and so on. A field that occurs twice has one
        value, from the part with the fewest wildcards.
        """
        texts, runs = split_path(path), self._runs
        first, last = runs[0], runs[-1]
        low, high = len(first), len(texts) - len(last)
        if len(runs) == 1:
            return _match(zip(first, texts, strict=True), {}) if high == 0 else None
        if high < low:
            return None
        ends = [*zip(first, texts, strict=False), *zip(last, texts[high:], strict=True)]
        values = _match(ends, {})
        for run in reversed(runs[1:-1]):
            if values is None:
                return None
            values, high = _match_rightmost(run, texts, low, high, values)
        return values

    def key(self, path: str) -> SortKey | None:
        """The sort key of a path; None if the pattern has fields and does not match."""
        values = self.values(path) if self.fields else {}
        return None if values is None else (*(natural_key(values[name]) for name in self.fields), natural_key(path))

    def folder(self, path: str) -> str:
        """The folder whose marker allows `path` to be read."""
        return "/".join(path.split("/")[:-1][: self.num_folder_parts])

    def find(self, root: Path, deadline: Deadline | None = None) -> Iterator[str]:
        """The files that match, even if a field that occurs twice has two values. Raises DeadlineExceeded."""
        return find_files(root, self.parts, deadline)

    def finds(self, path: str) -> bool:
        """Whether it matches the path of a file, and skips no part of it."""
        return is_match(split_path(path), self.parts) and self.values(path) is not None

    def matches(self, root: Path) -> list[str]:
        """The files that match now, in order, as paths relative to `root` (or absolute, like the pattern)."""
        keyed = [(key, path) for path in self.find(root) if (key := self.key(path)) is not None]
        return [path for _, path in sorted(keyed)]

    @cached_property
    def _runs(self) -> list[list[PathPart]]:
        """The runs of parts before, between and after the `**` parts."""
        runs: list[list[PathPart]] = [[]]
        for part in self.parts:
            if part.text == DEEP:
                runs.append([])
            else:
                runs[-1].append(part)
        return runs


def split_path(path: str) -> list[str]:
    """The parts of a path; the first of an absolute path is empty. Extra slashes join the next part."""
    return re.split(r"(?<!/)/", path)


def _match(pairs: Iterable[tuple[PathPart, str]], known: Mapping[str, str]) -> dict[str, str] | None:
    """Values of the fields, including `known`, if each part matches its text; parts with few wildcards first."""
    values = dict(known)
    for part, text in sorted(pairs, key=lambda pair: pair[0].num_wildcards):
        found = part.match(text, values)
        if found is None:
            return None
        values.update(found)
    return values


def _match_rightmost(
    run: Sequence[PathPart], texts: Sequence[str], low: int, high: int, known: Mapping[str, str]
) -> tuple[dict[str, str] | None, int]:
    """Match `run` between `low` and `high`, as far right as possible; return the values and where it begins."""
    for at in range(high - len(run), low - 1, -1):
        values = _match(zip(run, texts[at : at + len(run)], strict=True), known)
        if values is not None:
            return values, at
    return None, low


def _checked(text: str) -> str:
    Pattern(text).check()
    return text


PathPattern = Annotated[str, AfterValidator(_checked)]
"""An entry of `paths` in a job file."""


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The decision which files to open."""

    files: tuple[str, ...]
    """Files to open now, in order."""
    late: tuple[str, ...]
    """Files that appeared in folders opened before; never read, only counted."""
    waiting: tuple[str, ...]
    """Folders without their marker, in order."""


def open_folders(
    pattern: Pattern,
    paths: Sequence[str],
    marked: Collection[str],
    opened: Collection[str],
    known: Collection[str],
    *,
    in_turn: bool,
) -> FileSelection:
    """Decide which of `paths` (in order) may be read now.

    `marked`: folders with their marker; `opened`: folders opened before; `known`: files opened before, or found late.
    With `in_turn`, a folder without its marker blocks those after it, so that folders are read in order; otherwise it
    is skipped.
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
    return FileSelection(tuple(files), tuple(late), tuple(waiting))


def listed_markers(root: Path, folders: Collection[str], ready: str) -> Iterator[str]:
    """The `folders` that contain the marker."""
    return (folder for folder in folders if (root / folder / ready).exists())
