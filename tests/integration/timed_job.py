"""The small job of stream_job with event times that go on by the hour, and exports; how its exports are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tests.integration.stream_job import SPEC

BEGIN_S = 1_700_000_000 - 1_700_000_000 % 86_400 - 5_400
"""An hour and a half before midnight."""
STEP_S = 6.0
"""Between events."""
SLOWLY = "pipe={command=['sh', '-c', 'sleep 0.4; exec cat'], processes=1}"
"""A setting by which passes take longer than exports."""
TIMED = (
    SPEC.replace("[[tasks]]", '[[slots]]\nname = "time"\nkind = "meta"\ntype = "int64"\n\n[[tasks]]')
    .replace('paths = ["part-*.txt"]', 'paths = ["part-*.txt"]\nevent_time = {slot = "time"}')
    .replace("max_events = 400", "max_events = 100")
)


def write_timed_job(folder: Path, exports: str, num_lines: int = 2000, step_s: float = STEP_S) -> Path:
    """A job of one partition whose events are `step_s` apart; `exports` are its sections."""
    rng = np.random.default_rng(7)
    with (folder / "part-0.txt").open("w") as text:
        for line in range(num_lines):
            a, b, history = rng.integers(20), rng.integers(300), rng.integers(0, 50, rng.integers(0, 4))
            signs = " ".join(map(str, [len(history), *history]))
            time_s = BEGIN_S + round(line * step_s)
            click = int(rng.random() < 0.3)
            text.write(f"2 0.5 -0.5 1 {a} 1 {b} {signs} 1 {click} 1 {rng.integers(40)} 1 {time_s}\n")
    job = folder / "job.toml"
    job.write_text(TIMED + exports)
    return job


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Of the complete exports below a job's folder at a destination, in order of time."""
    found = [json.loads((done.parent / "manifest.json").read_text()) for done in folder.glob("t*/*/_DONE")]
    return sorted(found, key=lambda told: (told["timeline"], told["version"]))


def rows_of(export: Path, what: str = "rows") -> dict[int, tuple[Any, ...]]:
    """Rows of an export, or its tombstones, by key, with plain pyarrow."""
    found: dict[int, tuple[Any, ...]] = {}
    for path in sorted(export.glob(f"{what}-default-*.parquet")):
        table = pq.read_table(path)
        columns = [column.to_pylist() for column in (table["key"], *(table[n] for n in values_of(table)))]
        for key, *values in zip(*columns, strict=True):
            assert key not in found, "a key is in one file once"
            found[key] = tuple(bits(value) for value in values)
    return found


def values_of(table: Any) -> list[str]:
    """Names of the columns that hold values."""
    return [name for name in ("slot", "sign", "weight", "vector", "scale") if name in table.column_names]


def bits(value: Any) -> Any:
    """A value as it can be compared bit for bit."""
    return np.array(value, np.float32).tobytes() if isinstance(value, float | list) else value


def replayed(folder: Path) -> dict[int, tuple[Any, ...]]:
    """What the newest base and the deltas after it give: the law of replay's left side."""
    state: dict[int, tuple[Any, ...]] = {}
    for told in manifests(folder):
        export = folder / told["timeline"] / told["name"]
        if told["kind"] == "base":
            state = {}
        for key in rows_of(export, "tombstones"):
            state.pop(key, None)
        state |= rows_of(export)
    return state
