"""Exact metrics of the first and the last half of all samples, in training order, at the end of a bounded source.

Rank 0 appends each pass to a file: 12 bytes for each sample and task, and 8 for the group. Memory is bounded by a pass
until the end. Then one half at a time is read, with some 60 bytes for each of its samples. While the disk is full,
samples wait in bounded memory.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.durable import NO_ROOM, REAL, writing
from headrace.errors import Unwritable
from headrace.exact_auc import exact_auc
from headrace.trainer.metrics.auc import sum_group_aucs
from headrace.trainer.metrics.measures import Measures, measures, set_gauc
from headrace.trainer.metrics.samples import row_type
from headrace.trainer.metrics.totals import add_samples, carry, empty

FILE_NAME = "predictions.bin"
CHUNK = 1 << 20
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of samples that wait for room on a full disk. Beyond, the job stops."""

Exclusive = Callable[[], AbstractContextManager[None]]
"""A lock of the store against other writers. It raises if a newer generation owns the store."""

log = logging.getLogger(__name__)


class StreamHalves:
    """One writer."""

    def __init__(
        self, folder: Path, tasks: Sequence[tuple[str, bool]], grouped: bool, exclusive: Exclusive = nullcontext
    ) -> None:
        """`tasks`: name, and whether the predictions are probabilities. A file in `folder` is overwritten.

        The file is written under `exclusive`: a rank 0 that was replaced must not truncate the new one's file.
        """
        self._path, self._tasks, self._grouped = folder / FILE_NAME, tuple(tasks), grouped
        self._type, self._exclusive = row_type(len(tasks), grouped), exclusive
        self.num_samples = 0
        self._num_bytes = 0
        """Bytes of samples in the file."""
        self._waiting = b""
        """Samples that are not in the file yet."""
        self._lost = False

    def append(self, rows_N: NDArray[Any]) -> None:
        """Add the samples of a pass, in training order. Raises Unwritable."""
        if self._lost:
            return
        had_room = not self._waiting
        self._waiting += rows_N.tobytes()
        self.num_samples += len(rows_N)
        try:
            self._write()
        except OSError as error:
            if error.errno not in NO_ROOM or len(self._waiting) > MAX_WAITING_BYTES:
                raise Unwritable(self._path, error) from error
            if had_room:
                log.warning("%s: %s; samples of the halves wait in memory", self._path, error.strerror)

    def _write(self) -> None:
        """Append the waiting samples after the valid part of the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._exclusive(), self._path.open("r+b" if self._num_bytes else "wb", buffering=0) as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            REAL.append(file, self._waiting)
        self._num_bytes, self._waiting = self._num_bytes + len(self._waiting), b""

    def resume(self, num_samples: int) -> None:
        """Continue after `num_samples`, as a commit has them. The next append truncates the file to them.

        The file is not part of a commit. If it holds less (another machine, a lost disk), halves are not measured.
        """
        self.num_samples, self._waiting = num_samples, b""
        self._num_bytes = num_samples * self._type.itemsize
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._num_bytes:
            self._lost = True
            log.warning("%s holds %d bytes of %d samples; halves are not measured", self._path, size, num_samples)

    @property
    def layout(self) -> list[Any]:
        """Content of a sample in the file, as JSON: names of tasks, and whether it has a group. Empty once lost."""
        return [] if self._lost else [[name for name, _ in self._tasks], self._grouped]

    def lose(self) -> None:
        """Stop measuring: earlier samples were written in another layout, or not at all. The file stays."""
        self._lost = True
        log.warning("%s does not hold all samples with these tasks and groups; halves are not measured", self._path)

    def measures(self) -> dict[str, dict[str, Measures]] | None:
        """{"first": {task: ...}, "last": {task: ...}}. An odd sample belongs to the last half. None once lost.

        Raises Unwritable.
        """
        if self._lost:
            return None
        if self._waiting:
            with writing(self._path):
                self._write()
        middle = self.num_samples // 2
        return {"first": self._half(0, middle), "last": self._half(middle, self.num_samples)}

    def _half(self, begin: int, end: int) -> dict[str, Measures]:
        if begin == end:
            rows_N: NDArray[Any] = np.empty(0, self._type)
        else:
            rows_N = np.memmap(self._path, self._type, "r")[begin:end]
        return {name: self._task(rows_N, task, is_bce) for task, (name, is_bce) in enumerate(self._tasks)}

    def _task(self, rows_N: NDArray[Any], task: int, is_bce: bool) -> Measures:
        columns = [np.ascontiguousarray(rows_N[f"{name}{task}"]) for name in ("prediction", "label", "weight")]
        totals_RW = empty(1, 1)
        for begin in range(0, len(rows_N), CHUNK):
            prediction, label, weight = (column_N[begin : begin + CHUNK] for column_N in columns)
            add_samples(prediction, label, weight, np.zeros(len(label), np.int64), is_bce, totals_RW)
            carry(totals_RW)
        counted_N = countable(*columns)
        prediction_N, label_N, weight_N = (column_N[counted_N] for column_N in columns)
        if is_bce and self._grouped:
            set_gauc(totals_RW[0], *sum_group_aucs(rows_N["group"][counted_N], prediction_N, label_N))
        found = measures(totals_RW[0], is_bce)
        if is_bce:
            found |= {"auc": exact_auc(prediction_N, label_N, weight_N), "auc_error": 0.0}
        return found


def countable(prediction_N: NDArray[Any], label_N: NDArray[Any], weight_N: NDArray[Any]) -> NDArray[np.bool_]:
    """(N,) whether a sample is measured: it is finite, and not masked."""
    finite_N: NDArray[np.bool_] = np.isfinite(prediction_N) & np.isfinite(label_N) & np.isfinite(weight_N)
    return finite_N & (weight_N > 0)
