"""Decides what each field of a sample is good for: the time, the label, the list to explode, ids, numbers, texts.

Pure, and a guess: names and values are all there is. Each choice comes with its reason, for a person to check.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.service.planning.field_facts import SEPARATOR, EventFacts, FieldFacts

FEW = 64
"""Whole numbers with at most so many distinct values are taken for categories."""
HIGH_CARDINALITY = 1000
"""An id with more distinct values has high cardinality."""
MIN_EVENTS = 100
"""Below so many events, a field that differs in each of them may be an id all the same."""
MIN_SHARE = 0.95
"""Share of events in which a relation between fields must hold."""
MAX_VECTOR = 4096
"""Longest list of numbers that becomes a dense slot."""
SORTED_SHARE = 0.9
"""Share of events whose time is not before that of the event before, so that it orders the stream."""
UNIT_RANGES = {"s": (1e9, 4.2e9), "ms": (1e12, 4.2e12), "us": (1e15, 4.2e15)}
"""From 2001 to 2103."""
EARLIEST_NAMED = 0.1
"""The beginning of those ranges for a field with the name of a time, as a share: 1973."""
ISO = "iso"
"""The unit of times in words."""
TIME_NAMES = re.compile(r"(^|_)(ts|time|timestamp|date|datetime|at|when)(_|$)|time$|timestamp", re.I)
LABEL_NAMES = re.compile(
    r"(^|_)(labels?|target|y|is_?click|clicks?|clicked|conversions?|converted|purchased?|bought|liked?|installed?|"
    r"subscribed|watched|is_?attributed)(_|$)",
    re.I,
)
ID_NAMES = re.compile(r"(^|_)(id|ids|uid|uuid|guid|code|zip|postcode|hash|key)(_|$)|[a-z](Id|Ids|ID)$|^C\d+$", re.I)
NUMBER_NAMES = re.compile(
    r"(^|_)(price|amount|counts?|num|n|cnt|score|duration|seconds|length|len|size|ratio|rate|sum|total|avg|mean|"
    r"distance|weight|height|age|lat|lon|latitude|longitude)(_|$)",
    re.I,
)
DATE_TEXT = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
SEPARATORS = ("|", ",", ";")
"""Of several values in one text, besides white space."""


class FieldRole(StrEnum):
    """Uses of a field."""

    ID = "id"
    """Whole numbers or texts as they are: the signs of a sparse slot."""
    WORDS = "words"
    """A text that is split: the signs of a sparse slot."""
    NUMBER = "number"
    """Numbers: a dense slot."""
    UNIQUE = "unique"
    """Another value in each event: nothing to learn."""
    CONSTANT = "constant"
    """The same value in each event."""
    DATE = "date"
    """A time in words, or one that is not the event's."""
    MIXED = "mixed"
    """Values of several types."""
    NUMBERS = "numbers"
    """Lists of equally many numbers: a dense slot with that size."""
    NESTED = "nested"
    """A list inside a list."""
    ALIGNED = "aligned"
    """A list that always has as many elements as the exploded one."""
    EMPTY = "empty"
    """Never a value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A field's role, and why."""

    facts: FieldFacts
    role: FieldRole
    why: str
    split: str = ""
    """Separator of the values in a text."""


@dataclass(frozen=True, slots=True)
class Label:
    """The label: a field that is 0 or 1, or whether an element of a list is in another list."""

    path: str
    why: str
    of: str | None = None
    """The list whose elements are looked for in the list at `path`; None: the field itself is 0 or 1."""


@dataclass(frozen=True, slots=True)
class EventRoles:
    """The roles of all fields."""

    label: Label | None
    """None: nothing looks like one."""
    explode: str | None
    """The list, or the list of objects, of which each element is a sample."""
    time: tuple[str, str, str] | None
    """Path, unit, and why."""
    group: str | None
    """A field that differs in each event and names it, where an event gives several samples."""
    readings: list[Reading] = field(default_factory=list)
    """Of the other fields, in their order."""


def decide(facts: EventFacts) -> EventRoles:
    """The roles of all fields."""
    label = find_label(facts)
    explode = None if label is None else _exploded_by(label, facts)
    time = find_time(facts)
    taken = {label.path if label else None, time[0] if time else None}
    readings = [
        _aligned(each, explode, facts) or reading_of(each, facts, explode)
        for path, each in facts.fields.items()
        if path not in taken
    ]
    group = None
    if explode is not None:
        unique = [each for each in readings if each.role is FieldRole.UNIQUE and not each.facts.is_list]
        group = next((each.facts.path for each in unique), None)
    return EventRoles(label, explode, time, group, readings)


def find_label(facts: EventFacts) -> Label | None:
    """The most likely label."""
    return next(_labels(facts), None)


def _labels(facts: EventFacts) -> Iterator[Label]:
    """Candidates, the likely ones first."""
    for each in facts.fields.values():
        named = LABEL_NAMES.search(_last(each.path))
        if named and each.within is not None and each.is_binary and not each.num_nested:
            yield Label(each.path, "it is 0 or 1 in each element of a list, and its name is that of a label")
    by_name = sorted(
        facts.members.items(), key=lambda item: (not LABEL_NAMES.search(_last(item[0][0])), -item[1].num_within)
    )
    for (inner, outer), member in by_name:
        ours, theirs = facts.fields.get(inner), facts.fields.get(outer)
        if ours is None or theirs is None or not _usable_list(ours) or not _usable_list(theirs):
            continue
        if member.num_within >= MIN_SHARE * member.num_judged and ours.mean_len < theirs.mean_len:
            share = member.num_within / max(1, member.num_judged)
            yield Label(inner, f'its values are among those of "{outer}" in {share:.0%} of the events', outer)
    single = [each for each in facts.fields.values() if each.is_binary and not each.is_list]
    for each in single:
        if LABEL_NAMES.search(_last(each.path)):
            yield Label(each.path, "it is 0 or 1, and its name is that of a label")
    if len(single) == 1:
        yield Label(single[0].path, "it is the one field that is 0 or 1; check that it is what is to be predicted")


def _usable_list(facts: FieldFacts) -> bool:
    return facts.is_list and facts.num_lists == facts.num_present and not facts.num_nested and _one_kind(facts)


def _one_kind(facts: FieldFacts) -> bool:
    return (facts.is_whole and fits_64_bits(facts)) or facts.is_text


def _exploded_by(label: Label, facts: EventFacts) -> str | None:
    """The list whose elements the label judges; None where an event is a sample."""
    judged = facts.fields[label.path if label.of is None else label.of]
    return judged.within or label.of


def find_time(facts: EventFacts) -> tuple[str, str, str] | None:
    """The field with the time of events, its unit ("iso": in words), and why."""
    found = []
    for order, each in enumerate(facts.fields.values()):
        unit = time_unit(each)
        if unit is None or each.is_list or each.num_present < MIN_SHARE * facts.num_events:
            continue
        named = is_named_time(each)
        share = each.num_sorted / max(1, each.num_present)
        if not named and share < SORTED_SHARE:
            continue
        times = "times in words" if unit == ISO else f"unix times in {unit}"
        why = f"{'its name and ' if named else ''}its values are those of {times}; "
        rank = not named, SEPARATOR in each.path, -share, order
        found.append((*rank, (each.path, unit, why + f"in order in {share:.0%} of the events")))
    return min(found)[-1] if found else None


def is_named_time(facts: FieldFacts) -> bool:
    """Whether the name of a field is that of a time."""
    return bool(TIME_NAMES.search(_last(facts.path)))


def time_unit(facts: FieldFacts) -> str | None:
    """The unit in which all values are unix times, or ISO; None if they are none.

    A time before 2001 needs the name of a time, as smaller numbers are often ids.
    """
    if len(facts.distinct) < 2:
        return None
    if facts.is_text and all(DATE_TEXT.fullmatch(str(value)) for value in facts.distinct):
        return ISO
    if not facts.is_number:
        return None
    begin = EARLIEST_NAMED if is_named_time(facts) else 1.0
    ranges = UNIT_RANGES.items()
    return next((unit for unit, (low, high) in ranges if begin * low <= facts.low and facts.high <= high), None)


def _aligned(facts: FieldFacts, explode: str | None, events: EventFacts) -> Reading | None:
    """A list beside the exploded one whose elements belong to its elements, so that whole it says little."""
    if explode is None or facts.path == explode or facts.within is not None:
        return None
    if not events.equally_long.get((facts.path, explode), False) or facts.max_len < 2:
        return None
    return Reading(
        facts, FieldRole.ALIGNED, f'it is as long as "{explode}" in each event; put both in one list of objects'
    )


def is_single(facts: FieldFacts, explode: str | None) -> bool:
    """Whether a sample has one value of a field at most."""
    return not facts.is_list or (explode is not None and explode in (facts.path, facts.within))


def reading_of(facts: FieldFacts, events: EventFacts, explode: str | None = None) -> Reading:
    """The role of a field that is neither label nor time."""
    if facts.num_nested:
        return Reading(facts, FieldRole.NESTED, "it is a list inside a list, which no slot takes")
    if not facts.num_values:
        return Reading(facts, FieldRole.EMPTY, "no event has a value")
    if not (facts.is_number or facts.is_text or facts.is_bool):
        kinds = ", ".join(f"{number:,} x {kind}" for kind, number in facts.kinds.items())
        return Reading(facts, FieldRole.MIXED, f"its values have several types: {kinds}")
    if len(facts.distinct) == 1 and facts.num_values == facts.num_present == events.num_events and not facts.num_null:
        return Reading(facts, FieldRole.CONSTANT, "it has the same value in each event")
    if not facts.is_list and not facts.is_capped and _is_unique(facts, events):
        return Reading(
            facts, FieldRole.UNIQUE, "it has another value in each event, so that nothing can be learnt of it"
        )
    if facts.is_text:
        return _of_text(facts)
    if facts.is_bool:
        return Reading(facts, FieldRole.ID, "true or false")
    found = _of_number(facts)
    if found.role is FieldRole.NUMBER and not is_single(facts, explode):
        return _of_numbers(facts, events)
    return found


def _is_unique(facts: FieldFacts, events: EventFacts) -> bool:
    if events.num_events < MIN_EVENTS or len(facts.distinct) < MIN_SHARE * events.num_events:
        return False
    codes = facts.is_text and facts.num_words == facts.num_values
    ids = facts.is_whole and (ID_NAMES.search(_last(facts.path)) is not None or facts.num_sorted >= facts.num_values)
    return len(facts.distinct) == facts.num_values and (codes or ids)


def _of_text(facts: FieldFacts) -> Reading:
    if all(DATE_TEXT.fullmatch(str(value)) for value in facts.distinct):
        return Reading(facts, FieldRole.DATE, "its values are dates in words")
    if facts.is_list:
        return Reading(facts, FieldRole.ID, "texts in a list")
    for separator in SEPARATORS:
        num_split = sum(number for value, number in facts.distinct.items() if separator in str(value).strip(separator))
        if num_split >= 0.3 * facts.num_values and facts.num_words <= 1.5 * facts.num_values:
            return Reading(
                facts, FieldRole.WORDS, f'several values in one text, separated by "{separator}"', split=separator
            )
    if facts.num_words >= 3 * facts.num_values:
        return Reading(facts, FieldRole.WORDS, f"a text of {facts.num_words / facts.num_values:.1f} words", split=" ")
    return Reading(facts, FieldRole.ID, "texts of one or two words")


def fits_64_bits(facts: FieldFacts) -> bool:
    """Whether whole numbers fit uint64 or int64."""
    return -(2.0**63) <= facts.low and facts.high < (2.0**63 if facts.low < 0 else 2.0**64)


def _of_number(facts: FieldFacts) -> Reading:
    name = _last(facts.path)
    num_distinct = len(facts.distinct)
    if time_unit(facts) is not None and is_named_time(facts):
        return Reading(facts, FieldRole.DATE, f"its values are unix times in {time_unit(facts)}")
    if not facts.is_whole or not fits_64_bits(facts):
        return _number(facts, "numbers with a fraction" if not facts.is_whole else "whole numbers beyond 64 bits")
    if ID_NAMES.search(name):
        return Reading(facts, FieldRole.ID, "its name is that of an id")
    if num_distinct <= FEW and not facts.low < -FEW:
        return Reading(facts, FieldRole.ID, "few distinct values")
    if facts.low < 0:
        return _number(facts, "some are negative")
    if NUMBER_NAMES.search(name):
        return _number(facts, "its name is that of a number")
    if num_distinct >= (facts.high - facts.low) / 2 or facts.quantile(0.5) >= 2**31:
        return Reading(facts, FieldRole.ID, "its values fill their range, or are large, as those of ids")
    return _number(facts, "a wide range with gaps; if it is an id, take it as one")


def _of_numbers(facts: FieldFacts, events: EventFacts) -> Reading:
    """Numbers in a list that stays whole."""
    whole = facts.num_null == 0 and facts.within is None and facts.num_present == events.num_events
    if whole and facts.min_len == facts.max_len and 1 <= facts.max_len <= MAX_VECTOR:
        return Reading(facts, FieldRole.NUMBERS, f"lists of {facts.max_len} numbers")
    if facts.is_whole and fits_64_bits(facts):
        return Reading(facts, FieldRole.ID, "whole numbers in a list")
    return Reading(facts, FieldRole.MIXED, "numbers with a fraction, in lists of several lengths; no slot takes them")


def _number(facts: FieldFacts, why: str) -> Reading:
    return Reading(facts, FieldRole.NUMBER, why)


def is_skewed(facts: FieldFacts) -> bool:
    """Whether numbers have a long tail to the right."""
    return facts.high > 10 and facts.quantile(0.99) > 10 * max(1.0, facts.quantile(0.5))


def _last(path: str) -> str:
    return path.rpartition(SEPARATOR)[2]
