"""Finds the files that match a path pattern. Each folder is listed once, however many `**` the pattern has.

For each folder the search keeps the numbers of pattern parts that its path may match, and compares the folder's entries
with the parts that may follow. Wildcards skip names that begin with a dot or an underscore.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dataset.spec.path_part import PathPart, is_hidden
from headrace.deadline import Deadline

DEEP = "**"
"""A part of a pattern that matches any number of folders."""
Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SearchFolder:
    """A folder to search."""

    path: str
    """Prefix of the paths of its files."""
    matched: frozenset[int]
    """The numbers of pattern parts that its path may match; several if the pattern has DEEP."""
    above: frozenset[Identity] = frozenset()
    """The folders above it that DEEP matched. A link to one of them is not followed, to avoid an endless loop."""


def find_files(root: Path, parts: Sequence[PathPart], deadline: Deadline | None = None) -> Iterator[str]:
    """The files below `root` whose path matches `parts`; absolute paths if the first part is empty.

    Skips folders that cannot be read. Raises DeadlineExceeded.
    """
    absolute = parts[0].text == ""
    left = [SearchFolder("/" if absolute else "", _reached(parts, {int(absolute)}))]
    while left:
        folder = left.pop()
        above = folder.above
        if any(parts[number].text == DEEP for number in folder.matched if number < len(parts)):
            identity = _identity(root / folder.path)
            if identity is None or identity in above:
                continue
            above |= {identity}
        inside: list[SearchFolder] = []
        for name, is_folder in _entries(root / folder.path, parts, folder.matched, deadline):
            path = f"{folder.path}{'' if folder.path in ('', '/') else '/'}{name}"
            matched = _reached(parts, _matched(parts, folder.matched, name))
            if len(parts) in matched and os.path.isfile(root / path):
                yield path
            if is_folder and any(number < len(parts) for number in matched):
                inside.append(SearchFolder(path, matched, above))
        left.extend(reversed(inside))


def is_match(names: Iterable[str], parts: Sequence[PathPart]) -> bool:
    """Whether a search would find the path with these names, if it is a file's."""
    matched = _reached(parts, {0})
    for name in names:
        matched = _reached(parts, _matched(parts, matched, name))
    return len(parts) in matched


def _entries(
    place: Path, parts: Sequence[PathPart], matched: Collection[int], deadline: Deadline | None
) -> list[tuple[str, bool]]:
    """The names in a folder that may match, in order, and whether they may be folders.

    The folder is not listed if only literal names can match.
    """
    if deadline is not None:
        deadline.check(f"listing {place}")
    wanted = [parts[number] for number in matched if number < len(parts)]
    if all(part.is_literal for part in wanted):
        return sorted({(part.text, True) for part in wanted})
    found: list[tuple[str, bool]] = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if deadline is not None:
                    deadline.check(f"listing {place}")
                found.append((entry.name, entry.is_dir()))
    except (OSError, ValueError):
        pass
    return sorted(found)


def _identity(place: Path) -> Identity | None:
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _matched(parts: Sequence[PathPart], matched: Collection[int], name: str) -> set[int]:
    """The numbers of parts that the path may match after `name` is added."""
    after: set[int] = set()
    for number in matched:
        if number == len(parts):
            continue
        part = parts[number]
        if part.text == DEEP:
            after.update(() if is_hidden(name) else (number,))
        elif part.accepts(name):
            after.add(number + 1)
    return after


def _reached(parts: Sequence[PathPart], matched: Collection[int]) -> frozenset[int]:
    """`matched`, and the numbers reached if DEEP matches no folder."""
    reached: set[int] = set()
    for number in matched:
        reached.add(number)
        while number < len(parts) and parts[number].text == DEEP:
            number += 1
            reached.add(number)
    return frozenset(reached)
