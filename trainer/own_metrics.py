"""Metrics that a job names in `metrics.own`, beside the measures that every job has (trainer.metrics).

A metric is a vector of integers to which batches add, so it can be summed over ranks, passes and restarts like the
built-in measures: its value depends on no order and on no number of ranks. It is measured for every task, for the pass,
the window and the life of the job. `metrics.own` names a registered metric, Headrace's or a package's, or a class of
the user's, "package.module:Class". Imports no torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from headrace.errors import SpecError
from headrace.registry import Registry
from headrace.trainer.user_classes import check_class, import_class

MAX_SIZE = 65_536
"""Longest vector of a metric."""
NAME = re.compile(r"[a-z][a-z0-9_@]{0,63}")
RESERVED = frozenset(
    {
        *("count", "mean_label", "mean_prediction", "calibration", "mae", "mse", "rmse", "not_finite", "clamped"),
        *("auc", "auc_error", "gauc", "gauc_groups", "logloss", "normalized_entropy", "acc"),
        *("group_calibration_error", "reliability", "slices"),
    }
)
"""Names in reports that no other metric may have."""


class Metric:
    """One number for a task; built as `Class()`. All state is in the vector: an object keeps nothing between calls.

    A user's class needs the same attributes and methods, and need not extend this one.
    """

    name: str
    """The key in reports: small letters, digits and "_"."""
    size: int
    """Length of the vector, at most MAX_SIZE."""

    def add(
        self,
        prediction_B: NDArray[np.float32],
        label_B: NDArray[np.float32],
        weight_B: NDArray[np.float32],
        state_W: NDArray[np.int64],
    ) -> None:
        """Add a batch to the vector, in integers; a sample with weight 0 is not counted.

        The vector of samples must be the sum of their vectors, however they are divided into batches. Round each sample
        by itself, as in `np.rint(values_B * 2**20).astype(np.int64).sum()`; a sum of floats depends on their order.
        """
        raise NotImplementedError

    def value(self, state_W: NDArray[np.int64]) -> float | None:
        """The value of the metric; None if it is not defined."""
        raise NotImplementedError


class ExpectedCalibrationError(Metric):
    """How far probabilities are from what happened, over NUM_BINS intervals of equal width; 0 is perfect.

    The sum over intervals of abs(sum of predictions - sum of labels), divided by the weight of all samples (Naeini,
    Cooper and Hauskrecht, "Obtaining Well Calibrated Probabilities Using Bayesian Binning", AAAI 2015). Other than the
    ratio `calibration`, it shows a model that is too high for some samples and too low for others. Of a task with loss
    "mse" it means something where labels and predictions are in [0, 1]; others count as the nearer end.
    """

    NUM_BINS = 20
    ONE = 1 << 20
    """The integer of 1. A vector holds 2**43 samples of weight 1."""
    MAX_WEIGHT = 1 << 20
    """A heavier sample weighs as much, as in trainer.metrics.totals."""

    name = "expected_calibration_error"
    size = NUM_BINS + 1
    """By interval: predictions minus labels; then the weight of all samples."""

    @override
    def add(
        self,
        prediction_B: NDArray[np.float32],
        label_B: NDArray[np.float32],
        weight_B: NDArray[np.float32],
        state_W: NDArray[np.int64],
    ) -> None:
        counted_B = np.isfinite(prediction_B) & np.isfinite(label_B) & np.isfinite(weight_B) & (weight_B > 0)
        prediction_N = np.clip(prediction_B[counted_B].astype(np.float64), 0, 1)
        error_N = prediction_N - np.clip(label_B[counted_B].astype(np.float64), 0, 1)
        weight_N = np.minimum(weight_B[counted_B].astype(np.float64), self.MAX_WEIGHT) * self.ONE
        bin_N = np.minimum((prediction_N * self.NUM_BINS).astype(np.int64), self.NUM_BINS - 1)
        np.add.at(state_W, bin_N, np.rint(error_N * weight_N).astype(np.int64))
        state_W[-1] += np.rint(weight_N).astype(np.int64).sum()

    @override
    def value(self, state_W: NDArray[np.int64]) -> float | None:
        weight = int(state_W[-1])
        return int(np.abs(state_W[:-1]).sum()) / weight if weight else None


METRICS = Registry(
    kind="metric",
    group="headrace.metrics",
    base=Metric,
    own={"expected_calibration_error": "trainer.own_metrics:ExpectedCalibrationError"},
)


def check_metric(path: str, folder: Path, at: str) -> None:
    """Raise SpecError, with the key `at`, for a name that nothing has; a user's class is looked for, and not run."""
    if ":" in path:
        check_class(path, folder, at)
    else:
        _registered(path, at)


def metrics_of(paths: Sequence[str], folder: Path) -> tuple[Metric, ...]:
    """The metrics of `metrics.own`; a user's class is imported from `folder`, the spec's folder. Raises SpecError."""
    found: dict[str, Metric] = {}
    for number, path in enumerate(paths):
        at = f"metrics.own.{number}"
        metric = import_class(path, folder, at)() if ":" in path else _registered(path, at)()
        lacks = [name for name in ("add", "value") if not callable(getattr(metric, name, None))]
        name, size = getattr(metric, "name", None), getattr(metric, "size", None)
        if lacks:
            raise SpecError(f"{path} has no method {lacks[0]!r}; see headrace.Metric", at)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SpecError(f"{path}: its `name` is {name!r}; use small letters, digits and '_', from a letter on", at)
        if name in RESERVED or name in found:
            raise SpecError(f"{path}: there is a measure {name!r} already; give it another `name`", at)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
            raise SpecError(f"{path}: its `size` is {size!r}; a whole number from 1 to {MAX_SIZE:,}", at)
        found[name] = metric
    return tuple(found.values())


def _registered(name: str, at: str) -> type[Metric]:
    try:
        return METRICS.load(name)
    except SpecError as error:
        raise SpecError(f'{error}; for one of your own: "package.module:Class"', at) from None
