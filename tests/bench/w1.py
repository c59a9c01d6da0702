"""The workload W1 as samples, and the yardstick beside which it is timed: plain PyTorch on the same data.

The yardstick is tests.bench.gpu_peers, or `torch_baseline.py` in the folder that HEADRACE_BENCH names, by default
../shared/bench beside the checkout: the same model and optimizers.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.stream.source import Segment

ROOT = Path(__file__).resolve().parents[2]
YARDSTICK = Path(os.environ.get("HEADRACE_BENCH", ROOT.parent / "shared" / "bench")) / "torch_baseline.py"
NUM_FIELDS, NUM_DENSE = 26, 13
VOCAB = (500_000, 400_000, 300_000, 250_000, 180_000, 120_000, 80_000, 50_000, 40_000, 25_000, 20_000, 10_000, 8_000)
VOCAB += (5_000, 4_000, 3_000, 2_000, 1_000, 600, 300, 200, 100, 60, 30, 20, 10)
"""Ids of each field."""
BLOCK = 4096


def make(folder: Path, rows: int, text_parts: int = 0) -> Path:
    """W1 in `folder`, made once; its npz file. With `text_parts` also as so many files of MultiSlot text."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "w1.npz"
    if not wanted.exists():
        np.savez(folder / "new.npz", **drawn(rows))
        (folder / "new.npz").replace(wanted)
    if text_parts and not (folder / "part-000.txt").exists():
        _write_text(np.load(wanted), folder, text_parts)
    return wanted


def drawn(rows: int) -> dict[str, Any]:
    """Ids by Zipf's law in 26 fields, 13 floats, and a label drawn from a hidden logistic model."""
    draw = np.random.default_rng(20_240_501)
    dense = np.log1p(draw.lognormal(0, 1.5, size=(rows, NUM_DENSE))).astype(np.float32)
    ids, logit = np.empty((rows, NUM_FIELDS), np.int32), dense @ draw.normal(0, 0.12, NUM_DENSE).astype(np.float32)
    for field, size in enumerate(VOCAB):
        share = np.cumsum(1.0 / np.arange(1, size + 1) ** 1.05)
        rank = np.minimum(np.searchsorted(share / share[-1], draw.random(rows)), size - 1)
        ids[:, field] = draw.permutation(size)[rank]
        logit += draw.normal(0, 0.35, size).astype(np.float32)[ids[:, field]]
    logit -= np.quantile(logit, 0.5) + 1.0
    label = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(VOCAB)[:-1]])
    return {"dense": dense, "ids": ids, "label": label, "vocab": np.array(VOCAB), "offsets": offsets}


def _write_text(data: Mapping[str, Any], folder: Path, parts: int) -> None:
    dense, label = data["dense"], data["label"]
    signs = data["ids"].astype(np.int64) + data["offsets"][None] + 1
    # The first part, which says that all are there, comes last.
    for part, rows in reversed(list(enumerate(np.array_split(np.arange(len(signs)), parts)))):
        with (folder / f"part-{part:03d}.txt").open("w") as text:
            for floats, ids, y in zip(dense[rows].tolist(), signs[rows].tolist(), label[rows].tolist(), strict=True):
                words = [str(NUM_DENSE), *(f"{x:.4f}" for x in floats), *(f"1 {x}" for x in ids), f"1 {y:.0f}"]
                text.write(" ".join(words) + "\n")


def baseline(npz: Path, hidden: int, steps: int) -> float:
    """Samples a second of plain PyTorch, 1 process, 2 threads."""
    data = ("--hidden", str(hidden), "--steps", str(steps))
    own = ("-m", "tests.bench.gpu_peers", "--kind", "torch", "--device", "cpu", "--npz", npz)
    command = [sys.executable, *((YARDSTICK, npz) if YARDSTICK.exists() else own), *data]
    # As anybody runs it: without what `import trainer` sets for its own threads.
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=plain, cwd=ROOT).stdout
    if printed.startswith("{"):
        return float(json.loads(printed)["samples_per_s"])
    found = re.match(r"(\d+) samples/s", printed)
    assert found, f"the yardstick printed {printed!r}"
    return float(found[1])


class ArrayReader:
    """A `dataset.loader.batch_loader.PassReader` of arrays in memory: position = row, again from the start after the
    last."""

    def __init__(self, npz: Path, rows: int | None = None) -> None:
        """`rows` takes the first so many only."""
        data = np.load(npz)
        self._dense, self._label = data["dense"][:rows], data["label"][:rows]
        signs = data["ids"][:rows].astype(np.uint64) + data["offsets"][None].astype(np.uint64) + np.uint64(1)
        self._signs = np.ascontiguousarray(signs.T)
        self._offset_B1 = np.arange(BLOCK + 1)

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """Blocks of 4,096 samples."""
        for segment in segments:
            for begin in range(segment.begin, segment.end, BLOCK):
                at = begin % (len(self._label) // BLOCK * BLOCK)
                rows = slice(at, at + min(BLOCK, segment.end - begin))
                size = rows.stop - rows.start
                tally.num_events += size
                tally.num_samples += size
                yield Samples(
                    {f"C{f + 1}": Ragged(self._signs[f, rows], self._offset_B1[: size + 1]) for f in range(NUM_FIELDS)},
                    {"dense": self._dense[rows]},
                    {"label": self._label[rows]},
                    np.arange(begin, begin + size),
                    np.full(size, np.nan),
                )

    def close(self) -> None:
        """Nothing to let go of."""


def job(hidden: int, store: Path, steps: int) -> dict:
    """The spec of W1: the yardstick's model, batch and optimizers."""
    return {
        "name": "w1",
        "sources": {"rows": {"kind": "simulated", "partitions": 1, "events": steps * BLOCK}},
        "pipe": {"command": ["cat"]},
        "slots": [
            {"name": "dense", "kind": "dense", "size": NUM_DENSE},
            {"names": ["C{1..26}"]},
            {"name": "label", "kind": "meta"},
        ],
        "tasks": [{"name": "click", "label": "label"}],
        "tables": {"default": {"dim": 16, "first_order": False, "optimizer": {"kind": "adagrad", "per": "element"}}},
        "model": {"name": "wide_deep", "settings": {"hidden": [hidden] * 3}},
        "train": {"batch_size": BLOCK},
        "passes": {"max_events": 25 * BLOCK},
        "metrics": {"halves": False},
        "store": {"path": str(store)},
    }
