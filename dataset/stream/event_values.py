"""The bytes of a block of events: as lines, one after another, or of some events; and which are one JSON object. Groups
of events by their bytes.

Shapes: E events.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.stream.source import Events
from headrace.kernel_cache import njit

LINE_FEED = 10
MAX_DIGITS = 640
"""Longest run of digits in a quick reading: Python may refuse longer whole numbers, and Arrow does not."""


@njit(nogil=True, cache=True)
def find_line_feeds(data, begin_E, end_E, found_E):  # type: ignore[no-untyped-def]
    """Set `found_E` for the events that contain a line feed."""
    for e in range(len(begin_E)):
        for i in range(begin_E[e], end_E[e]):
            if data[i] == 10:
                found_E[e] = True
                break


@njit(nogil=True, cache=True)
def join_values(data, begin_E, end_E, ending, out):  # type: ignore[no-untyped-def]
    """Concatenate the values of events, each followed by the byte `ending` unless it is -1."""
    at = 0
    for e in range(len(begin_E)):
        for i in range(begin_E[e], end_E[e]):
            out[at] = data[i]
            at += 1
        if ending >= 0:
            out[at] = ending
            at += 1


@njit(nogil=True, cache=True)
def find_single_objects(data, begin_E, end_E, max_depth, fit_E):  # type: ignore[no-untyped-def]
    """Set `fit_E` for events that are one object in one line, so that a text of such events is cut at one place only:
    blanks, a bracket that is closed by the last one, blanks. Not for those that Arrow and Python read in two ways: that
    are nested deeper than `max_depth`, or have NaN, infinities, -0 or runs of more than MAX_DIGITS digits outside their
    texts. Its twin is `is_single_object`."""
    for e in range(len(fit_E)):
        depth, digits, done, wrong, inside, escaped = 0, 0, False, False, False, False
        for i in range(begin_E[e], end_E[e]):
            byte = data[i]
            if byte == 10:
                wrong = True
                break
            if inside:
                if escaped:
                    escaped = False
                elif byte == 92:
                    escaped = True
                elif byte == 34:
                    inside = False
                continue
            if 48 <= byte <= 57:
                digits += 1
                whole_zero = byte == 48 and i > begin_E[e] and data[i - 1] == 45 and i + 1 < end_E[e]
                wrong = digits > MAX_DIGITS or depth == 0
                if wrong or (whole_zero and data[i + 1] != 46 and data[i + 1] != 69 and data[i + 1] != 101):
                    wrong = True
                    break
                continue
            digits = 0
            if byte == 32 or byte == 9 or byte == 13:
                pass
            elif done or (depth == 0 and byte != 123) or byte == 73 or byte == 78:
                wrong = True
                break
            elif byte == 34:
                inside = True
            elif byte == 123 or byte == 91:
                depth += 1
                if depth > max_depth:
                    wrong = True
                    break
            elif byte == 125 or byte == 93:
                depth -= 1
                done = depth == 0
        fit_E[e] = done and not wrong


def is_single_object(event: bytes, max_depth: int) -> bool:
    """Plain twin of `find_single_objects`, for one event."""
    plain, inside, escaped = "", False, False
    for char in event.decode("latin-1"):
        if char == "\n":
            return False
        if inside:
            inside = escaped or char != '"'
            escaped = char == "\\" and not escaped
        else:
            inside = char == '"'
            plain += char
    if re.search(rf"[IN]|-0(?![.eE])|[0-9]{{{MAX_DIGITS + 1}}}", plain):
        return False
    plain = plain.strip(" \t\r")
    depths = list(accumulate((char in "{[") - (char in "}]") for char in plain))
    return plain.startswith("{") and depths[-1] == 0 and 0 not in depths[:-1] and max(depths) <= max_depth


def as_lines(events: Events) -> NDArray[np.uint8] | None:
    """The part of the buffer that has the events as lines, one after another; None if it has them otherwise."""
    data = bytes_of(events.data)
    if not len(events) or events.begin_E[0] < 0 or events.end_E[-1] >= len(data):
        return None
    if not np.array_equal(events.begin_E[1:], events.end_E[:-1] + 1) or np.any(data[events.end_E] != LINE_FEED):
        return None
    return data[events.begin_E[0] : events.end_E[-1] + 1]


def bytes_of(data: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """A read-only array over a buffer, so that kernels see one type whatever the source gave."""
    array: NDArray[np.uint8] = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    array.setflags(write=False)
    return array


def concat_values(events: Events, ending: int) -> NDArray[np.uint8]:
    """The concatenated values of `events`, each followed by `ending` unless it is -1."""
    num_bytes = int((events.end_E - events.begin_E).sum()) + (len(events) if ending >= 0 else 0)
    out = np.empty(num_bytes, np.uint8)
    join_values(bytes_of(events.data), events.begin_E, events.end_E, ending, out)
    return out


def take_events(events: Events, index_E: NDArray[np.intp]) -> Events:
    """Some events of a block, on the same buffer."""
    return Events(
        events.data,
        events.begin_E[index_E],
        events.end_E[index_E],
        events.position_E[index_E],
        events.timestamp_ms_E[index_E],
        None if events.keys is None else [events.keys[i] for i in index_E],
        None if events.headers is None else [events.headers[i] for i in index_E],
        None if events.faults is None else [events.faults[i] for i in index_E],
    )


def grouped(
    blocks: Iterable[Events], max_bytes: int, max_events: int | None = None, of_event: int = 0
) -> Iterator[tuple[list[Events], bool]]:
    """Events in groups, however their blocks are cut, and whether each is full.

    A full group ends with the event that brings it to `max_bytes` or `max_events`. `of_event`: bytes of an event beside
    its value.
    """
    group: list[Events] = []
    num_events = num_bytes = 0
    for block in blocks:
        at = 0
        sum_E = np.cumsum(block.length_E + of_event)
        while at < len(block):
            before = int(sum_E[at - 1]) if at else 0
            filled = 1 + int(np.searchsorted(sum_E, before + max_bytes - num_bytes))
            end = min(len(block), filled, len(block) if max_events is None else at + max_events - num_events)
            group.append(block.slice(at, end))
            num_events += end - at
            num_bytes += int(sum_E[end - 1]) - before
            at = end
            if num_events == max_events or num_bytes >= max_bytes:
                yield group, True
                group, num_events, num_bytes = [], 0, 0
    if group:
        yield group, False
