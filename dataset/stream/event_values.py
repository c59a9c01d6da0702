"""The bytes of a block of events: as lines, one after another, or of some events.

Shapes: E events.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.stream.source import Events
from headrace.kernel_cache import njit

LINE_FEED = 10


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
