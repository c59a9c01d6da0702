"""The metrics' view of a batch before it is learnt, and column values as 64-bit ids.

Shapes: B samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.keys import sign_of_text

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ObservedBatch:
    """One batch of one rank."""

    step: int
    """Number of the step within its pass. Step and rank determine the place in training order."""
    prediction_B: Mapping[str, F32]
    """By task: probability (loss "bce") or value ("mse")."""
    label_B: Mapping[str, F32]
    weight_B: Mapping[str, F32]
    """0: masked out, not counted."""
    time_s_B: NDArray[np.float64] | None = None
    """Event times, unix seconds; NaN if there is none."""
    group_B: U64 | None = None
    """Group of each sample, for the mean AUC of groups, as ids (`ids_of`)."""
    slices: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Values by slot of `metrics.slices`, as in the batch."""
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Any shape; "loss" is the loss of each sample."""


_id_of_text = lru_cache(maxsize=65_536)(lambda text: sign_of_text(str(text).encode()))


def ids_of(values_B: NDArray[Any]) -> U64:
    """Values of a meta slot as ids. Equal values have equal ids.

    uint64 values are their own ids, int64 use their bits, floats those of their float64 (-0 as 0), text a fixed hash.
    """
    if values_B.dtype == np.uint64:
        return values_B
    if values_B.dtype == np.int64:
        return values_B.view(np.uint64)
    if values_B.dtype.kind == "f":
        return (values_B.astype(np.float64) + 0.0).view(np.uint64)
    if values_B.dtype.kind in "iu":
        return values_B.astype(np.uint64)
    return np.fromiter((_id_of_text(value) for value in values_B), np.uint64, len(values_B))
