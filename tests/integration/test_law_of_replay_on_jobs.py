"""A job that exports by the hour, its rank 0 killed with signal 9 in between: what lies in the folder obeys the law.

What is read is Parquet and JSON alone. Random histories of shards and exports: tests/contract/test_law_of_replay.py.
"""

import json

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint, AtInstant
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from tests.integration.timed_job import manifests, rows_of, write_timed_job

HOURLY = """
[exports.main]
delta = "30m"
on_late = "wait"

[exports.whole]
base = "2h"
on_late = "wait"
keep = 100
"""
LIVES = [
    "tables.default.admission=[{kind='count',n=2}]",
    "tables.default.delete_below=0.3",
    "tables.default.decay=0.5",
    "tables.default.max_shrink_fraction=1.0",
    "tables.default.slots={a={admission=[],delete_after_days=1,delete_below=0.0}}",
]
DEATHS = [
    AtInstant(RANK_0, 2, 0.0),
    AtFailpoint(RANK_0, Failpoint.EXPORT_CUT, 1),
    AtInstant(RANK_0, 3, 0.05),
    AtFailpoint(RANK_0, Failpoint.OPERATED, 2),
    AtFailpoint(RANK_0, Failpoint.COMMITTED, 2),
    AtInstant(RANK_0, 1, 0.2),
]


def ran(folder, store, deaths, shards):
    """A run over four days, with its rank 0 killed as planned; its exports' folders by stream."""
    setting = [
        f"store.path={store}",
        f"cluster={{trainers=1,shards={shards}}}",
        "train.threads=1",
        "passes.max_events=50",
        *LIVES,
    ]
    job, said = load_job(folder / "job.toml", [*setting, "commit={every='600s',every_passes=3,keep=1}"]), []
    planned = Deaths(job.store, iter(deaths))
    outcome = run(job, planned, lambda worker, text: said.append(f"{worker}: {text}"))
    assert outcome.code == 0 and not planned.unasked, (outcome, said[-30:])
    assert len(planned.died) >= len(deaths) - 2, (planned.died, planned.missed)
    return {stream: job.store / "exports" / stream / "small" for stream in ("main", "whole")}


def replayed(folder, upto):
    """What a base and the deltas after it give, up to a version: the law's left side."""
    state = {}
    for told in manifests(folder):
        if told["version"] <= upto:
            for key in rows_of(folder / "t1" / told["name"], "tombstones"):
                state.pop(key, None)
            state |= rows_of(folder / "t1" / told["name"])
    return state


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shards", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank0_killed_again_and_again_leaves_exports_that_obey_the_law(tmp_path, shards):
    write_timed_job(tmp_path, HOURLY, num_lines=800, step_s=400.0)
    calm, killed = (ran(tmp_path, store, deaths, shards) for store, deaths in (("calm", []), ("killed", DEATHS)))
    told = {stream: manifests(folder) for stream, folder in killed.items()}
    assert [each["kind"] for each in told["main"]] == ["base", *["delta"] * (len(told["main"]) - 1)]
    assert len(told["main"]) > 10 and len(told["whole"]) > 5
    assert sum(each["tables"]["default"]["tombstones"] for each in told["main"]) > 0
    for base in told["whole"]:
        state = replayed(killed["main"], base["version"])
        assert state == rows_of(killed["whole"] / "t1" / base["name"]) != {}, base["name"]
    assert not [path for path in killed["main"].glob("t1/*") if not (path / "_DONE").exists()]
    for stream, folder in calm.items():
        assert [each["name"] for each in manifests(folder)] == [each["name"] for each in told[stream]]
        for each in told[stream]:
            assert rows_of(folder / "t1" / each["name"]) == rows_of(killed[stream] / "t1" / each["name"])
    lines = [json.loads(line)["path"] for line in (killed["main"] / "donefile.txt").read_text().splitlines()]
    assert lines == [f"t1/{each['name']}" for each in told["main"]], "each is told of once, in order"
