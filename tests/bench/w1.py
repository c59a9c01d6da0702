"""The workload W1 as samples, and the yardstick beside which it is timed.

Both come from the folder named by HEADRACE_BENCH, by default ../shared/bench beside the checkout: `w1.py` makes the
data, `torch_baseline.py` is plain PyTorch on it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.stream.source import Segment

ROOT = Path(__file__).resolve().parents[2]
YARDSTICKS = Path(os.environ.get("HEADRACE_BENCH", ROOT.parent / "shared" / "bench"))
NUM_FIELDS, NUM_DENSE = 26, 13
BLOCK = 4096


def make(folder: Path, rows: int, text_parts: int = 0) -> Path:
    """W1 in `folder`, made once; its npz file."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "w1.npz"
    if not wanted.exists() or (text_parts and not (folder / "part-000.txt").exists()):
        more = ["--text", str(text_parts)] if text_parts else []
        command = [sys.executable, YARDSTICKS / "w1.py", "--rows", str(rows), "--out", folder, *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return wanted


def baseline(npz: Path, hidden: int, steps: int) -> float:
    """Samples a second of plain PyTorch, 1 process, 2 threads."""
    command = [sys.executable, YARDSTICKS / "torch_baseline.py", npz, "--hidden", str(hidden), "--steps", str(steps)]
    # As anybody runs it: without what `import trainer` sets for its own threads.
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=plain).stdout
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
