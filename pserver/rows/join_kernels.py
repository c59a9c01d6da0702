"""The decision of a join: which impressions and clicks of a pass meet, in the order of pserver.rows.join_order.

A row holds what waits under one key, as words of 32 bits in the bits of its floats: the state, the pass and the number
in it of the impression, its event time in two words, the label of a click that waits, the number of bytes of the
sample, and the sample. Unused words are 0. No arithmetic touches them.

Shapes: Q events, A events of all shards, U keys, X windows that end, B bytes of a sample at most, W words of a row, N
bytes of samples.
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
    turn_Q, number_Q, order_Q, position_Q, time_Q, label_Q, end_Q, num_all, window_s, holds, state_U, order_U, time_U,
    label_U, end_U, holder_U, outcome_Q, source_Q, released_order_Q, released_time_Q, released_label_Q, number_X,
    state_X, order_X, time_X, label_X, end_X, holder_X,
):  # fmt: skip
    """Write the outcome of each event, and for a release the event that brought the sample, or STORED; and what waited
    in each window that ends. Returns the number of these.

    `turn_Q`: the events in the order in which they count. `position_Q`: of each among the `num_all` events of all
    shards, in that order; `end_Q`: that of the event that ends its window, or `num_all`. `number_Q`: the key of each
    event, by its place in the columns by U, which become those after the pass. `holds`: clicked impressions wait on.
    `holder_U`: the event whose sample waits, STORED or UNKNOWN. The columns by X hold a window for each event and key.
    """
    num = 0
    for turn in range(len(turn_Q) + len(state_U)):
        q = turn_Q[turn] if turn < len(turn_Q) else -1
        u = number_Q[q] if q >= 0 else turn - len(turn_Q)  # after the last event: every key
        position = position_Q[q] if q >= 0 else num_all - 1
        late = False
        if state_U[u] != NOTHING and end_U[u] <= position:
            number_X[num], state_X[num], order_X[num], time_X[num] = u, state_U[u], order_U[u], time_U[u]
            label_X[num], end_X[num], holder_X[num] = label_U[u], end_U[u], holder_U[u]
            num += 1
            late = q >= 0 and label_Q[q] != 0 and state_U[u] == WAITING and end_U[u] == position
            state_U[u] = NOTHING
        if q < 0:
            continue
        click = label_Q[q] != 0
        outcome_Q[q], source_Q[q] = _HELD, UNKNOWN
        if late:
            outcome_Q[q] = _LATE
        elif state_U[u] == NOTHING:
            state_U[u] = EARLY if click else WAITING
            order_U[u], time_U[u], label_U[u], end_U[u] = order_Q[q], time_Q[q], label_Q[q], end_Q[q]
            holder_U[u] = UNKNOWN if click else q
        elif click and state_U[u] == WAITING:
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
            state_U[u], order_U[u], time_U[u], label_U[u] = WAITING, order_Q[q], time_Q[q], 0.0
            end_U[u], holder_U[u] = end_Q[q], q
        else:
            outcome_Q[q], source_Q[q] = _JOINED, q
            released_order_Q[q], released_time_Q[q], released_label_Q[q] = order_Q[q], time_Q[q], label_U[u]
            state_U[u], order_U[u], time_U[u] = CLICKED, order_Q[q], time_Q[q]
            end_U[u], holder_U[u] = end_Q[q], q if holds else UNKNOWN
    return num


Waiting = tuple[int, int, float, float, bytes]
"""State, order, event time, label and sample of a key."""
Ended = tuple[int, int, float, float, bytes]
"""The event that ends a window, by its place among those given; order, time, label and sample of the impression."""


def join_reference(
    events: list[tuple[int, int, float, float, bytes]],
    window_s: float,
    known: dict[int, Waiting],
    *,
    holds: bool = False,
) -> tuple[list[tuple[int, float, float, bytes]], list[Ended], int]:
    """The twin, which knows no passes: events are (key, order, time, label, sample) in the order in which they count;
    `known` is changed.

    Returns the outcome of each event with the time, label and sample that meet; then what waited in windows that end,
    as they end; and the number of clicks that are given up.
    """
    told: list[tuple[int, float, float, bytes]] = []
    ended, num_given_up = list[Ended](), 0
    waited = (WAITING, CLICKED) if holds else (WAITING,)
    for place, (key, order, time_s, label, sample) in enumerate(events):
        gone = {each: known[each] for each in known if known[each][2] + window_s < time_s}
        for each in gone:
            del known[each]
        ended += sorted((place, *waiting[1:]) for waiting in gone.values() if waiting[0] in waited)
        num_given_up += sum(waiting[0] == EARLY for waiting in gone.values())
        late = label != 0 and key in gone and gone[key][0] == WAITING
        state, _, since_s, waits, held = known.get(key, (NOTHING, 0, 0.0, 0.0, b""))
        outcome = _HELD, 0.0, 0.0, b""
        if late:
            outcome = _LATE, 0.0, 0.0, b""
        elif label == 0:
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
        else:
            known[key] = CLICKED, known[key][1], since_s, label, held
            outcome = _JOINED, since_s, label, held
        told.append(outcome)
    return told, ended, num_given_up
