"""Whole jobs whose rows age: what is left at the end, and what the summary and the report say of it."""

import json

import pytest

from tests.integration.stream_job import FIRST_S, headrace

SPEC = """
name = "turnover"
[sources.lines]
kind = "files"
paths = ["part-*.txt"]
event_time = { slot = "time" }
[pipe]
command = ["cat"]
[[slots]]
name = "item"
[[slots]]
name = "click"
kind = "meta"
[[slots]]
name = "time"
kind = "meta"
type = "int64"
[[tasks]]
name = "ctr"
label = "click"
[tables.default]
dim = 4
delete_after_days = 1
[model]
name = "lr"
[passes]
max_events = 50
[store]
path = "store"
"""
ALIVE, NEW = 200, 60
"""Items of a day, and those of them that the day before did not have."""


def write(folder, days):
    with (folder / "part-0.txt").open("w") as text:
        for day in days:
            for n in range(ALIVE):
                item = day * NEW + n
                text.write(f"1 {item} 1 {int(item % 3 == 0)} 1 {FIRST_S + day * 86_400 + n * 400}\n")
    job = folder / "job.toml"
    job.write_text(SPEC)
    return job


@pytest.mark.long
@pytest.mark.parametrize("shards", [0, 2])
def test_five_days_of_a_stream_with_30_percent_turnover_end_with_the_rows_that_the_rule_says(tmp_path, shards):
    ran = headrace(write(tmp_path, range(5)), f"cluster.shards={shards}")
    assert ran.code == 0 and "\nheld" not in ran.output, ran.output
    wanted = len({item for day in (3, 4) for item in range(day * NEW, day * NEW + ALIVE)})
    table = ran.report["tables"]["default"]
    assert (table["rows"], table["rows_by_slot"], ran.report["held_shrinks"]) == (wanted, {"item": wanted}, {})
    assert table["bytes"] == table["bytes_by_slot"]["item"] > 0
    assert f"table     default: {wanted} rows, " in ran.output and f"  item  {wanted} rows, " in ran.output


@pytest.mark.long
def test_a_shrink_after_days_without_events_stands_in_the_summary_the_report_and_the_log(tmp_path):
    job = write(tmp_path, [0, 1, 5])
    ran = headrace(job)
    why = "the day jumped from 1 to 5, and 3 days between had no samples"
    held = ran.report["held_shrinks"]["default"]
    assert (held["rows"], held["why"]) == (ran.report["tables"]["default"]["rows"] - 150, why), (
        "counted as day 5 begins"
    )
    assert f"held      table default, {held['fraction']:.1%} of its rows, since {why}: `headrace shrink" in ran.output
    log = headrace(job, command="log")
    assert f"hold: a shrink of table default waits, {held['going']} of {held['rows']} rows: {why}" in log.output
    assert 0.5 < sum(ran.report["time_s"].values()) / ran.report["wall_s"] <= 1.1, json.dumps(ran.report["time_s"])
    assert "\ntime      " in ran.output and "freshness" not in ran.output
