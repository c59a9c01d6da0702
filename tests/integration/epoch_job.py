"""A small job whose history is read several times before what follows: JSON lines, samples without a program."""

import json
from pathlib import Path

import numpy as np

FIRST_S, STEP_S = 1_714_521_600, 600
"""The first event's time, and how far apart events are: the history lasts days."""
SPEC = """
name = "epochs"
seed = 4

[sources.history]
kind = "files"
paths = ["history/*.jsonl"]
event_time = { field = "ts" }
epochs = 2

[sources.later]
kind = "files"
paths = ["later.jsonl"]
event_time = { field = "ts" }
after = "history"

[pipe]
kind = "columns"

[[slots]]
names = ["a", "b"]

[[slots]]
name = "x"
kind = "dense"

[[slots]]
name = "click"
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

[tables.default]
dim = 4
decay = 0.8
delete_after_days = 2
max_shrink_fraction = 1.0

[model]
name = "deepfm"
[model.settings]
hidden = [8]

[train]
batch_size = 32

[passes]
max_events = 60

[store]
path = "store"
"""


def write_epoch_job(folder: Path, num_history: int = 300, num_later: int = 100) -> Path:
    """The job file and its events; the history is in two files, and one event in fifty is broken."""
    rng = np.random.default_rng(2)
    taste_A = rng.normal(size=15)
    lines = []
    for number in range(num_history + num_later):
        a, x = int(rng.integers(15)), round(float(rng.normal()), 3)
        click = int(rng.random() < 1 / (1 + np.exp(-taste_A[a] - x)))
        event = {"ts": FIRST_S + STEP_S * number, "a": a, "b": int(rng.integers(200)), "x": x, "click": click}
        lines.append("broken\n" if number % 50 == 7 else json.dumps(event) + "\n")
    (folder / "history").mkdir()
    half = num_history // 2 + 7
    (folder / "history" / "1.jsonl").write_text("".join(lines[:half]))
    (folder / "history" / "2.jsonl").write_text("".join(lines[half:num_history]))
    (folder / "later.jsonl").write_text("".join(lines[num_history:]))
    job = folder / "job.toml"
    job.write_text(SPEC + "\n[metrics]\nwindow = '24h'\n")
    return job
