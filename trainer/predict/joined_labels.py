"""Labels of a job with a join, for the metrics of a prediction: impressions find their clicks over the whole input.

A click is no sample, and an impression is predicted whether or not it is clicked. So workers store the clicks of each
part beside its inputs of metrics, and once all parts exist an impression gets the label of its click, or 0. Imports no
torch.

Shapes: B samples of a block, Q clicks, N impressions of the whole input, M impressions still searched.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, F64, Samples
from headrace.dataset.spec.join_section import JoinSection
from headrace.kernel_cache import njit
from headrace.pserver.protocol.joins import U64
from headrace.trainer.features.join_reader import join_keys

KEY, TIME, LABEL = "join.key", "join.time", "join.label"
CLICKS = pa.schema({KEY: pa.uint64(), TIME: pa.float64(), LABEL: pa.float32()})

Files = Iterable[AbstractContextManager[Path]]


def split(samples: Samples, join: JoinSection) -> tuple[Samples, pa.Table]:
    """The impressions, whose labels are not known, and the clicks as CLICKS has them."""
    label_B = np.nan_to_num(samples.meta[join.label].astype(np.float32), nan=0.0)
    impressions, clicks = samples.take(np.flatnonzero(label_B == 0)), samples.take(np.flatnonzero(label_B))
    none_B = np.zeros(len(impressions), samples.meta[join.label].dtype)
    impressions = Samples(
        impressions.sparse,
        impressions.dense,
        {**impressions.meta, join.label: none_B},
        impressions.event_B,
        impressions.time_s_B,
    )
    columns = {**columns_of(clicks, join), LABEL: pa.array(label_B[label_B != 0])}
    return impressions, pa.table(columns, schema=CLICKS)


def columns_of(samples: Samples, join: JoinSection) -> dict[str, pa.Array]:
    """Keys and times of samples."""
    return {KEY: pa.array(join_keys(samples.meta[join.key])), TIME: pa.array(samples.time_s_B)}


@dataclass(frozen=True, slots=True)
class JoinedLabels:
    """The labels of all impressions of an input, in the order of its parts."""

    label_N: F32
    counts_N: NDArray[np.bool_]
    """Whether an impression is measured: it has a time, and is not a repeat of one that still waits."""
    clicks: int
    joined: int
    """Clicks that found an impression."""

    @classmethod
    def of(
        cls, observed: Files, clicks: Files, window_s: float, check: Callable[[], None] = lambda: None
    ) -> "JoinedLabels":
        """Join all parts: of an impression, the first click with its key, at most `window_s` from it.

        Takes some 50 bytes of memory for each impression and click; calls `check` between files.
        """
        key_N, time_N = (np.concatenate(each) for each in zip(*_columns(observed, check, KEY, TIME), strict=True))
        key_Q, time_Q, label_Q = (
            np.concatenate(each) for each in zip(*_columns(clicks, check, KEY, TIME, LABEL), strict=True)
        )
        order_Q = np.lexsort((time_Q, key_Q))
        key_Q, time_Q, label_Q = key_Q[order_Q], time_Q[order_Q], label_Q[order_Q]
        at_N = _first_from(key_Q, time_Q, key_N, time_N - window_s)
        there_N = at_N < len(key_Q)
        there_N[there_N] &= (key_Q[at_N[there_N]] == key_N[there_N]) & (
            time_Q[at_N[there_N]] <= time_N[there_N] + window_s
        )
        counts_N = np.isfinite(time_N) & ~_repeats(key_N, time_N, window_s)
        label_N = np.zeros(len(key_N), np.float32)
        label_N[there_N] = label_Q[at_N[there_N]]
        return cls(label_N, counts_N, len(key_Q), len(np.unique(at_N[there_N & counts_N])))

    def into(self, batch: pa.RecordBatch, begin: int, tasks: Iterable[int]) -> pa.RecordBatch:
        """Inputs of metrics, from the impression at `begin` on, with the labels of these tasks."""
        end = begin + len(batch)
        for task in tasks:
            weight_B = batch.column(f"{task}.weight").to_numpy()
            counted_B = np.where(self.counts_N[begin:end], weight_B, np.float32(0))
            for name, values in ((f"{task}.label", self.label_N[begin:end]), (f"{task}.weight", counted_B)):
                batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values))
        return batch


def _columns(files: Files, check: Callable[[], None], *names: str) -> Iterator[tuple[NDArray[Any], ...]]:
    """The columns of all files; empty ones of the right types first."""
    yield tuple(np.empty(0, CLICKS.field(name).type.to_pandas_dtype()) for name in names)
    for each in files:
        check()
        with each as path, pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            table = reader.read_all()
            yield tuple(np.array(table.column(name).to_numpy()) for name in names)


def _first_from(key_Q: U64, time_Q: F64, key_N: U64, since_N: F64) -> NDArray[np.int64]:
    """(N,) the place of the first click with a key, not before a time; clicks are sorted by both. Q: there is none."""
    low_N, end_N = np.searchsorted(key_Q, key_N), np.searchsorted(key_Q, key_N, "right")
    high_N = end_N.copy()
    while len(open_M := np.flatnonzero(low_N < high_N)):  # halves them
        middle_M = (low_N[open_M] + high_N[open_M]) // 2
        early_M = time_Q[middle_M] < since_N[open_M]
        low_N[open_M[early_M]] = middle_M[early_M] + 1
        high_N[open_M[~early_M]] = middle_M[~early_M]
    return np.where(low_N < end_N, low_N, len(key_Q))


def _repeats(key_N: U64, time_N: F64, window_s: float) -> NDArray[np.bool_]:
    """(N,) whether the key of an impression still waits for the click of one before it, which counts."""
    order_N = np.lexsort((time_N, key_N))
    found_N = np.empty(len(key_N), bool)
    found_N[order_N] = _sorted_repeats(key_N[order_N], time_N[order_N], window_s)
    return found_N


@njit(nogil=True, cache=True)
def _sorted_repeats(key_N, time_N, window_s):  # type: ignore[no-untyped-def]
    """(N,) of impressions sorted by key (N,) and time (N,)."""
    found_N = np.zeros(len(key_N), np.bool_)
    since_s = 0.0
    for place in range(len(key_N)):
        if place > 0 and key_N[place] == key_N[place - 1] and time_N[place] - since_s <= window_s:
            found_N[place] = True
        else:
            since_s = time_N[place]
    return found_N
