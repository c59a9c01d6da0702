"""Hot loops on counters: shows and clicks of each key in windows of event time, read and added in the order of the log.

A row is float32 whose bits are words of 32 bits, for one window after another. A window of w seconds is PARTS + 1
sub-windows of w / PARTS seconds: the number of the newest one, then shows and clicks of each, sub-window j at place
j % (PARTS + 1). A window of 0 seconds has no end: shows, clicks. A window of -w seconds is a half-life of w: the number
of the newest sub-window of w / PARTS seconds, then shows and clicks as of it, in 1 / UNIT, each sub-window of age k
times 2 ** (-k / PARTS). Counts stop at MAX_COUNT.

Shapes: Q questions in order, U keys, W windows, C words of a row, V = 2 W numbers of an answer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

PARTS = 6
"""Sub-windows of a window. A window's begin is rounded down to one: it is at most 1 / PARTS longer than it says."""
MAX_COUNT = (1 << 32) - 1
"""Greatest count of a sub-window; further samples do not count."""
MAX_BACK_S = 86_400
"""A window begins anew with a sample that is older than all that it holds by more than this: its newest time was
wrong. Other samples before the window are left out."""
UNIT = 256
"""Fading counts are in 1 / UNIT: whole numbers, so that their sums and products are the same everywhere."""
FACTORS = np.array([1073741824, 956595215, 852229450, 759250125, 676414963, 602617224], np.int64)
"""2 ** (-k / PARTS) for k from 0, in 1 / 2 ** FACTOR_BITS, rounded."""
FACTOR_BITS = 30
MAX_AGE = 32 * PARTS
"""The age in sub-windows at which nothing is left of the greatest count."""
NO_TIME = -1
"""The time of a sample without event time: it counts in windows without end alone."""


def words_of(window_s: int) -> int:
    """Words of a row for one window."""
    if window_s < 0:
        return 3
    return 1 + 2 * (PARTS + 1) if window_s else 2


def width_of(windows_s: Sequence[int]) -> int:
    """Floats of a row."""
    return sum(words_of(window_s) for window_s in windows_s)


def unpacked(rows_UD: F32) -> I64:
    """(U, C) words of rows."""
    return np.ascontiguousarray(rows_UD).view("<u4").astype(np.int64)


def packed(word_UC: I64) -> F32:
    """The inverse of `unpacked`."""
    rows_UD: F32 = word_UC.astype("<u4").view(np.float32)
    return rows_UD


@njit(nogil=True, cache=True)
def count(number_Q, event_Q, time_s_Q, show_Q, click_Q, window_s_W, word_UC, answer_QV):  # type: ignore[no-untyped-def]
    """Write shows and clicks in each window before each question to `answer_QV`; add those with shows to `word_UC`.

    `number_Q`: the key of each question, by its place in `word_UC`. Questions of one event see nothing of it.
    """
    begin = 0
    while begin < len(number_Q):
        end = begin
        while end < len(number_Q) and event_Q[end] == event_Q[begin]:
            place = 0
            for w in range(len(window_s_W)):
                part_s = window_s_W[w] // PARTS
                shows, clicks = _read(word_UC[number_Q[end]], place, part_s, time_s_Q[end])
                answer_QV[end, 2 * w], answer_QV[end, 2 * w + 1] = shows, clicks
                place += _words(part_s)
            end += 1
        for q in range(begin, end):
            place = 0
            for w in range(len(window_s_W) if show_Q[q] else 0):
                part_s = window_s_W[w] // PARTS
                _add(word_UC[number_Q[q]], place, part_s, time_s_Q[q], show_Q[q], click_Q[q])
                place += _words(part_s)
        begin = end


@njit(nogil=True, cache=True)
def _words(part_s):  # type: ignore[no-untyped-def]
    """By the length of a sub-window."""
    if part_s < 0:
        return 3
    return 1 + 2 * (PARTS + 1) if part_s else 2


@njit(nogil=True, cache=True)
def _faded(count, age):  # type: ignore[no-untyped-def]
    """A count after `age` sub-windows, rounded down."""
    if age >= MAX_AGE:
        return 0
    return ((count * FACTORS[age % PARTS]) >> FACTOR_BITS) >> (age // PARTS)


@njit(nogil=True, cache=True)
def _read(word_C, place, part_s, time_s):  # type: ignore[no-untyped-def]
    """Shows and clicks in the window from `place` on that ends at `time_s`."""
    if part_s == 0:
        return word_C[place], word_C[place + 1]
    shows, clicks = 0, 0
    if part_s < 0:
        if time_s >= 0:
            age = max(time_s // -part_s - word_C[place], 0)
            shows, clicks = _faded(word_C[place + 1], age), _faded(word_C[place + 2], age)
        return shows, clicks
    if time_s >= 0:
        now, newest = time_s // part_s, word_C[place]
        for j in range(max(0, max(now, newest) - PARTS), min(now, newest) + 1):
            at = place + 1 + 2 * (j % (PARTS + 1))
            shows += word_C[at]
            clicks += word_C[at + 1]
    return shows, clicks


@njit(nogil=True, cache=True)
def _add(word_C, place, part_s, time_s, shows, clicks):  # type: ignore[no-untyped-def]
    """Add a sample of `time_s` to the window from `place` on."""
    at = place
    if part_s < 0:
        if time_s >= 0:
            _add_fading(word_C, place, -part_s, time_s, shows, clicks)
        return
    if part_s:
        if time_s < 0:
            return
        now, newest = time_s // part_s, word_C[place]
        if (newest - PARTS - now) * part_s > MAX_BACK_S:
            word_C[place : place + 1 + 2 * (PARTS + 1)] = 0
            word_C[place] = now
        elif now < newest - PARTS:
            return
        for j in range(max(newest + 1, now - PARTS), now + 1):
            at = place + 1 + 2 * (j % (PARTS + 1))
            word_C[at], word_C[at + 1] = 0, 0
        word_C[place] = max(word_C[place], now)
        at = place + 1 + 2 * (now % (PARTS + 1))
    word_C[at] = min(word_C[at] + shows, MAX_COUNT)
    word_C[at + 1] = min(word_C[at + 1] + clicks, MAX_COUNT)


@njit(nogil=True, cache=True)
def _add_fading(word_C, place, part_s, time_s, shows, clicks):  # type: ignore[no-untyped-def]
    """Add a sample to counts that fade. A late one is added as if it had faded since."""
    now, newest = time_s // part_s, word_C[place]
    if (newest - PARTS - now) * part_s > MAX_BACK_S:
        word_C[place : place + 3] = 0
        newest = 0
    for k, added in enumerate((shows, clicks)):
        before = _faded(word_C[place + 1 + k], max(now - newest, 0))
        more = _faded(min(added, MAX_COUNT // UNIT) * UNIT, max(newest - now, 0))
        word_C[place + 1 + k] = min(before + more, MAX_COUNT)
    word_C[place] = max(now, newest)


Sample = tuple[int, int, int]
"""Time in seconds, shows, clicks."""


def count_reference(
    questions: Sequence[tuple[int, int, Sample]], windows_s: Sequence[int], known: dict[tuple[int, int], list[Sample]]
) -> list[list[int]]:
    """The twin: questions are (key, event, sample); `known` has the samples of each (key, window) and is extended."""
    answers: list[list[int]] = []
    for place, (key, event, (time_s, _, _)) in enumerate(questions):
        answers.append([n for w in windows_s for n in _sums_reference(known.get((key, w), []), w, time_s)])
        if place + 1 == len(questions) or questions[place + 1][1] != event:
            for other, same, sample in questions:
                for w in windows_s if same == event and sample[1] else ():
                    held = known.setdefault((other, w), [])
                    newest_s = max((each[0] for each in held), default=0)
                    if w and 0 <= sample[0] and _is_wrong(newest_s, sample[0], abs(w) // PARTS):
                        held.clear()
                    held.append(sample)
    return answers


def _is_wrong(newest_s: int, time_s: int, part_s: int) -> bool:
    return (newest_s // part_s - PARTS - time_s // part_s) * part_s > MAX_BACK_S


def _sums_reference(held: Sequence[Sample], window_s: int, time_s: int) -> tuple[int, int]:
    """Shows and clicks of the samples in the window that ends at `time_s`, with its begin rounded down."""
    if window_s < 0:
        return _fading_reference([each for each in held if each[0] >= 0], -window_s // PARTS, time_s)
    if not window_s:
        return sum(shows for _, shows, _ in held), sum(clicks for _, _, clicks in held)
    part_s = window_s // PARTS
    timed = [(at // part_s, shows, clicks) for at, shows, clicks in held if at >= 0]
    now, newest = time_s // part_s, max((at for at, _, _ in timed), default=0)
    low = max(now, newest) - PARTS
    seen = [each for each in timed if low <= each[0] <= now] if time_s >= 0 else []
    return sum(shows for _, shows, _ in seen), sum(clicks for _, _, clicks in seen)


def _fading_reference(held: Sequence[Sample], part_s: int, time_s: int) -> tuple[int, int]:
    """Shows and clicks at `time_s`: what there was fades, in whole numbers, before each later sample."""

    def faded(count: int, age: int) -> int:
        return 0 if age >= MAX_AGE else count * int(FACTORS[age % PARTS]) // (1 << FACTOR_BITS + age // PARTS)

    newest, counts = 0, [0, 0]
    for at_s, *added in held:
        now = at_s // part_s
        before = [faded(count, max(now - newest, 0)) for count in counts]
        late = [faded(min(each, MAX_COUNT // UNIT) * UNIT, max(newest - now, 0)) for each in added]
        counts = [min(sum(pair), MAX_COUNT) for pair in zip(before, late, strict=True)]
        newest = max(newest, now)
    if time_s < 0:
        return 0, 0
    shows, clicks = (faded(count, max(time_s // part_s - newest, 0)) for count in counts)
    return shows, clicks
