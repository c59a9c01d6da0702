"""Memory of a rank with `dense.strategy = "sharded"` in each stage, beside "all_reduce"; and samples a second.

`python -m tests.bench.sharded_memory [--worlds 1 2 4] [--width 2048] [--layers 12] [--steps 4]`. The ranks are
processes with one thread each, joined by gloo through the loopback; the model is a perceptron, the optimizer Adam.
*Between steps* counts the tensors that a rank holds when a step is over: parameters, gradients, optimizer. *Most* is
the peak of all tensors within a step, with activations. *Process* is the most memory of the process in steps, above
what it had before it built the model.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.trainer.collectives.ranks import SingleRank, TorchRanks
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.models.layers import Mlp
from headrace.trainer.train.device import keep_freed_memory
from tests.bench.recompute import memory
from tests.bench.w1 import ROOT

CASES = {
    "all_reduce": {},
    "stage 1": {"strategy": "sharded"},
    "stage 2": {"strategy": "sharded", "stage": 2},
    "stage 3": {"strategy": "sharded", "stage": 3},
}
B = 64
"""Samples of a batch."""


def held_mb() -> float:
    """MB of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values()) / 1e6


def peak_of_second_mb(act: Callable[[], None]) -> float:
    """Most MB of tensors that a second call of `act` has at a time, beside those that the first one left.

    A profile does not know of tensors that are freed in it and were there before: so the first call is in it, too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        act()
        with record_function("second"):
            act()
    events = found.profiler.kineto_results.events()
    begin = next(each.start_ns() for each in events if each.name() == "second")
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return max(accumulate(change for at, change in changes if at >= begin)) / 1e6


def one(options: argparse.Namespace) -> dict[str, float]:
    """The figures of one rank, in this process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = SingleRank()
    if options.world > 1:
        store = dist.FileStore(options.store, options.world)
        ranks = TorchRanks(options.rank, options.world, store, "lo", torch.device("cpu"), 120.0)
    torch.manual_seed(1)
    begin_mb = memory("VmRSS")
    net = nn.Sequential(Mlp(options.width, [options.width] * options.layers), nn.Linear(options.width, 1))
    net.parameters_in_calls = True
    strategy = dense_strategy(net, DenseSection(**CASES[options.case]), ranks)
    taken_s = []

    def step() -> None:
        begin_s = time.perf_counter()
        given = torch.randn(B, options.width)
        strategy.clear()
        net(given).square().mean().div(ranks.world).backward()
        assert strategy.finite()
        strategy.after_backward(0, 1.0)
        strategy.wait()
        strategy.step()
        taken_s.append(time.perf_counter() - begin_s)

    step()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(options.steps):
        step()
    process_mb, held = memory("VmHWM") - begin_mb, held_mb()
    found = {
        "between": held,
        "most": held + peak_of_second_mb(step),
        "process": process_mb,
        "rate": B * ranks.world / statistics.median(taken_s[1 : 1 + options.steps]),
    }
    ranks.close()
    return found


def run(case: str, world: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of the rank that has most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.sharded_memory", "--case", case, "--store", f"{folder}/store"]
        command += ["--world", str(world), "--width", str(options.width), "--layers", str(options.layers)]
        command += ["--steps", str(options.steps), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for rank in range(world)
        ]
        printed = [each.communicate()[0] for each in ranks]
    found = [json.loads(each.splitlines()[-1]) for each in printed]
    return {key: (min if key == "rate" else max)(each[key] for each in found) for key in found[0]}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    for hidden, kind in (("case", str), ("store", str), ("rank", int), ("world", int)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(one(options)))
        return
    for world in options.worlds:
        for case in options.cases:
            found = run(case, world, options)
            sizes = " | ".join(f"{found[key]:,.0f}" for key in ("between", "most", "process", "rate"))
            print(f"| {world} | {case} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
