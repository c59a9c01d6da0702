"""Rules of Paddle's sparse tables: the words that each adds to a row in text, and the state of a job's row from them.

The rules are those of paddle/fluid/distributed/ps/table/sparse_sgd_rule.h: naive, adagrad (and adagrad_v2, of the same
layout), std_adagrad, adam. A row has a rule for its first-order weight (`embed`) and one for its vector (`embedx`); a
table's text has the same rule for both.

Shapes: R rows of a batch, E and X words of the states of `embed` and `embedx`, K floats of the state in a job's row.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.config import Optimizer, PaddleAdagrad, PaddleAdam, Sgd, TableSection

F32 = NDArray[np.float32]

STATE_WORDS: Mapping[str, Callable[[int], int]] = {
    "naive": lambda dim: 0,
    "adagrad": lambda dim: 1,
    "std_adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim + 2,
}
"""Words of the state of so many weights, by rule: g2sums; of adam gsums, g2sums, and the powers of both betas."""
KIND_OF = {
    "naive": '"sgd"',
    "adagrad": '"paddle_adagrad"',
    "std_adagrad": '"paddle_adagrad" with per = "element"',
    "adam": '"paddle_adam"',
}
"""The optimizer of a job with which rows of a rule go on as they were."""


def rules_for(optimizer: Optimizer) -> tuple[str, ...]:
    """The rules whose rows a table with this optimizer takes."""
    match optimizer:
        case PaddleAdagrad(per="element"):
            return ("std_adagrad",)
        case PaddleAdagrad():
            return ("adagrad",)
        case PaddleAdam():
            return ("adam",)
        case Sgd():
            return ("naive", "adagrad", "std_adagrad")
    return ("adagrad", "std_adagrad")


def goes_on(optimizer: Optimizer) -> bool:
    """Whether rows go on as they were; otherwise the state of their optimizer begins anew."""
    return isinstance(optimizer, Sgd | PaddleAdagrad | PaddleAdam)


def state_of(section: TableSection, embed_RE: F32, embedx_RX: F32) -> F32 | None:
    """(R, K) the state of rows, as pserver.rows.optimizers keeps it; None: there is none, or it begins anew."""
    first, dim = int(section.first_order), section.dim
    match section.optimizer:
        case PaddleAdagrad(per="element"):
            parts = [embed_RE[:, :first], embedx_RX]
        case PaddleAdagrad():
            parts = [embed_RE, embedx_RX]
        case PaddleAdam():
            moments = [embed_RE[:, :first], embedx_RX[:, :dim], embed_RE[:, 1 : 1 + first], embedx_RX[:, dim : 2 * dim]]
            parts = [*moments, embed_RE[:, 2:], embedx_RX[:, 2 * dim :]]
        case _:
            return None
    return np.concatenate(parts, axis=1)


def check_state(optimizer: Optimizer, embed_RE: F32, embedx_RX: F32) -> None:
    """Raise ValueError for a state of a row that no rule can have; R is 1, and X is 0 without a vector."""
    for state_K in (embed_RE[0], embedx_RX[0]):
        dim = (len(state_K) - 2) // 2
        sums_K, powers_K = state_K, state_K[:0]
        if isinstance(optimizer, PaddleAdam):
            sums_K, powers_K = state_K[dim : 2 * dim], state_K[2 * dim :]
        if (sums_K < 0).any():
            raise ValueError(f"{sums_K.min():g} is a sum of squares in the state of its optimizer, and below 0")
        if ((powers_K < 0) | (powers_K >= 1)).any():
            raise ValueError(f"{powers_K.tolist()} are powers of betas in the state of its optimizer, and not below 1")
