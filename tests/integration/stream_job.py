"""A small job on made-up MultiSlot text, run as a user runs it: real processes through the command line."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.fakes.warm import warm_environment
from tests.jobs import changed

SPEC = """
name = "small"
seed = 3

[sources.lines]
kind = "files"
paths = ["part-*.txt"]

[pipe]
command = ["cat"]

[[slots]]
name = "d"
kind = "dense"
size = 2

[[slots]]
names = ["a", "b"]

[[slots]]
name = "history"
pooling = "mean"

[[slots]]
names = ["click", "group"]
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

[sample]
group = "group"

[tables.default]
dim = 4

[model]
name = "deepfm"
[model.settings]
hidden = [8]

[train]
batch_size = 64

[passes]
max_events = 400

[metrics]
gauc_by = "group"
slices = ["a"]

[store]
path = "store"
"""


LIVING = (
    changed(
        SPEC,
        {"name": "living", "sources.lines.event_time": {"slot": "time"}, "tables": None},
        slots=[{"name": "time", "kind": "meta", "type": "int64"}],
    )
    + """
[tables.default]
dim = 4
extend_at = 0.5
decay = 0.8
delete_below = 0.15
delete_after_days = 2
max_shrink_fraction = 0.9
admission = [{ kind = "count", n = 2, memory = "1MiB" }]

[tables.default.slots.a]
admission = [{ kind = "count", n = 3, exact = true }, { kind = "probability", p = 0.8 }]
lr = 0.02
delete_below = 0.0
delete_after_days = 30

[tables.default.slots.history]
admission = [{ kind = "probability", p = 0.9 }]
extend_at = 0.0
decay = 0.95

[exports.serving]
base = "72h"
delta = "8h"
keep = 1000
on_late = "wait"

[exports.thin]
base = "96h"
delta = "24h"
dtype = "int8"
delta_threshold = 0.3
delta_keep_days = 3
keep = 1
on_late = "wait"
"""
)
"""Tables that live: keys must earn rows, rows age and go each day, two streams of exports; `write_living_job`."""
FIRST_S, DAYS = 1_700_006_400, 8
"""The living job's events begin at a day's begin, unix seconds, and go on for so many days."""


def write_living_job(folder: Path, num_parts: int = 3, num_lines: int = 400, spec: str = LIVING) -> Path:
    """As `write_job`; events have times, and new signs come for ever."""
    rng = np.random.default_rng(6)
    taste_A = rng.normal(size=20)
    for part in range(num_parts):
        with (folder / f"part-{part}.txt").open("w") as text:
            for line in range(num_lines):
                at_s = FIRST_S + (line * DAYS * 86_400 + int(rng.integers(86_400))) // num_lines
                day = (at_s - FIRST_S) // 86_400
                a, b = rng.integers(20), 20 * day + rng.integers(150)
                history = 10 * day + rng.integers(0, 50, rng.integers(0, 4))
                x, y = rng.normal(size=2)
                click = int(rng.random() < 1 / (1 + np.exp(-taste_A[a] - x)))
                signs = " ".join(map(str, [len(history), *history]))
                text.write(f"2 {x:.4f} {y:.4f} 1 {a} 1 {b} {signs} 1 {click} 1 {rng.integers(40)} 1 {at_s}\n")
    job = folder / "job.toml"
    job.write_text(spec)
    return job


def write_job(folder: Path, num_parts: int = 3, num_lines: int = 400, spec: str = SPEC) -> Path:
    """The spec and its data in `folder`; the path of the spec."""
    rng = np.random.default_rng(5)
    taste_A = rng.normal(size=20)
    for part in range(num_parts):
        with (folder / f"part-{part}.txt").open("w") as text:
            for _ in range(num_lines - 7 * part):
                a, b, history = rng.integers(20), rng.integers(300), rng.integers(0, 50, rng.integers(0, 4))
                x, y = rng.normal(size=2)
                click = int(rng.random() < 1 / (1 + np.exp(-taste_A[a] - x)))
                signs = " ".join(map(str, [len(history), *history]))
                text.write(f"2 {x:.4f} {y:.4f} 1 {a} 1 {b} {signs} 1 {click} 1 {rng.integers(40)}\n")
    job = folder / "job.toml"
    job.write_text(spec)
    return job


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    code: int
    output: str
    report: dict | None


def headrace(
    job: Path,
    *settings: str,
    store: str = "store",
    command: str = "run",
    timeout_s: float = 110,
    options: Sequence[str] = (),
) -> Run:
    """`headrace run` with `--set` for each setting, in a store of its own."""
    more = [part for setting in (*settings, f"store.path={store}") for part in ("--set", setting)]
    process = subprocess.run(
        [sys.executable, "-m", "headrace.service", command, str(job), *more, *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=warm_environment(),
    )
    report = job.parent / store / "report.json"
    found = json.loads(report.read_text()) if report.exists() else None
    return Run(process.returncode, process.stdout + process.stderr, found)
