"""The order in which the events of a pass count for a join, and where windows end in it. Pure.

Events of one stream count in the order of the log. The streams of a pass are merged by time: before an event come those
of other streams whose stream has not passed its time yet. A window ends at the first event after its beginning that is
later than its end. So on one stream nothing depends on where passes begin and end.

Shapes: A events of a pass, in the order of the log or in the merged one; P times.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def merged_order(time_A: F64, stream_A: U64) -> I64:
    """(A,) the events in the order in which they count: by the greatest time so far of their stream."""
    streams, number_A = np.unique(stream_A, return_inverse=True)
    reached_A = np.empty(len(time_A))
    _reached(np.ascontiguousarray(time_A), number_A.astype(np.int64), np.full(len(streams), -np.inf), reached_A)
    turn_A: I64 = np.argsort(reached_A, kind="stable")
    return turn_A


@njit(nogil=True, cache=True)
def _reached(time_A, number_A, last_S, reached_A):  # type: ignore[no-untyped-def]
    """Write the greatest time so far of each event's stream. `last_S`: that of each stream."""
    for a in range(len(time_A)):
        s = number_A[a]
        last_S[s] = max(last_S[s], time_A[a])
        reached_A[a] = last_S[s]


@njit(nogil=True, cache=True)
def write_ends(time_A, window_s, end_A):  # type: ignore[no-untyped-def]
    """Write the first event after each one that is later than its time and the window, else A; in the merged order."""
    record_A = np.empty(len(time_A), np.int64)  # events later than all between them and the present one, nearest last
    num = 0
    for a in range(len(time_A) - 1, -1, -1):
        low, high = 0, num
        while low < high:
            middle = (low + high) // 2
            if time_A[record_A[middle]] > time_A[a] + window_s:
                low = middle + 1
            else:
                high = middle
        end_A[a] = record_A[low - 1] if low else len(time_A)
        while num and time_A[record_A[num - 1]] <= time_A[a]:
            num -= 1
        record_A[num] = a
        num += 1


def ends_of_waiting(time_A: F64, window_s: float, since_P: F64) -> I64:
    """(P,) the first event that is later than times before the pass and the window, else A; in the merged order."""
    end_P: I64 = np.searchsorted(np.maximum.accumulate(time_A), since_P + window_s, side="right")
    return end_P
