"""From counts to the values of a dense slot with counters.

Shapes: B samples, Q questions, V = 2 W numbers of an answer: shows and clicks of each window; C floats of the slot.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.spec.counters import Counted, CountersSection
from headrace.kernel_cache import njit
from headrace.pserver.protocol.histories import HistoryAnswers
from headrace.pserver.rows.counter_kernels import UNIT

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

KINDS = tuple(Counted)
"""The kinds of floats, by their numbers in the kernel."""


def counter_column(question_B: I64, answers: HistoryAnswers, counters: CountersSection) -> F32:
    """(B, C) values of samples; zeros where a sample has no question (a number below 0)."""
    unit_V = np.repeat([UNIT if window_s < 0 else 1 for window_s in counters.windows_s], 2)
    count_QV = answers.sign_M.astype(np.float64).reshape(-1, len(unit_V)) / unit_V
    count_BV = np.zeros((len(question_B), len(unit_V)))
    asked_B = question_B >= 0
    count_BV[asked_B] = count_QV[question_B[asked_B]]
    kind_H = np.array([KINDS.index(each) for each in counters.what], np.int64)
    value_BC = np.empty((len(question_B), counters.size), np.float32)
    fill_values(count_BV, kind_H, counters.prior, counters.prior_weight, value_BC)
    return value_BC


@njit(nogil=True, cache=True)
def fill_values(count_BV, kind_H, prior, weight, value_BC):  # type: ignore[no-untyped-def]
    """Write the value of each window and kind, window by window. `kind_H`: numbers in KINDS."""
    for b in range(len(count_BV)):
        for w in range(count_BV.shape[1] // 2):
            shows, clicks = count_BV[b, 2 * w], count_BV[b, 2 * w + 1]
            for h in range(len(kind_H)):
                if kind_H[h] == 0:
                    value = math.log1p(shows)
                elif kind_H[h] == 1:
                    value = math.log1p(clicks)
                elif shows == 0:
                    value = 0.0
                else:
                    value = math.log((clicks + prior * weight) / (shows + weight) / prior)
                value_BC[b, w * len(kind_H) + h] = value


def value_reference(what: Counted, shows: float, clicks: float, prior: float, weight: float) -> float:
    """The twin: one float."""
    match what:
        case Counted.SHOWS:
            return math.log1p(shows)
        case Counted.CLICKS:
            return math.log1p(clicks)
        case Counted.CTR:
            return math.log((clicks + prior * weight) / (shows + weight) / prior) if shows else 0.0
