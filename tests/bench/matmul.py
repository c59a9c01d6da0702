"""Matrix products of W1's layers, MKL beside oneDNN: `python -m tests.bench --only matmul`.

For each size of layer: milliseconds of the forward product, the input's gradient and the weights' gradient, in turn,
medians over rounds with the spread; their sums with MKL alone and with the better kernel of each; and the table that a
job with batches of 4,096 would log here.
"""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headrace.trainer.models.linear import Kernel, forward_product, input_gradient, table_message, weight_gradient
from headrace.trainer.train.kernel_choice import measured_table

SIZES = ((416, 64), (64, 64), (416, 128), (416, 400), (400, 400))
SAMPLES, CALLS = 4096, 5


def figures(rounds: int, threads: int = 2) -> dict[str, dict]:
    """By size."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {f"matmul {i} x {o}": _size(i, o, rounds) for i, o in SIZES}
        chosen = table_message(measured_table(SIZES, SAMPLES))
    finally:
        torch.set_num_threads(before)
    table = {size: "/".join(kernels.values()) for size, kernels in chosen.items()}
    return {
        "matmul: machine": {"make": make_of_processor(), "threads": threads, "batch": SAMPLES, "table": table},
        **found,
    }


def _size(inputs: int, outputs: int, rounds: int) -> dict[str, object]:
    x_BI, grad_BO = torch.randn(SAMPLES, inputs), torch.randn(SAMPLES, outputs)
    weight_OI, bias_O = torch.randn(outputs, inputs), torch.randn(outputs)
    products: dict[str, Callable[[Kernel], Tensor]] = {
        "forward": lambda kernel: forward_product(kernel, x_BI, weight_OI, bias_O),
        "input's gradient": lambda kernel: input_gradient(kernel, grad_BO, weight_OI),
        "weights' gradient": lambda kernel: weight_gradient(kernel, grad_BO, x_BI),
    }
    found: dict[str, object] = {}
    mkl_ms = best_ms = 0.0
    for name, product in products.items():
        times_ms = _in_turn(product, rounds)
        medians = {kernel: statistics.median(each) for kernel, each in times_ms.items()}
        found[name] = " / ".join(
            f"{kernel} {medians[kernel]:.2f} ms ({min(each):.2f} to {max(each):.2f})"
            for kernel, each in times_ms.items()
        )
        mkl_ms, best_ms = mkl_ms + medians[Kernel.MKL], best_ms + min(medians.values())
    return {**found, "all MKL, ms": round(mkl_ms, 2), "best of each, ms": round(best_ms, 2)}


def _in_turn(product: Callable[[Kernel], Tensor], rounds: int) -> dict[Kernel, list[float]]:
    """Milliseconds of a call, by round."""
    found: dict[Kernel, list[float]] = {kernel: [] for kernel in Kernel}
    for number in range(1 + rounds):
        for kernel in Kernel:
            begin_s = time.perf_counter()
            for _ in range(CALLS):
                product(kernel)
            if number:
                found[kernel].append((time.perf_counter() - begin_s) / CALLS * 1e3)
    return found


def make_of_processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
