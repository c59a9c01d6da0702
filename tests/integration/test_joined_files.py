"""Impressions and clicks in files of their own: read side by side in event time, however files and passes are cut."""

import json
import random
from collections import Counter
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.trainer_here import closes, run

NUM, WINDOW_S = 1_500, 1_200
SPEC = """
name = "joined"
{sources}
[pipe]
kind = "columns"
[[slots]]
names = ["user", "item"]
[[slots]]
name = "click"
kind = "meta"
[[slots]]
name = "impression"
kind = "meta"
type = "uint64"
[join]
label = "click"
key = "impression"
window = "20m"
[[tasks]]
name = "ctr"
label = "click"
[tables.default]
dim = 2
[model]
name = "lr"
"""
SOURCE = """
[sources.{name}]
kind = "files"
paths = ["{name}{pattern}"]
format = "{format}"
event_time = {{ field = "ts" }}
"""
LAYOUTS = {
    "flat": (".jsonl", "lines", lambda ts: 0),
    "hourly": ("/{hour}.jsonl", "lines", lambda ts: int(ts) // 3600),
    "daily": ("/{day}.parquet", "parquet", lambda ts: int(ts) // 86_400),
}


def events():
    """Impressions at uneven rates, few of which are clicked at first and most later: positions tell nothing of time."""
    numbers, ts, impressions, clicks = random.Random(5), 1_700_000_000.0, [], []
    for number in range(NUM):
        ts += numbers.expovariate(0.02 if (ts // 3600) % 4 else 0.002)
        impressions.append({"user": number % 40, "item": number % 30, "impression": number, "ts": round(ts, 3)})
        if numbers.random() < (0.05 if number < NUM // 2 else 0.6):
            clicked = round(ts + numbers.expovariate(1 / 400), 3)
            clicks.append({"impression": number, "click": 1, "ts": clicked})
    end = {"user": 0, "item": 0, "impression": NUM, "ts": max(ts, *(each["ts"] for each in clicks)) + 10 * WINDOW_S}
    impressions.append(end)  # it ends all windows
    return impressions, sorted(clicks, key=lambda click: click["ts"])


def write(folder, layout):
    """The job, with its events in files of a layout."""
    pattern, kind, period = LAYOUTS[layout]
    for name, of_source in zip(("impressions", "clicks"), events(), strict=True):
        for number, part in groupby(of_source, lambda event: period(event["ts"])):
            path = folder / (name + pattern.replace("{hour}", f"{number}").replace("{day}", f"{number}"))
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "parquet":
                pq.write_table(pa.Table.from_pylist(list(part)), path)
            else:
                path.write_text("".join(json.dumps(event) + "\n" for event in part))
    sources = [SOURCE.format(name=name, pattern=pattern, format=kind) for name in ("impressions", "clicks")]
    (folder / "job.toml").write_text(SPEC.format(sources="".join(sources)))
    return folder / "job.toml"


def offline():
    """Samples, clicks among them, and clicks that are left out, of an offline join."""
    impressions, clicks = events()
    shown = {event["impression"]: event["ts"] for event in impressions}
    last = max(event["ts"] for event in (*impressions, *clicks))
    ended = {number for number, ts in shown.items() if ts + WINDOW_S < last}
    in_time = {each["impression"] for each in clicks if each["ts"] <= shown[each["impression"]] + WINDOW_S}
    return len(ended), len(ended & in_time), len(clicks) - len(in_time)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_join_of_files_is_an_offline_join(tmp_path, layout):
    job = write(tmp_path, layout)
    for max_events in (70, 400, 5_000):
        store = tmp_path / f"store-{max_events}"
        ended = run(job, store, f"passes.max_events={max_events}")
        left_out = Counter()
        for close in closes(store).values():
            left_out.update(close.get("left_out") or {})
        life = ended.metrics["life"]["ctr"]
        found = life["count"], round(life["count"] * life["mean_label"]), left_out.total()
        assert found == offline(), f"passes of {max_events}"
