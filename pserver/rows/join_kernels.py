"""The decision of a join: which impressions and clicks of a pass meet, in the order of their times.

A row holds what waits under one key, as words of 32 bits in the bits of its floats: the state, the pass and the number
in it of the impression, its event time in two words, the label of a click that waits, the number of bytes of the
sample, and the sample. Unused words are 0. No arithmetic touches them.

Shapes: Q events in order, U keys, B bytes of a sample at most, W words of a row, N bytes of samples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.lists import offsets_of

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

NOTHING, WAITING, CLICKED, EARLY, CLOCK = range(5)
"""States of a key: no row; an impression waits; an impression was clicked, and may wait on; a click waits for its
impression; the row of pserver.tables.pass_clock, whose order has its two counts."""
HEAD_WORDS = 7
STORED, UNKNOWN = -1, -2
"""In place of the number of an event of the pass: a sample that a row holds; no sample."""
_HELD, _JOINED, _REPEATED_IMPRESSION, _REPEATED_CLICK, _LATE = range(5)  # as JoinOutcome


def join_width_of(max_sample_bytes: int) -> int:
    """Floats of a row for samples of so many bytes."""
    return HEAD_WORDS + (max_sample_bytes + 3) // 4


@dataclass(slots=True)
class WaitingRows:
    """The state of U keys, without samples."""

    state_U: U8
    order_U: U64
    """See JoinedSamples.order_E; of a click that waits, its own."""
    time_U: F64
    label_U: F32

    @classmethod
    def of_words(cls, word_UW: U32) -> "WaitingRows":
        """From rows, or their first words; those without a row are zeros."""
        word_UW = np.ascontiguousarray(word_UW[:, :HEAD_WORDS])
        order_U = word_UW[:, 1].astype(np.uint64) << np.uint64(32) | word_UW[:, 2].astype(np.uint64)
        time_U = np.ascontiguousarray(word_UW[:, 3:5]).view(np.float64)[:, 0]
        label_U = np.ascontiguousarray(word_UW[:, 5]).view(np.float32)
        return cls(word_UW[:, 0].astype(np.uint8), order_U, time_U, label_U)

    def over(self, window_s: float, end_s: float) -> NDArray[np.bool_]:
        """(U,) whether the window has ended before `end_s`; that of the clock never does."""
        over_U: NDArray[np.bool_] = (self.time_U + window_s < end_s) & (self.state_U != CLOCK)
        return over_U

    def packed(self, at_C: I64, offset_C1: I64, data_N: U8, width: int) -> F32:
        """(C, width) rows of some keys with their samples."""
        word_CW = np.zeros((len(at_C), width), np.uint32)
        order_C = self.order_U[at_C]
        word_CW[:, 0] = self.state_U[at_C]
        word_CW[:, 1], word_CW[:, 2] = order_C >> np.uint64(32), order_C & np.uint64(0xFFFFFFFF)
        word_CW[:, 3:5] = self.time_U[at_C].reshape(-1, 1).view(np.uint32)
        word_CW[:, 5] = self.label_U[at_C].view(np.uint32)
        length_C = np.diff(offset_C1)
        word_CW[:, 6] = length_C
        byte_CB = np.zeros((len(at_C), 4 * (width - HEAD_WORDS)), np.uint8)
        byte_CB[np.arange(byte_CB.shape[1]) < length_C[:, None]] = data_N
        word_CW[:, HEAD_WORDS:] = byte_CB.view(np.uint32)
        rows_CD: F32 = word_CW.view(np.float32)
        return rows_CD


def samples_of(rows_UD: F32) -> tuple[I64, U8]:
    """The samples in rows, as offsets and bytes."""
    word_UW = np.ascontiguousarray(rows_UD).view(np.uint32)
    length_U = word_UW[:, 6].astype(np.int64)
    byte_UB = np.ascontiguousarray(word_UW[:, HEAD_WORDS:]).view(np.uint8)
    data_N = byte_UB[np.arange(byte_UB.shape[1]) < length_U[:, None]]
    return offsets_of(length_U), data_N


@njit(nogil=True, cache=True)
def decide(  # type: ignore[no-untyped-def]
    turn_Q, number_Q, order_Q, time_Q, label_Q, window_s, holds, state_U, order_U, time_U, label_U, holder_U, outcome_Q,
    source_Q, released_order_Q, released_time_Q, released_label_Q,
):  # fmt: skip
    """Write the outcome of each event, and for a release the event that brought the sample, or STORED.

    `turn_Q`: the events in the order in which they count. `number_Q`: the key of each event, by its place in the
    columns by U, which become those after the pass. `holds`: clicked impressions wait on. `holder_U`: the event whose
    sample waits, STORED or UNKNOWN.
    """
    for q in turn_Q:
        u = number_Q[q]
        click = label_Q[q] != 0
        outcome_Q[q], source_Q[q] = _HELD, UNKNOWN
        if state_U[u] == NOTHING:
            state_U[u] = EARLY if click else WAITING
            order_U[u], time_U[u], label_U[u] = order_Q[q], time_Q[q], label_Q[q]
            holder_U[u] = UNKNOWN if click else q
        elif click and state_U[u] == WAITING:
            if time_Q[q] > time_U[u] + window_s:
                outcome_Q[q] = _LATE
                continue
            outcome_Q[q], source_Q[q] = _JOINED, holder_U[u]
            released_order_Q[q], released_time_Q[q], released_label_Q[q] = order_U[u], time_U[u], label_Q[q]
            state_U[u], label_U[u] = CLICKED, label_Q[q]
            if not holds:
                holder_U[u] = UNKNOWN
        elif click:
            outcome_Q[q] = _REPEATED_CLICK
        elif state_U[u] != EARLY:
            outcome_Q[q] = _REPEATED_IMPRESSION
        elif time_U[u] > time_Q[q] + window_s:
            outcome_Q[q] = _LATE
            state_U[u], order_U[u], time_U[u], label_U[u], holder_U[u] = WAITING, order_Q[q], time_Q[q], 0.0, q
        else:
            outcome_Q[q], source_Q[q] = _JOINED, q
            released_order_Q[q], released_time_Q[q], released_label_Q[q] = order_Q[q], time_Q[q], label_U[u]
            state_U[u], order_U[u], time_U[u], holder_U[u] = CLICKED, order_Q[q], time_Q[q], q if holds else UNKNOWN


Waiting = tuple[int, int, float, float, bytes]
"""State, order, event time, label and sample of a key."""


def join_reference(
    events: list[tuple[int, int, float, float, bytes]],
    window_s: float,
    known: dict[int, Waiting],
    end_s: float,
    *,
    holds: bool = False,
) -> tuple[list[tuple[int, float, float, bytes]], list[tuple[int, float, float, bytes]], int]:
    """The twin, with the end of a pass: events are (key, order, time, label, sample) in the order in which they count;
    `known` is changed.

    Returns the outcome of each event with the time, label and sample that meet; then what expires, as
    (order, time, label, sample) by order; and the number of clicks that are given up. `end_s`: the greatest time of the
    pass.
    """
    told: list[tuple[int, float, float, bytes]] = []
    for key, order, time_s, label, sample in events:
        state, _, since_s, waits, held = known.get(key, (NOTHING, 0, 0.0, 0.0, b""))
        outcome = _HELD, 0.0, 0.0, b""
        if label == 0:
            if state == NOTHING:
                known[key] = WAITING, order, time_s, 0.0, sample
            elif state == EARLY and since_s <= time_s + window_s:
                known[key] = CLICKED, order, time_s, waits, sample
                outcome = _JOINED, time_s, waits, sample
            elif state == EARLY:
                known[key] = WAITING, order, time_s, 0.0, sample
                outcome = _LATE, 0.0, 0.0, b""
            else:
                outcome = _REPEATED_IMPRESSION, 0.0, 0.0, b""
        elif state == NOTHING:
            known[key] = EARLY, order, time_s, label, b""
        elif state != WAITING:
            outcome = _REPEATED_CLICK, 0.0, 0.0, b""
        elif time_s > since_s + window_s:
            outcome = _LATE, 0.0, 0.0, b""
        else:
            known[key] = CLICKED, known[key][1], since_s, label, held
            outcome = _JOINED, since_s, label, held
        told.append(outcome)
    gone = [key for key, waiting in known.items() if waiting[2] + window_s < end_s]
    ended = [known.pop(key) for key in gone]
    waited = (WAITING, CLICKED) if holds else (WAITING,)
    expired = sorted((order, time_s, label, sample) for state, order, time_s, label, sample in ended if state in waited)
    return told, expired, sum(waiting[0] == EARLY for waiting in ended)
