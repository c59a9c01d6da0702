"""The limit of this machine for W1: `python -m tests.bench limit`.

The best kernel of each part of a step is timed alone, as core-milliseconds a batch of 4,096: the CPU time of all
threads, the least of several rounds. Their sum, on cores that are always busy, gives the rate that no program with
these kernels can pass:

- products: the three matrix products of each layer by the best of MKL, oneDNN and numpy's OpenBLAS, on one thread or
  on all; then ReLU and its gradient, one pass each.
- rows: the product's kernels at W1's keys, from ids to keys, cells, sums of gradients and updated rows.
- copies: rows and gradients of a batch once each way through memory, for shards in processes of their own.
- text: the bytes of a batch through `cat`, and the parser.

Then the product's own rates in the same run, in turn with plain PyTorch's (tests.bench.w1), and their share of the
limit: by elapsed time, and by CPU time, which is also right on a machine that others use.

Shapes: as in trainer.features.lookup_kernels; R rows of the table, W floats of a row in the slab.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.config import validate
from headrace.dataset.formats.multislot_parser import MultiSlotParser
from headrace.dataset.spec.schema import Schema
from headrace.pserver import row_optimizer_kernels
from headrace.pserver.rows import kernels as row_kernels
from headrace.pserver.rows.arrays import frozen
from headrace.trainer.config import TrainerJob
from headrace.trainer.features import lookup_kernels
from headrace.trainer.models.linear import Kernel, forward_product, input_gradient, onednn_works, weight_gradient
from tests.bench import parsing
from tests.bench.w1 import BLOCK, NUM_DENSE, NUM_FIELDS, ROOT, baseline, job, make

DIM = 16
INPUTS = NUM_FIELDS * DIM + NUM_DENSE
CORES = os.cpu_count() or 1
BATCHES = 6
"""Batches that the kernels of rows take in turn, so that none is in the cache from the time before."""
SPIN_S = 0.1
"""OpenBLAS' threads have stopped to wait in a loop by then, whose CPU time would count."""
Act = Callable[[], object]


def core_ms(act: Act, rounds: int, calls: int = 1) -> float:
    """CPU milliseconds of one call, of all threads of this process: the least of the rounds, after one untimed."""
    found = []
    for number in range(1 + rounds):
        begin_s = time.process_time()
        for _ in range(calls):
            act()
        if number:
            found.append((time.process_time() - begin_s) / calls * 1e3)
    return min(found)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Have torch multiply with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def products(hidden: int, rounds: int, samples: int = BLOCK) -> dict[str, Any]:
    """Core-ms of all products of the three layers and of the head, and which library was the quickest for each."""
    found: dict[str, Any] = {}
    total_ms = 0.0
    for inputs, outputs, num_layers in ((INPUTS, hidden, 1), (hidden, hidden, 2), (hidden, 1, 1)):
        best = _best_products(samples, inputs, outputs, rounds)
        found |= {f"{inputs} x {outputs}, {name}": f"{ms:.2f} ms by {by}" for name, (ms, by) in best.items()}
        total_ms += num_layers * sum(ms for ms, _ in best.values())
    x_BH = torch.randn(samples, hidden)
    with torch_threads(1):
        relu_ms = core_ms(lambda: x_BH.relu_(), rounds, 3)
        relu_ms += core_ms(lambda: torch.ops.aten.threshold_backward(x_BH, x_BH, 0), rounds, 3)
    flops = 6.0 * samples * (INPUTS * hidden + 2 * hidden * hidden + hidden)
    return found | {
        "products, core-ms": total_ms,
        "GFLOP/s a core": flops / total_ms / 1e6,
        "ReLU, core-ms": 3 * relu_ms,
    }


def _best_products(samples: int, inputs: int, outputs: int, rounds: int) -> dict[str, tuple[float, str]]:
    """Core-ms of each product by the best library, and its name."""
    x_BI, grad_BO, weight_OI = torch.randn(samples, inputs), torch.randn(samples, outputs), torch.randn(outputs, inputs)
    x, grad, weight = x_BI.numpy(), grad_BO.numpy(), weight_OI.numpy()
    out_BO, out_BI, out_OI = np.empty_like(grad), np.empty_like(x), np.empty_like(weight)
    by_kernel: dict[str, Callable[[Kernel], object]] = {
        "forward": lambda kernel: forward_product(kernel, x_BI, weight_OI, None),
        "input's gradient": lambda kernel: input_gradient(kernel, grad_BO, weight_OI),
        "weights' gradient": lambda kernel: weight_gradient(kernel, grad_BO, x_BI),
    }
    by_numpy: dict[str, Act] = {
        "forward": lambda: np.matmul(x, weight.T, out=out_BO),
        "input's gradient": lambda: np.matmul(grad, weight, out=out_BI),
        "weights' gradient": lambda: np.matmul(grad.T, x, out=out_OI),
    }
    found = {}
    kernels = [kernel for kernel in Kernel if kernel is not Kernel.ONEDNN or onednn_works()]
    for name, product in by_kernel.items():
        tries = []
        for kernel in kernels:
            for threads in {1, CORES}:
                with torch_threads(threads):
                    tries.append((core_ms(lambda: product(kernel), rounds, 3), str(kernel)))  # noqa: B023
        tries.append((core_ms(by_numpy[name], rounds, 3), "OpenBLAS"))
        time.sleep(SPIN_S)
        found[name] = min(tries)
    return found


def rows(signs_FN: NDArray[np.uint64], rounds: int, samples: int = BLOCK) -> dict[str, float]:
    """Core-ms of the kernels of rows in a batch, on a table of all ids of `signs_FN`."""
    num_batches = min(BATCHES, signs_FN.shape[1] // samples)
    group_F = np.arange(len(signs_FN), dtype=np.int64)
    made = [Batch(signs_FN[:, n * samples : (n + 1) * samples].copy(), group_F) for n in range(num_batches)]
    key_R = np.empty(signs_FN.size, np.uint64)
    lookup_kernels.flatten_single(np.ascontiguousarray(signs_FN), group_F, key_R)
    table = Table(np.unique(key_R))
    found = {name: 0.0 for name in STEPS}
    for name, step in STEPS.items():
        turns = cycle(made)
        found[name] = core_ms(lambda: step(table, next(turns)), 3 * rounds, num_batches)  # noqa: B023
    return found | {"unique keys": float(np.mean([each.num_unique for each in made]))}


class Batch:
    """The arrays of one batch."""

    def __init__(self, signs_FB: NDArray[np.uint64], group_F: NDArray[np.int64]) -> None:
        num = signs_FB.size
        self.signs_FB, self.group_F = signs_FB, group_F
        self.key_N, self.number_H = np.empty(num, np.uint64), np.empty(1 << (2 * num).bit_length(), np.int32)
        self.key_U, self.first_U = np.empty(num, np.uint64), np.empty(num, np.int32)
        self.inverse_N, self.order_N = np.empty(num, np.int32), np.empty(num, np.int32)
        _keys(None, self)
        self.num_unique = _unique(None, self)
        self.keys_U = frozen(self.key_U[: self.num_unique].copy())
        self.start_U1, self.rows_U = np.empty(self.num_unique + 1, np.int32), np.empty(self.num_unique, np.int32)
        self.cell_CD, self.grad_CD = np.empty((num, DIM), np.float32), np.full((num, DIM), 1e-3, np.float32)
        self.rows_UD = np.empty((self.num_unique, DIM), np.float32)
        self.grads_UD = np.empty((self.num_unique, DIM), np.float32)


class Table:
    """A table with a row for each key."""

    def __init__(self, keys_R: NDArray[np.uint64]) -> None:
        self.keys_R = keys_R
        self.index_I = np.full(1 << int(np.ceil(np.log2(len(keys_R) / 0.65))), row_kernels.EMPTY, np.int32)
        row_kernels.rebuild_index(self.index_I, keys_R, len(keys_R))
        self.slab_RW = np.full((len(keys_R), 2 * DIM), 0.5, np.float32)
        self.settings = np.full((2, 6), 0.01, np.float32)


def _keys(_: Table | None, batch: Batch) -> None:
    lookup_kernels.flatten_single(batch.signs_FB, batch.group_F, batch.key_N)


def _unique(_: Table | None, batch: Batch) -> int:
    batch.number_H.fill(-1)
    return int(lookup_kernels.unique(batch.key_N, batch.number_H, batch.key_U, batch.first_U, batch.inverse_N))


def _group(_: Table, batch: Batch) -> None:
    lookup_kernels.group_occurrences(batch.inverse_N, batch.start_U1, batch.order_N)


def _find(table: Table, batch: Batch) -> None:
    row_kernels.find(table.index_I, table.keys_R, batch.keys_U, batch.rows_U)


def _gather(table: Table, batch: Batch) -> None:
    row_kernels.gather(table.slab_RW, frozen(batch.rows_U), 0, batch.num_unique, batch.rows_UD)


def _expand(_: Table, batch: Batch) -> None:
    lookup_kernels.expand(batch.rows_UD, batch.inverse_N, 0, len(batch.inverse_N), batch.cell_CD)


def _sum(_: Table, batch: Batch) -> None:
    lookup_kernels.sum_single(batch.grad_CD, batch.order_N, batch.start_U1, 0, batch.num_unique, batch.grads_UD)


def _learn(table: Table, batch: Batch) -> None:
    row_optimizer_kernels.adagrad_element(
        table.slab_RW, frozen(batch.rows_U), frozen(batch.grads_UD), 0, batch.num_unique, 0, table.settings
    )


STEPS: dict[str, Callable[[Any, Batch], object]] = {
    "keys of ids": _keys,
    "unique keys of a batch": _unique,
    "occurrences by key": _group,
    "find rows": _find,
    "gather rows": _gather,
    "rows to cells": _expand,
    "sum gradients": _sum,
    "update rows": _learn,
}


def text(data: bytes, schema: Schema, rounds: int) -> dict[str, float]:
    """Core-µs of a sample: its bytes through `cat`, with the CPU time of both, and the parser."""
    num_lines = data.count(b"\n")
    parser = MultiSlotParser(schema)
    parsed_ms = core_ms(lambda: parser.parse(data), rounds)
    piped_ms = min(_through_cat(data) for _ in range(1 + rounds))
    return {
        "bytes a sample": len(data) / num_lines,
        "parser": 1e3 * parsed_ms / num_lines,
        "through cat": 1e3 * piped_ms / num_lines,
    }


def _through_cat(data: bytes) -> float:
    """CPU milliseconds of both processes, without the start of `cat`: less those of one byte."""
    return max(0.0, _piped(data * 4) - _piped(data[:1])) / 4


def _piped(data: bytes) -> float:
    before_s = _cpu_s()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None and child.stdout is not None
        feeding = threading.Thread(target=_feed, args=(child.stdin, data))
        feeding.start()
        while child.stdout.read(1 << 20):
            pass
        feeding.join()
    return 1e3 * (_cpu_s() - before_s)


def _feed(stdin: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[stdin.write(left) :]
    stdin.close()


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages)


def copies(num_unique: int, rounds: int) -> float:
    """Core-ms of rows and gradients of a batch once through memory."""
    rows_UD, out_UD = np.ones((num_unique, DIM), np.float32), np.empty((num_unique, DIM), np.float32)
    return 2 * core_ms(lambda: np.copyto(out_UD, rows_UD), rounds, 10)


def limits(npz: Path, folder: Path, hiddens: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """Core-ms of a batch by part, and the limit of each road. `folder`: of W1 as text."""
    data = np.load(npz)
    signs_NF = data["ids"].astype(np.uint64) + data["offsets"][None].astype(np.uint64) + np.uint64(1)
    of_rows = rows(np.ascontiguousarray(signs_NF.T), rounds)
    num_unique = int(of_rows.pop("unique keys"))
    rows_ms, copies_ms = sum(of_rows.values()), copies(num_unique, rounds)
    schema = Schema.of(validate(TrainerJob, job(64, folder, 1)).slots)
    of_text = text((folder / "part-000.txt").read_bytes(), schema, rounds)
    text_ms = (of_text["parser"] + of_text["through cat"]) * BLOCK / 1e3
    found: dict[str, dict[str, Any]] = {
        f"rows, core-ms a batch of {num_unique} unique keys": of_rows | {"sum": rows_ms},
        "rows and gradients through memory, core-ms": {"sum": copies_ms},
        "text, core-us a sample": of_text,
    }
    for hidden in hiddens:
        of_products = products(hidden, rounds)
        dense_ms = of_products["products, core-ms"] + of_products["ReLU, core-ms"]
        roads = {"embedded": dense_ms + rows_ms, "2 shards": dense_ms + rows_ms + copies_ms}
        if hidden == hiddens[0]:
            roads["text"] = dense_ms + rows_ms + text_ms
        found[f"products, hidden {hidden}"] = of_products
        for road, batch_ms in roads.items():
            limit = CORES * BLOCK / batch_ms * 1e3
            found[f"limit: {road}, hidden {hidden}"] = {"core_ms": batch_ms, "samples_per_s": limit}
    return found


def shares(found: dict[str, dict[str, Any]], npz: Path, folder: Path, steps: dict[int, int], rounds: int) -> None:
    """Put the rates of PyTorch and the product's own beside the limits: medians of rounds that run in turn."""
    rates: dict[str, list[tuple[float, float]]] = {road: [] for road in found if road.startswith("limit: ")}
    theirs: dict[int, list[float]] = {hidden: [] for hidden in steps}
    for _ in range(rounds):
        for hidden, measured in theirs.items():
            measured.append(baseline(npz, hidden, steps[hidden]))
        for road, both in rates.items():
            kind, hidden = _parts_of(road)
            if kind == "text":
                both.append(_from_text(hidden, folder))
            else:
                both.append(_from_memory(npz, hidden, 2 if kind == "2 shards" else 0, steps[hidden]))
    for road, both in rates.items():
        limit, of_torch = found[road], theirs[_parts_of(road)[1]]
        ours, cpu_ms = zip(*both, strict=True)
        parts = [rate / limit["samples_per_s"] for rate in ours]
        ratios = [rate / their for rate, their in zip(ours, of_torch, strict=True)]
        limit |= {
            "product_samples_per_s": statistics.median(ours),
            "pytorch_samples_per_s": statistics.median(of_torch),
        }
        limit |= {"share": statistics.median(parts), "share_spread": [min(parts), max(parts)]}
        limit |= {"of_pytorch": statistics.median(ratios), "of_pytorch_spread": [min(ratios), max(ratios)]}
        if "2 shards" not in road:  # the CPU time of shards is not in it
            product_ms = statistics.median(cpu_ms)
            limit |= {"product_core_ms": product_ms, "share_of_cpu": limit["core_ms"] / product_ms}


def _parts_of(road: str) -> tuple[str, int]:
    """The kind of a road, and the width of its hidden layers."""
    kind, _, hidden = road.removeprefix("limit: ").partition(", hidden ")
    return kind, int(hidden)


def _from_memory(npz: Path, hidden: int, num_shards: int, steps: int) -> tuple[float, float]:
    """Samples a second of a training in a fresh process, and CPU milliseconds of a batch in the trainer."""
    command = [sys.executable, "-m", "tests.bench.training", "--npz", str(npz), "--hidden", str(hidden)]
    command += ["--shards", str(num_shards), "--steps", str(steps)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    told = json.loads(printed.splitlines()[-1])
    return float(told["samples_per_s"]), float(told["cpu_ms_a_step"])


def _from_text(hidden: int, folder: Path) -> tuple[float, float]:
    """The same from text through `cat`, with the command's CPU time: three more epochs of the files, without the first,
    the start and the end."""
    (samples, wall_s, cpu_s), (more, longer_s, more_cpu_s) = (_run_text(hidden, folder, epochs) for epochs in (1, 4))
    return (more - samples) / (longer_s - wall_s), 1e3 * (more_cpu_s - cpu_s) / ((more - samples) / BLOCK)


def _run_text(hidden: int, folder: Path, epochs: int) -> tuple[int, float, float]:
    """Samples, seconds, and CPU seconds of all processes of a job."""
    spec = job(hidden, folder, 0)
    spec["sources"] = {"rows": {"kind": "files", "paths": [str(folder / "part-*.txt")], "epochs": epochs}}
    spec["slots"][0]["name"], spec["passes"] = "dense", {"max_events": 10 * BLOCK}
    with tempfile.TemporaryDirectory() as name:
        before_s = _cpu_s()
        report = parsing.run_job(spec, Path(name))
        return report["samples"], report["wall_s"], _cpu_s() - before_s


def figures(cache: Path, rounds: int, num_rows: int, steps: dict[int, int]) -> dict[str, dict[str, Any]]:
    """Limits, and the product's shares of them."""
    npz, folder = make(cache / f"w1-{num_rows}", num_rows), cache / "w1-text"
    make(folder, 200_000, text_parts=8)
    found = limits(npz, folder, list(steps), rounds)
    shares(found, npz, folder, steps, rounds)
    return found
