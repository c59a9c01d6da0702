"""Jobs that export while they train: bases and deltas by the hour, the law of replay, deaths of rank 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import read
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import headrace
from tests.integration.timed_job import BEGIN_S, SLOWLY, manifests, replayed, rows_of, write_timed_job

# Each starts processes a few times; seconds on two cores of their own.
pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(300)]

HOURLY = """
[exports.main]
delta = "30m"

[exports.whole]
"""
ONCE = """
[exports.main]
delta = "2h"
"""


def exported(store: Path, stream: str, job: str = "small") -> Path:
    return store / "exports" / stream / job


@pytest.mark.long
@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_deltas_by_the_hour_replay_to_a_base_bit_for_bit(tmp_path, shards):
    """Three and a third hours in two runs, with a midnight in the second at which rows go."""
    going = ("tables.default.delete_below=0.15", "tables.default.max_shrink_fraction=1.0")
    for num_lines in (800, 2000):  # each end of the stream has its export, however slow the exporter is
        job = write_timed_job(tmp_path, HOURLY, num_lines)
        ended = headrace(job, f"cluster.shards={shards}", *going, SLOWLY)
        assert ended.code == 0, ended.output
    main, whole = (exported(tmp_path / "store", stream) for stream in ("main", "whole"))
    told = manifests(main)
    assert told[0]["kind"] == "base" and told[0]["why"] == "each 30m; a base, for it is the stream's first"
    assert told[-1]["why"] in ("the end of the stream", "each 30m") and len(told) >= 2
    assert sum(each["tables"]["default"]["tombstones"] for each in told) > 0
    for parent, child in zip(told, told[1:], strict=False):
        assert child["kind"] == "delta" and child["parent"]["name"] == parent["name"]
        assert child["event_time"][0] > parent["event_time"][1], "what came after the parent"
    assert told[0]["event_time"][0] == BEGIN_S and told[0]["event_time"][1] >= BEGIN_S + 1800
    base = manifests(whole)[-1]  # of the last pass, perhaps one of no events later or earlier than the last delta
    assert replayed(main) == rows_of(whole / base["timeline"] / base["name"]) != {}
    current = json.loads((main / "current.json").read_text())
    assert current["path"] == f"t1/{told[-1]['name']}"
    assert not Commits(tmp_path / "store").holders() and not list((tmp_path / "store" / "exports-stage").glob("*-0*"))
    operations = [record.body for record in read(tmp_path / "store" / "log") if record.body.get("op") == "exported"]
    assert {body["outcome"] for body in operations} == {"complete"}


@pytest.mark.long
def test_a_rerun_exports_nothing(tmp_path):
    job = write_timed_job(tmp_path, ONCE, num_lines=600, step_s=20.0)
    assert headrace(job).code == 0
    before = manifests(exported(tmp_path / "store", "main"))
    again = headrace(job, command="rerun", options=["--from", "0"])
    assert again.code == 0, again.output
    assert manifests(exported(tmp_path / "store", "main")) == before


POINTS = [
    (Failpoint.OPERATION_LOGGED, 1),
    (Failpoint.OPERATED, 1),
    (Failpoint.PARTS_WRITTEN, 1),
    (Failpoint.COMMITTED, 1),
    (Failpoint.EXPORT_CUT, 1),
    (Failpoint.EXPORT_CUT, 1),
    (Failpoint.REPLAYED, 2),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank0_killed_around_an_export_leaves_the_same_exports(tmp_path):
    """One base at two hours of event time, one delta at the end: the same whoever is fast."""
    write_timed_job(tmp_path, ONCE, num_lines=1500)
    said = []

    def ran(store, deaths):
        job = load_job(tmp_path / "job.toml", [f"store.path={store}", "commit.every='600s'", "train.threads=1"])
        planned = Deaths(job.store, iter([AtFailpoint(RANK_0, point, hit) for point, hit in deaths]))
        outcome = run(job, planned, lambda worker, text: said.append(f"{worker}: {text}"))
        assert outcome.code == 0, (outcome, said[-30:])
        return job, planned

    calm, _ = ran("calm", [])
    killed, deaths = ran("killed", POINTS)
    assert len(deaths.died) >= 5 and not deaths.unasked, (deaths.died, deaths.missed)
    one, other = (exported(job.store, "main") for job in (calm, killed))
    alike = ("name", "kind", "parent", "positions", "event_time", "day", "why", "tables", "thresholds", "metrics")
    assert [{key: told[key] for key in alike} for told in manifests(one)] == [
        {key: told[key] for key in alike} for told in manifests(other)
    ]
    assert [told["kind"] for told in manifests(one)] == ["base", "delta"]
    for told in manifests(one):
        path = f"t1/{told['name']}"
        assert rows_of(one / path) == rows_of(other / path)
        assert (one / path / "dense.safetensors").read_bytes() == (other / path / "dense.safetensors").read_bytes()
    assert not Commits(killed.store).holders()
    assert (
        json.loads((killed.store / "report.json").read_text())["digest"]
        == (json.loads((calm.store / "report.json").read_text())["digest"])
    )


@pytest.mark.slow
def test_a_rewind_begins_with_a_base_below_its_own_timeline(tmp_path):
    job = write_timed_job(tmp_path, ONCE, num_lines=1500)
    assert headrace(job, "commit.every_passes=2", "commit.keep=100").code == 0
    commits = Commits(tmp_path / "store").names()
    ended = headrace(job, command="rewind", options=["--to", commits[-2]])
    assert ended.code == 0, ended.output
    ended = headrace(job)
    assert ended.code == 0, ended.output
    told = manifests(exported(tmp_path / "store", "main"))
    first = next(each for each in told if each["timeline"] == "t2")
    assert first["kind"] == "base" and "; a base, for it is the" in first["why"]


@pytest.mark.slow
def test_a_store_that_begins_anew_leaves_exports_elsewhere_alone(tmp_path):
    job = write_timed_job(tmp_path, f'[exports.main]\npath = "{tmp_path / "elsewhere"}"\n', num_lines=200)
    assert headrace(job).code == 0
    assert headrace(job, options=["--fresh"]).code == 0
    assert [told["timeline"] for told in manifests(tmp_path / "elsewhere" / "small")] == ["t1", "t2"]


CLICKS = Path(__file__).parents[2] / "deploy" / "examples" / "clicks" / "job.toml"


@pytest.mark.slow
def test_a_running_job_exports_when_it_is_asked_and_people_look_and_point(tmp_path):
    """An endless stream: a person gets a base, then a delta, while it trains."""
    setting = "exports.main={delta='24000h',at_end=false}"
    running = RunningJob(CLICKS, tmp_path, setting, "passes.wait='200ms'")

    def say(*words, wrong=0):
        command = [sys.executable, "-m", "headrace.service", *words]
        more = [part for each in (setting, f"store.path={running.store}") for part in ("--set", each)]
        said = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100, check=False)
        assert said.returncode == wrong, said.stdout + said.stderr
        return said.stdout + said.stderr

    try:
        running.until_events(1000)
        assert "-base is complete" in say("export", str(CLICKS))
        assert "-delta is complete" in say("export", str(CLICKS), "--kind", "delta")
        base, delta = json.loads(say("exports", "list", str(CLICKS), "--json"))
        assert (base["kind"], delta["kind"], base["current"], delta["current"]) == ("base", "delta", False, True)
        assert base["why"] == "asked for; a base, for it is the stream's first"
        assert "builds on t1/" + base["name"] in say("exports", "show", str(CLICKS), str(delta["version"]))
        assert "is current" in say("exports", "point", str(CLICKS), "main", base["name"])
        (current,) = [line for line in say("exports", "list", str(CLICKS)).splitlines() if "current" in line]
        assert base["name"] in current
        assert "no complete export 'x'" in say("exports", "show", str(CLICKS), "x", wrong=2)
        assert "'mane'" in say("export", str(CLICKS), "--stream", "mane", wrong=2)
    finally:
        running.kill()
