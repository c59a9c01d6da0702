"""`dense.recompute`: memory and time of the forward and backward pass of large models, with it and without.

`python -m tests.bench.recompute [--steps 4] [--only NAME ...]`. Each case is a process of its own with one thread.
Memory is the peak of a step above that of the model with its gradients; time is that of the processor.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from headrace.trainer.dense_config import DenseSection
from headrace.trainer.models.contract import SequenceInput
from headrace.trainer.models.deep_crossing import ResidualUnit
from headrace.trainer.models.layers import Mlp
from headrace.trainer.models.sasrec import SequenceEncoder
from headrace.trainer.models.settings import SasrecSettings
from headrace.trainer.train.activations import saved_activations
from headrace.trainer.train.device import keep_freed_memory
from tests.bench.w1 import ROOT

WIDTH, B, L = 429, 4096, 100
CASES = {
    "7 layers of 1,024": (lambda: Mlp(WIDTH, [1024] * 7), None),
    "7 layers of 1,024, dropout": (lambda: Mlp(WIDTH, [1024] * 7, 0.2), 7),
    "24 layers of 512": (lambda: Mlp(WIDTH, [512] * 24), None),
    "deep_crossing, 7 units of 1,024": (lambda: nn.Sequential(*(ResidualUnit(WIDTH, 1024, 0.0) for _ in range(7))), 7),
    "sasrec, 4 blocks": (
        lambda: SequenceEncoder(L, 32, SasrecSettings(target="t", sequence="s", blocks=4, dropout=0.1)),
        None,
    ),
}
"""By name: the block, and its `segments`."""


def memory(key: str) -> float:
    """MB of this process: VmRSS now, or VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{key}:"))


def steps(name: str, recomputes: bool, num_steps: int) -> dict[str, float]:
    """Peaks of memory in MB, of tensors and of the process, and samples a second of processor time, in this process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(1)
    build, segments = CASES[name]
    model = nn.ModuleDict({"part": build()})
    blocks = ["part.blocks"] if name.startswith("sasrec") else ["part"]
    section = DenseSection(recompute={"blocks": blocks, "segments": segments}) if recomputes else DenseSection()
    saved = saved_activations(model, section, torch.device("cpu"), nullcontext)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    most, taken_s = 256 if name.startswith("sasrec") else B, []

    def step(num_samples: int) -> None:
        given = torch.randn(num_samples, WIDTH, requires_grad=True)
        if name.startswith("sasrec"):
            vectors = torch.randn(num_samples, L, 32, requires_grad=True)
            given = SequenceInput(vectors, vectors[:, :, 0], torch.ones(num_samples, L, dtype=torch.bool))
        begin_s = time.process_time()
        with saved.forward():
            loss = model["part"](given).mean(1).square().mean()
        loss.backward()
        taken_s.append(time.process_time() - begin_s)

    step(8)
    begin_mb = memory("VmRSS")  # libraries have their own memory after the first step
    for _ in range(num_steps):
        step(most)
    process_mb, rate = memory("VmHWM") - begin_mb, most / min(taken_s[1:])
    return {"tensors": peak_of_tensors_mb(partial(step, most)), "process": process_mb, "rate": rate}


def peak_of_tensors_mb(act: Callable[[], None]) -> float:
    """Most MB of tensors that `act` has at a time, beside those that are there already."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        act()
    events = found.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return max(accumulate(change for _, change in changes)) / 1e6


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(steps(options.one[0], options.one[1] == "yes", options.steps)))
        return
    for name in options.only:
        found = []
        for recomputes in ("no", "yes"):
            command = [sys.executable, "-m", "tests.bench.recompute", "--one", name, recomputes]
            command += ["--steps", str(options.steps)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
            found.append(json.loads(printed.splitlines()[-1]))
        plain, again = found
        sizes = [f"{plain[key]:.0f} | {again[key]:.0f}" for key in ("tensors", "process")]
        print(f"| {name} | {' | '.join(sizes)} | {again['rate'] / plain['rate']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
