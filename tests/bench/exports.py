"""What exports cost: bases and deltas made by the exporter process, and what training loses meanwhile.

`python -m tests.bench.exports alone --rows 1000000` and `python -m tests.bench.exports beside --rows 1000000 --npz F
--hidden 64` run in a process of their own each, and print JSON. The commits exported have tables of 16 numbers a row.
Beside training, exports of such a commit follow one another for a while, then none is made for as long, in turn.
"""

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest, ParentExport
from headrace.trainer.exports.exporter_process import ExporterConfig, ExporterProcess
from tests.bench import filled
from tests.bench.commits import at_closes, trainer_with
from tests.bench.w1 import BLOCK, ROOT, ArrayReader, job

CHANGED = 10_000
"""Rows that changed of a delta."""
REPEATS = 3
DTYPES = ("float32", "float16", "int8")
ASKED_S = {1_000_000: 2.0, 10_000_000: 25.0}
"""Of a base in float32, by rows."""
DELTA_ASKED_S = 0.5
PASS_BATCHES = 5
AFTER_S = 3.0
"""Training goes on for so long, so that the last turn lies between closes."""
LOOK_S = 0.005


def request(commit: Commit, out: Path, parent: ExportRequest | None = None, dtype: str = "float32") -> ExportRequest:
    """A base of a commit, or a delta since `parent`."""
    return ExportRequest(
        job=filled.JOB,
        stream="main",
        section=ExportSection(dtype=dtype, keep=100, tables=(filled.TABLE,)),
        kind="base" if parent is None else "delta",
        timeline=commit.timeline,
        version=commit.version,
        parent=parent and ParentExport(name=parent.name, version=parent.version, timeline=parent.timeline),
        commit=commit.folder,
        address=str(out),
        stage=out / "no-stage",
        tables={filled.TABLE: filled.section()},
        slots={filled.TABLE: {0: "C1"}},
    )


def made(exporter: ExporterProcess, wanted: ExportRequest) -> ExportAnswer:
    """Have it made, and wait."""
    exporter.submit(wanted)
    while (answer := exporter.poll()) is None:
        time.sleep(LOOK_S)
    assert answer.outcome == "complete", answer
    return answer


def timed(exporter: ExporterProcess, requests: Iterable[ExportRequest]) -> dict[str, float]:
    """From the request to the answer, of exports one after another; the median."""
    taken, answers = [], []
    for each in requests:
        begin_s = time.perf_counter()
        answers.append(made(exporter, each))
        taken.append(time.perf_counter() - begin_s)
    return {"s": float(np.median(taken)), "rows": answers[-1].rows, "mb": answers[-1].num_bytes / 1e6}


@contextmanager
def exporter_of(store: Path) -> Iterator[ExporterProcess]:
    """The process that a rank 0 has, warm once it made an export."""
    exporter = ExporterProcess(ExporterConfig(store=store))
    try:
        yield exporter
    finally:
        exporter.close()


def alone(cache: Path, num_rows: int) -> dict[str, Any]:
    """Bases by type of number, and deltas, with nothing else running."""
    signs_N = np.random.default_rng(1).choice(num_rows, min(CHANGED, num_rows), replace=False)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        commits = filled.store_of(folder / "store", num_rows, [signs_N])
        with exporter_of(folder / "store") as exporter:
            made(exporter, request(commits[0], folder / "warm"))
            for dtype in DTYPES:
                outs = [folder / f"{dtype}-{n}" for n in range(REPEATS)]
                found[f"base, {dtype}"] = timed(exporter, [request(commits[0], out, dtype=dtype) for out in outs])
            outs = [folder / f"{DTYPES[0]}-{n}" for n in range(REPEATS)]
            parents = [request(commits[0], out) for out in outs]
            deltas = [request(commits[1], out, parent) for out, parent in zip(outs, parents, strict=True)]
            found["delta"] = timed(exporter, deltas) | {"asked_s": DELTA_ASKED_S}
    found[f"base, {DTYPES[0]}"]["asked_s"] = ASKED_S.get(num_rows, math.nan)
    return found


def beside(cache: Path, npz: Path, num_rows: int, hidden: int, blocks: int, block_s: float) -> dict[str, float]:
    """Samples a second of W1 with bases being made and without, and how long a base takes then."""
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        base = filled.store_of(folder / "filled", num_rows)[0]
        spec = job(hidden, folder, 1) | {"commit": {"every": "1d"}, "passes": {"max_events": PASS_BATCHES * BLOCK}}
        spec["sources"]["rows"]["events"] = 10**11  # more than are trained
        closes: list[tuple[float, int]] = []
        with trainer_with(spec, ArrayReader(npz), 0, folder) as trainer, exporter_of(folder / "filled") as exporter:
            progress = trainer.parts.progress
            at_closes(trainer, lambda _: closes.append((time.perf_counter(), progress.num_samples)))
            turns = Turns(exporter, (request(base, folder / f"out-{n}") for n in itertools.count()), blocks, block_s)
            thread = threading.Thread(target=turns.run, args=(trainer.loop.drain,), daemon=True)
            thread.start()
            trainer.loop.run()
            thread.join()
    rates = [turn.rate(closes) for turn in turns.over]
    lasted = [each for turn in turns.over for each in turn.exports_s]
    return {
        "ratio": float(np.median([a / b for a, b in zip(rates[::2], rates[1::2], strict=True)])),
        "samples_per_s_with": float(np.median(rates[::2])),
        "samples_per_s_without": float(np.median(rates[1::2])),
        "base_s": float(np.median(lasted)),
        "bases": len(lasted),
    }


@dataclass
class Turn:
    """A while with exports one after another, or without any."""

    begin_s: float
    end_s: float
    exports_s: list[float]

    def rate(self, closes: Sequence[tuple[float, int]]) -> float:
        """Samples a second, of the closes before and after, as if samples came evenly between closes."""
        first, last = np.interp([self.begin_s, self.end_s], *np.array(closes, np.float64).T)
        return float((last - first) / (self.end_s - self.begin_s))


class Turns:
    """With exports and without, in turn, each for as long as the one before. A thread beside training."""

    def __init__(self, exporter: ExporterProcess, wanted: Iterator[ExportRequest], blocks: int, block_s: float) -> None:
        self._exporter, self._wanted, self._blocks, self._block_s = exporter, wanted, blocks, block_s
        self.over: list[Turn] = []

    def run(self, drain: Callable[[], None]) -> None:
        """All of them, then the end of training."""
        made(self._exporter, next(self._wanted))  # both are warm
        for _ in range(self._blocks):
            turn = self._with_exports()
            self.over.append(turn)
            time.sleep(turn.end_s - turn.begin_s)
            self.over.append(Turn(turn.end_s, time.perf_counter(), []))
        time.sleep(AFTER_S)
        drain()

    def _with_exports(self) -> Turn:
        turn = Turn(time.perf_counter(), 0.0, [])
        while turn.end_s - turn.begin_s < self._block_s:
            begin_s, wanted = time.perf_counter(), next(self._wanted)
            made(self._exporter, wanted)
            turn.end_s = time.perf_counter()
            turn.exports_s.append(turn.end_s - begin_s)
            shutil.rmtree(wanted.address)
        return turn


def run(cache: Path, *arguments: str) -> dict[str, Any]:
    """What a fresh process prints."""
    command = [sys.executable, "-m", "tests.bench.exports", *arguments, "--cache", str(cache)]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(said.splitlines()[-1]))


def figures(cache: Path) -> dict[str, dict[str, Any]]:
    """Exports alone, by name; the two sizes show what a delta's cost depends on."""
    cache.mkdir(parents=True, exist_ok=True)
    return {f"exports, {rows // 1_000_000} M rows": run(cache, "alone", "--rows", str(rows)) for rows in ASKED_S}


def rates(cache: Path, npz: Path) -> dict[str, dict[str, Any]]:
    """What training keeps while exports are made, by name."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for rows, hidden in ((1_000_000, 64), (1_000_000, 400), (10_000_000, 64)):
        said = run(cache, "beside", "--rows", str(rows), "--hidden", str(hidden), "--npz", str(npz))
        found[f"training with exports of {rows // 1_000_000} M rows, hidden {hidden}"] = said | {"target": 0.75}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["alone", "beside"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--npz", type=Path)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a block, at least")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    given = parser.parse_args()
    if given.what == "alone":
        print(json.dumps(alone(given.cache, given.rows)))
    else:
        print(json.dumps(beside(given.cache, given.npz, given.rows, given.hidden, given.blocks, given.seconds)))
