"""Facts about the fields of a sample of events: types, how often present, distinct values, ranges, lengths of lists.

It only observes. service.planning.field_roles decides what a field may be good for.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

SEPARATOR = "."
"""Between the names of a path."""
MAX_FIELDS = 1000
"""Fields that are observed, in the order in which they appear; others are only counted."""
MAX_CHILDREN = 200
"""Fields of one object below the event. One with more is taken for a mapping of ids, and left out."""
MAX_PATH = 120
"""Longest path; a service takes names of 128 characters."""
MAX_DEPTH = 8
"""Objects in objects that are looked into."""
MAX_DISTINCT = 100_000
"""Distinct values of a field that are counted; beyond it, there are "more than" so many."""
MAX_TEXT = 100
"""Characters of a text by which it is told from others."""
MAX_NUMBERS = 20_000
"""Numbers of a field that are kept for its quantiles: the first ones."""
MAX_LISTS = 32
"""Lists that are compared with each other for membership: the first ones."""
MOST = 1e300
"""Greatest size of a number; a greater one counts as this."""
NAME = re.compile(r"[^./\\\"'\s\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,64}")
"""Names of fields that a job file can name on a path."""

Scalar: TypeAlias = bool | int | float | str


class ValueKind(StrEnum):
    """Types of values in JSON."""

    BOOL = "true or false"
    WHOLE = "whole number"
    NUMBER = "number"
    TEXT = "text"


@dataclass(slots=True)
class FieldFacts:
    """Facts about one field, at a path such as "user.id". Values are those of all lists on the way."""

    path: str
    within: str | None = None
    """The list of objects that it is a field of."""
    num_present: int = 0
    """Events with a value, or with a list."""
    num_null: int = 0
    """Events with null, or with a null in the list; NaN and infinity count as null."""
    num_lists: int = 0
    """Events where it is a list, or lies in one."""
    num_nested: int = 0
    """Events with a list inside a list, which no slot can take."""
    num_values: int = 0
    kinds: Counter[ValueKind] = field(default_factory=Counter)
    distinct: dict[Scalar, int] = field(default_factory=dict)
    """Number of times by value, of the first MAX_DISTINCT values."""
    numbers: list[float] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf
    min_len: int | None = None
    """Fewest elements of a list."""
    max_len: int = 0
    """Most elements of a list."""
    num_empty: int = 0
    """Events with an empty list."""
    num_words: int = 0
    """Words in texts, between white space."""
    num_sorted: int = 0
    """Values that are not below the one before: numbers by size, texts by their letters, as ISO times are in order."""
    example: Scalar | None = None
    last_text: str = ""

    @property
    def is_list(self) -> bool:
        """Whether it is a list in at least one event."""
        return self.num_lists > 0

    @property
    def is_capped(self) -> bool:
        """Whether there are more distinct values than were counted."""
        return len(self.distinct) >= MAX_DISTINCT

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return self.num_values > 0 and self.kinds[ValueKind.WHOLE] == self.num_values

    @property
    def is_bool(self) -> bool:
        """Whether all values are true or false."""
        return self.num_values > 0 and self.kinds[ValueKind.BOOL] == self.num_values

    @property
    def is_number(self) -> bool:
        """Whether all values are numbers, whole or not."""
        return self.num_values > 0 and self.kinds[ValueKind.WHOLE] + self.kinds[ValueKind.NUMBER] == self.num_values

    @property
    def is_text(self) -> bool:
        """Whether all values are texts."""
        return self.num_values > 0 and self.kinds[ValueKind.TEXT] == self.num_values

    @property
    def is_binary(self) -> bool:
        """Whether it has both of 0 and 1, or of false and true, and nothing else."""
        return (self.is_bool or self.is_whole) and set(self.distinct) == {0, 1}

    @property
    def mean_len(self) -> float:
        """Values an event."""
        return self.num_values / max(1, self.num_present)

    def quantile(self, share: float) -> float:
        """The number below which `share` of the numbers lie, of those kept."""
        ordered = sorted(self.numbers)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def observe(self, values: Sequence[Any], *, listed: bool) -> None:
        """Add one event's values."""
        known = [value for value in values if value is not None and not _is_odd(value)]
        self.num_null += len(known) < len(values)
        if not listed and not known:
            return
        self.num_present += 1
        self.num_lists += listed
        self.num_empty += listed and not values
        self.max_len = max(self.max_len, len(values))
        self.min_len = len(values) if self.min_len is None else min(self.min_len, len(values))
        for value in known:
            self._add(value)

    def _add(self, value: Scalar) -> None:
        self.num_values += 1
        if self.example is None:
            self.example = value
        match value:
            case bool():
                self.kinds[ValueKind.BOOL] += 1
            case int() | float():
                self.kinds[ValueKind.WHOLE if isinstance(value, int) else ValueKind.NUMBER] += 1
                self._add_number(value)
            case _:
                self.kinds[ValueKind.TEXT] += 1
                self.num_words += len(value.split())
                value = value[:MAX_TEXT]
                self.num_sorted += value >= self.last_text
                self.last_text = value
        if value in self.distinct:
            self.distinct[value] += 1
        elif not self.is_capped:
            self.distinct[value] = 1

    def _add_number(self, value: float) -> None:
        number = float(min(max(value, -MOST), MOST))
        self.num_sorted += not self.numbers or number >= self.numbers[-1]
        self.low, self.high = min(self.low, number), max(self.high, number)
        if len(self.numbers) < MAX_NUMBERS:
            self.numbers.append(number)


@dataclass(slots=True)
class Membership:
    """How often the values of one list are among those of another list of the same event."""

    num_within: int = 0
    """Events where the first list has values, and all of them are in the second."""
    num_judged: int = 0
    """Events where the first list has values."""


@dataclass(slots=True)
class EventFacts:
    """Facts about all fields of a sample."""

    num_events: int = 0
    fields: dict[str, FieldFacts] = field(default_factory=dict)
    """By path, in the order of appearance."""
    members: dict[tuple[str, str], Membership] = field(default_factory=dict)
    """By the paths of two lists."""
    equally_long: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether two lists had the same length in every event that has one of them."""
    mappings: set[str] = field(default_factory=set)
    """Objects that look like mappings of ids; their fields are left out."""
    num_left_out: int = 0
    """Values of fields beyond MAX_FIELDS, or too deep, or with a name that no path can have."""
    _children: Counter[str] = field(default_factory=Counter)

    def observe(self, event: Mapping[str, Any]) -> None:
        """Add one event."""
        self.num_events += 1
        found: dict[str, list[Any]] = {}
        listed: set[str] = set()
        for path, value, within in self._leaves(event, "", 0, None):
            facts = self._facts_of(path)
            if facts is None:
                self.num_left_out += 1
                continue
            facts.within = facts.within or within
            values = found.setdefault(path, [])
            if isinstance(value, list):
                listed.add(path)
                facts.num_nested += within is not None or any(isinstance(each, list) for each in value)
                values += [each for each in value if not isinstance(each, list | dict)]
            else:
                values.append(value)
                if within is not None:
                    listed.add(path)
        for path, values in found.items():
            if path in self.fields:  # it may have been part of a mapping
                self.fields[path].observe(values, listed=path in listed)
        self._compare({path: found[path] for path in self.fields if path in listed})

    def _facts_of(self, path: str) -> FieldFacts | None:
        """The facts of a field, which may be new; None beyond the bounds."""
        if path in self.fields:
            return self.fields[path]
        parent = path.rpartition(SEPARATOR)[0]
        self._children[parent] += 1
        if parent and parent not in self.mappings and self._children[parent] > MAX_CHILDREN:
            self.mappings.add(parent)
            for known in [known for known in self.fields if known.startswith(parent + SEPARATOR)]:
                del self.fields[known]
        if len(self.fields) >= MAX_FIELDS or parent in self.mappings:
            return None
        return self.fields.setdefault(path, FieldFacts(path))

    def _leaves(
        self, event: Mapping[str, Any], above: str, depth: int, within: str | None
    ) -> Iterator[tuple[str, Any, str | None]]:
        """Each value that is no object: its path, itself, and the list of objects that it is in."""
        for name, value in event.items():
            path = above + name
            is_of_mapping = path in self.mappings or above.removesuffix(SEPARATOR) in self.mappings
            if NAME.fullmatch(name) is None or len(path) > MAX_PATH or is_of_mapping or depth >= MAX_DEPTH:
                self.num_left_out += 1
            elif isinstance(value, dict):
                yield from self._leaves(value, path + SEPARATOR, depth + 1, within)
            elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
                if within is not None:
                    self.num_left_out += 1
                    continue
                for each in value:
                    yield from self._leaves(each if isinstance(each, dict) else {}, path + SEPARATOR, depth + 1, path)
            else:
                yield path, value, within

    def _compare(self, lists: Mapping[str, list[Any]]) -> None:
        """Compare the lists of one event with each other."""
        known = [path for path, facts in self.fields.items() if facts.is_list][:MAX_LISTS]
        sets = {path: set(lists[path]) for path in known if path in lists}
        for first in known if sets else ():
            for second in known if first in sets else sets:
                if first == second:
                    continue
                same = len(lists.get(first, ())) == len(lists.get(second, ()))
                pair = first, second
                self.equally_long[pair] = self.equally_long.get(pair, True) and same
                if sets.get(first):
                    member = self.members.setdefault(pair, Membership())
                    member.num_judged += 1
                    member.num_within += sets[first] <= sets.get(second, set())


def _is_odd(value: Scalar) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def observe_events(events: Iterator[dict[str, Any]]) -> EventFacts:
    """The facts of all events."""
    facts = EventFacts()
    for event in events:
        facts.observe(event)
    return facts
