"""The CPU time of each part of a step of W1, in place: `python -m tests.bench.step_parts --npz F [--hidden 64]`.

One thread computes (`cores = 1`), so that the clock of a thread sees all of a part. Each is the median of the last two
thirds of the steps, in core-milliseconds; parts that lie in others are counted in both. tests.bench.limit times the
kernels of these parts alone.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.pserver.server.shard import Shard
from headrace.pserver.tables.table import ShardTable
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.features.deduplication import Deduplicator
from headrace.trainer.features.pooling import KernelPooling
from headrace.trainer.models import linear
from headrace.trainer.models.linear import Kernel, ProductKernels
from headrace.trainer.models.wide_deep import WideDeep
from headrace.trainer.train import kernel_choice
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.loop import TrainLoop
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.step import Stepper
from tests.bench.training import train

PARTS: list[tuple[Any, str]] = [
    *((linear, name) for name in ("forward_product", "input_gradient", "weight_gradient")),
    (WideDeep, "forward"),
    *((Stepper, name) for name in ("_given", "_result", "_differentiate")),
    *((KernelPooling, name) for name in ("cells", "gradients")),
    (Observer, "observe"),
    *((AllReduceDense, name) for name in ("step", "finite")),
    (TrainLoop, "_agree"),
    (TrainLoop, "_learn"),
    (Deduplicator, "lookup"),
    (Shard, "resolve"),
    *((ShardTable, name) for name in ("to_learn", "_learn", "_record", "close_pass")),
    (PassCloser, "close"),
]


@contextmanager
def timed(found: dict[str, list[float]]) -> Iterator[None]:
    """Note the CPU seconds of each call of the parts."""
    with ExitStack() as patched:
        for owner, name in PARTS:
            times_s = found[f"{owner.__name__.rpartition('.')[2]}.{name}"]
            patched.enter_context(mock.patch.object(owner, name, _noting(getattr(owner, name), times_s)))
        yield


def _noting(call: Callable[..., Any], times_s: list[float]) -> Callable[..., Any]:
    def noting(*arguments: Any, **named: Any) -> Any:
        begin_s = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            times_s.append(time.thread_time() - begin_s)

    return noting


def figures(npz: Path, hidden: int, steps: int) -> dict[str, float]:
    """Core-milliseconds a step by part, and of the whole process. All layers have the kernels that are the quickest for
    W1 here, so that each product is a call."""
    found: dict[str, list[float]] = defaultdict(list)
    chosen = ProductKernels(Kernel.ONEDNN, Kernel.ONEDNN, Kernel.MKL)
    table = mock.patch.object(kernel_choice, "measured_table", lambda sizes, _: dict.fromkeys(sizes, chosen))
    with timed(found), table:
        told = train(npz, hidden, 0, steps, 0, ["commit.every=10h"], cores=1)
    return {name: _median_ms(times_s, steps) for name, times_s in found.items() if times_s} | {
        "all": told["cpu_ms_a_step"]
    }


def _median_ms(times_s: list[float], steps: int) -> float:
    """Milliseconds a step of calls that are made in each step, or at each close."""
    calls = max(1, len(times_s) // steps)
    sums_s = [sum(times_s[at : at + calls]) for at in range(0, len(times_s), calls)]
    return 1e3 * statistics.median(sums_s[len(sums_s) // 3 :]) * len(sums_s) / steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--npz", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    print(json.dumps({name: round(ms, 2) for name, ms in figures(given.npz, given.hidden, given.steps).items()}))
