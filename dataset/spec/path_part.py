"""One part of a path pattern, the text between two slashes: matched in linear time, without backtracking.

The text between two wildcards has a fixed length. The first and the last fixed text are at the ends; the others are
placed from right to left, each as far right as possible. So the first wildcard matches as much as it can, then the
second, and so on. `dataset.spec.path_pattern` combines parts to a pattern.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

TOKEN = re.compile(r"\{(?P<field>[A-Za-z_]\w*+)\}|(?P<star>\*++)|(?P<one>\?|\[!?+\]?+[^\]]*+\])")
"""A field, stars, or one character: any, or one of a set as in `fnmatch`."""


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Matches any text: a star or a field."""

    field: str | None
    """Name of the field; None: a star."""


Fixed: TypeAlias = str | re.Pattern[str]
"""Literal text, or a pattern of one character."""


@dataclass(frozen=True)
class PathPart:
    """One part of a pattern."""

    text: str

    @cached_property
    def tokens(self) -> tuple[Fixed | Wildcard, ...]:
        """The tokens of the part, in order."""
        return tuple(_tokens(self.text))

    @cached_property
    def is_literal(self) -> bool:
        """Whether it matches only its own text."""
        return self.tokens in ((), (self.text,))

    @property
    def fields(self) -> list[str]:
        """Names of its fields, in order, with repeats."""
        return [token.field for token in self.tokens if isinstance(token, Wildcard) and token.field is not None]

    @cached_property
    def num_wildcards(self) -> int:
        """Number of its wildcards."""
        return sum(isinstance(token, Wildcard) for token in self.tokens)

    def accepts(self, name: str) -> bool:
        """Whether it matches the name of a file or folder. A hidden one needs a part that begins as it does."""
        if self.is_literal:
            return name == self.text
        hidden = is_hidden(name) and not self.text.startswith(name[0])
        return not hidden and self.match(name, {}) is not None

    def match(self, text: str, known: Mapping[str, str]) -> dict[str, str] | None:
        """The values of the fields that are not `known`; None if `text` does not match."""
        wildcards, fixed = _split(self.tokens, known)
        places = _places(fixed, text)
        if places is None:
            return None
        values: dict[str, str] = {}
        for number, wildcard in enumerate(wildcards):
            value = text[places[number] + _length(fixed[number]) : places[number + 1]]
            if wildcard.field is not None and values.setdefault(wildcard.field, value) != value:
                return None
        return values


def is_hidden(name: str) -> bool:
    """Whether wildcards skip the name of a file or folder: one of a writer's own, such as "_temporary" or ".part".

    "_day=7" is the folder of a partition, as for other readers of such folders."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _tokens(text: str) -> Iterator[Fixed | Wildcard]:
    end = 0
    for match in TOKEN.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        if match["one"] is not None:
            yield re.compile(fnmatch.translate(match["one"]))
        else:
            yield Wildcard(match["field"])
        end = match.end()
    if end < len(text):
        yield text[end:]


def _split(tokens: Iterable[Fixed | Wildcard], known: Mapping[str, str]) -> tuple[list[Wildcard], list[list[Fixed]]]:
    """The wildcards, and the fixed texts before, between and after them. A known field is replaced by its value."""
    wildcards: list[Wildcard] = []
    fixed: list[list[Fixed]] = [[]]
    for token in tokens:
        if not isinstance(token, Wildcard):
            fixed[-1].append(token)
        elif token.field is not None and token.field in known:
            fixed[-1].append(known[token.field])
        else:
            wildcards.append(token)
            fixed.append([])
    return wildcards, fixed


def _places(fixed: Sequence[Sequence[Fixed]], text: str) -> list[int] | None:
    """The index of each fixed text; None if they do not fit."""
    first, last = fixed[0], fixed[-1]
    low, high = _length(first), len(text) - _length(last)
    if len(fixed) == 1:
        return [0] if high == 0 and _fits(first, text, 0) else None
    if high < low or not _fits(first, text, 0) or not _fits(last, text, high):
        return None
    places = [high]
    for middle in reversed(fixed[1:-1]):
        candidates = range(places[-1] - _length(middle), low - 1, -1)
        place = next((at for at in candidates if _fits(middle, text, at)), None)
        if place is None:
            return None
        places.append(place)
    return [0, *reversed(places)]


def _length(fixed: Iterable[Fixed]) -> int:
    return sum(len(token) if isinstance(token, str) else 1 for token in fixed)


def _fits(fixed: Iterable[Fixed], text: str, at: int) -> bool:
    for token in fixed:
        if isinstance(token, str):
            if not text.startswith(token, at):
                return False
            at += len(token)
        elif token.match(text, at, at + 1) is None:
            return False
        else:
            at += 1
    return True
