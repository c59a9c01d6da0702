"""What days and shrinks cost tables: how long a close or a step waits for them, and how fast what went is removed.

`python -m tests.bench.aging --rows 10000000 [--memory 512MiB]` runs in a process of its own and prints JSON. The first
3 of 10 rows are last seen on day 0, the others on day 1; then a shrink takes the former. Steps of 20,000 rows follow
one another all the while, as fast as they can: what they lose is the most that a trainer could lose.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.pserver.protocol.table_operations import ShrinkRows
from headrace.pserver.server.commands import Operate, SettleSnapshot, TakeSnapshot, WriteSnapshot
from headrace.pserver.server.embedded import EmbeddedShards
from tests.bench import filled
from tests.bench.w1 import ROOT

STEP_ROWS, STEPS = 20_000, 100
HOT_ROWS, COLD_ROWS = 200_000, 50
"""Of a table: rows that steps fall on; of a step: rows that lie elsewhere, so that some come out of a store."""
GOING = 0.3
"""Of the rows."""
CLOSES = 10
PASS_ROWS = 500_000
"""Of a pass that makes rows of a bounded table: fewer than may wait for a commit."""
PAUSE_ASKED_MS, SWEEP_ASKED = 10.0, 1.0
MEMORY = "512MiB"


class Ageing:
    """A table that was filled, and passes over rows of it that stay."""

    def __init__(self, shards: EmbeddedShards, store: Path, num_rows: int) -> None:
        self.shards, self._store, self._num_rows = shards, store, num_rows
        self._version, self.day = 0, 0
        self._draw = np.random.default_rng(1)
        self._push = filled.gradients(STEP_ROWS)

    def fill(self, *, by_commits: bool) -> None:
        """Rows that will go, then those that stay."""
        going = int(GOING * self._num_rows)
        for day, (begin, end) in enumerate(((0, going), (going, self._num_rows))):
            self.day = day
            size = min(PASS_ROWS, self._num_rows // 20) if by_commits else end - begin
            for first in range(begin, end, size):
                self._version += 1
                filled.learn(self.shards, self._version, np.arange(first, min(first + size, end)), self.day)
                if by_commits:
                    self.commit()

    def commit(self) -> float:
        """Have all rows in the store; seconds that a pass would wait."""
        begin_s = time.perf_counter()
        self.shards.call(TakeSnapshot(self._version), filled.soon())
        taken_s = time.perf_counter() - begin_s
        folder = self._store / f"commit-{self._version}"
        folder.mkdir()
        self.shards.call(WriteSnapshot(folder), filled.soon())
        self.shards.call(SettleSnapshot(True), filled.soon())
        shutil.rmtree(folder)
        return taken_s

    def close(self, day: int) -> float:
        """A pass of one step, and its close: seconds of the latter."""
        self.open()
        self.step(0)
        self.day = day
        return timed(lambda: self.shards.close_pass(day, filled.soon()))

    def open(self) -> None:
        """The next pass."""
        self._version += 1
        self.shards.open_pass(self._version, filled.soon())

    def step(self, number: int) -> float:
        """Seconds of reading and pushing some rows that stay, none of them twice."""
        keys = filled.keys_at(self._signs())

        def act() -> None:
            batch = self.shards.prepare({filled.TABLE: keys}, learn=True)
            self.shards.pull(batch, filled.soon())
            push = {filled.TABLE: self._push}
            self.shards.exchange(number, batch, push, None, filled.StepScale(STEP_ROWS), filled.soon())

        return timed(act)

    def _signs(self) -> np.ndarray:
        """Of one step."""
        going, hot = int(GOING * self._num_rows), min(HOT_ROWS, self._num_rows // 2)
        first = int(self._draw.integers(self._num_rows - hot, self._num_rows - STEP_ROWS + COLD_ROWS))
        cold = np.unique(self._draw.integers(going, self._num_rows - hot, 2 * COLD_ROWS))
        cold = self._draw.permutation(cold)[:COLD_ROWS]
        return np.concatenate([np.arange(first, first + STEP_ROWS - len(cold)), cold])

    def shrink(self) -> float:
        """What is unseen since day 0 is absent; seconds of the close that are the shrink's."""
        shrink = ShrinkRows(table=filled.TABLE, delete_after_days=self.day - 1)
        return timed(lambda: self.shards.call(Operate(self._version, [shrink]), filled.soon()))

    @property
    def sweeping(self) -> bool:
        """Whether rows are still to be removed."""
        return filled.table_of(self.shards).deletions.sweeping

    @property
    def num_rows(self) -> int:
        """Rows that the table counts."""
        return filled.table_of(self.shards).deletions.num_rows


def timed(act: Callable[[], object]) -> float:
    """Seconds."""
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s


def measure(cache: Path, num_rows: int, memory: str | None, *, stepping: bool) -> dict[str, Any]:
    """Without `stepping`, a sweep with nothing beside it."""
    with tempfile.TemporaryDirectory(dir=cache) as name:
        live = Path(name) / "live" if memory else None
        with filled.shards_at(live, filled.section(memory=memory)) as shards:
            table = Ageing(shards, Path(name), num_rows)
            table.fill(by_commits=memory is not None)
            found = _ticks(table) if stepping else {}
            if memory is not None:
                table.commit()
            return found | _sweep(table, stepping=stepping)


def _ticks(table: Ageing) -> dict[str, float]:
    """Closes with a tick of the day and without; the day that comes is the same for all rows that stay."""
    table.close(table.day)
    plain_s = [table.close(table.day) for _ in range(CLOSES)]
    ticks_s = [table.close(table.day + 1) for _ in range(CLOSES)]
    return {
        "close_ms": 1000 * float(np.median(plain_s)),
        "close_with_tick_ms": 1000 * float(np.median(ticks_s)),
        "close_with_tick_ms_most": 1000 * max(ticks_s),
        "tick_asked_ms_more": PAUSE_ASKED_MS,
    }


def _sweep(table: Ageing, *, stepping: bool) -> dict[str, Any]:
    """A shrink, and what it takes to remove its rows."""
    rows_before = table.num_rows
    table.open()
    before_s = [table.step(step) for step in range(STEPS)]
    table.shards.close_pass(table.day, filled.soon())
    shrink_s = table.shrink()
    begin_s, after_s = time.perf_counter(), list[float]()
    table.open()
    while table.sweeping:
        if stepping:
            after_s.append(table.step(len(after_s)))
        else:
            time.sleep(0.001)
    swept_s = time.perf_counter() - begin_s
    table.shards.close_pass(table.day, filled.soon())
    found = {
        "rows": rows_before,
        "gone": rows_before - table.num_rows,
        "sweep_s": swept_s,
        "sweep_M_rows_s": rows_before / swept_s / 1e6,
        "gone_M_rows_s": (rows_before - table.num_rows) / swept_s / 1e6,
        "shrink_ms": 1000 * shrink_s,
        "shrink_asked_ms": PAUSE_ASKED_MS,
    }
    if stepping:
        found |= _steps("before", before_s) | _steps("while_sweeping", after_s)
    return found


def _steps(when: str, taken_s: list[float]) -> dict[str, float]:
    return {
        f"step_ms_{when}": 1000 * float(np.median(taken_s)),
        f"step_ms_{when}_p99": 1000 * float(np.quantile(taken_s, 0.99)),
        f"step_ms_{when}_most": 1000 * max(taken_s),
    }


def figures(cache: Path) -> dict[str, dict[str, Any]]:
    """Everything, by name."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for memory in (None, MEMORY):
        for beside in ("steps", "nothing"):
            command = [sys.executable, "-m", "tests.bench.aging", "--rows", "10000000", "--cache", str(cache)]
            command += [*(["--memory", memory] if memory else []), *(["--alone"] if beside == "nothing" else [])]
            said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
            asked = {"sweep_M_rows_s_target": SWEEP_ASKED}
            where = f"of {memory}, most rows in RocksDB" if memory else "all in memory"
            found[f"shrink, 10 M rows, {where}, beside {beside}"] = json.loads(said.splitlines()[-1]) | asked
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--memory")
    parser.add_argument("--alone", action="store_true", help="no steps beside the sweep")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    given = parser.parse_args()
    print(json.dumps(measure(given.cache, given.rows, given.memory, stepping=not given.alone)))
