"""Hot loops on histories: the last signs of each key, read and extended in the order of the log.

A history is a row of float32 whose bits are words of 32 bits: the number of signs, then each sign in two words, low
word first, oldest sign first; unused words are 0. No arithmetic touches them, so any bits are kept.

Shapes: Q questions in order, N signs that they add, U keys, L signs of a history at most, M signs of all answers.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def width_of(last: int) -> int:
    """Floats of a row for histories of `last` signs."""
    return 1 + 2 * last


def unpacked(rows_UD: F32) -> tuple[I64, U64]:
    """(U,) lengths and (U, L) signs of rows."""
    words_UD = np.ascontiguousarray(rows_UD).view("<u4")
    return words_UD[:, 0].astype(np.int64), np.ascontiguousarray(words_UD[:, 1:]).view("<u8").astype(np.uint64)


def packed(count_U: I64, sign_UL: U64) -> F32:
    """The inverse of `unpacked`."""
    words_UD = np.empty((len(count_U), width_of(sign_UL.shape[1])), "<u4")
    words_UD[:, 0] = count_U
    words_UD[:, 1:] = np.ascontiguousarray(sign_UL.astype("<u8")).view("<u4")
    rows_UD: F32 = words_UD.view(np.float32)
    return rows_UD


@njit(nogil=True, cache=True)
def answer_lengths(number_Q, event_Q, offset_Q1, count_U, last, length_Q):  # type: ignore[no-untyped-def]
    """Write the length of the history of each question; `count_U` becomes that after the last question.

    `number_Q`: the key of each question, by its place in `count_U`. Questions of one event see nothing of it.
    """
    begin = 0
    while begin < len(number_Q):
        end = begin
        while end < len(number_Q) and event_Q[end] == event_Q[begin]:
            length_Q[end] = count_U[number_Q[end]]
            end += 1
        for q in range(begin, end):
            u = number_Q[q]
            count_U[u] = min(last, count_U[u] + offset_Q1[q + 1] - offset_Q1[q])
        begin = end


@njit(nogil=True, cache=True)
def answer(number_Q, event_Q, offset_Q1, sign_N, count_U, sign_UL, answer_Q1, answer_M):  # type: ignore[no-untyped-def]
    """Write the history of each question to `answer_M` from `answer_Q1[q]` on; extend `count_U` and `sign_UL`."""
    last, begin = sign_UL.shape[1], 0
    while begin < len(number_Q):
        end = begin
        while end < len(number_Q) and event_Q[end] == event_Q[begin]:
            u, start = number_Q[end], answer_Q1[end]
            for i in range(count_U[u]):
                answer_M[start + i] = sign_UL[u, i]
            end += 1
        for q in range(begin, end):
            u = number_Q[q]
            for n in range(offset_Q1[q], offset_Q1[q + 1]):
                if count_U[u] < last:
                    count_U[u] += 1
                else:
                    for i in range(last - 1):
                        sign_UL[u, i] = sign_UL[u, i + 1]
                sign_UL[u, count_U[u] - 1] = sign_N[n]
        begin = end


def answer_reference(
    questions: list[tuple[int, int, list[int]]], last: int, known: dict[int, list[int]]
) -> list[list[int]]:
    """The twin: questions are (key, event, signs to add); `known` has the history of each key and is extended."""
    answers: list[list[int]] = []
    for place, (key, event, _) in enumerate(questions):
        answers.append(list(known.get(key, [])))
        if place + 1 == len(questions) or questions[place + 1][1] != event:
            for other, same, signs in questions:
                if same == event:
                    known[other] = [*known.get(other, []), *signs][-last:]
    return answers
