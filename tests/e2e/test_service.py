"""The service without mocks: news from Kafka, two trainers on two shards, a replica, all asked for over REST.

A producer writes while everything happens that an operator does, and everything that may die is killed. In the end
every event counts once, everybody says the same of it, and nothing is left running.
"""

import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from headrace.deadline import Deadline
from tests.e2e.news_service import EXAMPLE, WITHIN_S, spec
from tests.e2e.news_stream import made_up, real
from tests.e2e.news_world import AT, TOLERANCE, World, compare
from tests.e2e.test_examples import NEWS, news_data
from tests.e2e.test_news_exports import manifests, replayed, rows_of
from tests.integration.hosted_service import kill, launcher
from tests.integration.running_job import workers_of
from tests.integration.test_replica import tensors

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1800)]

LR, LR_NOW = "tables.default.optimizer.lr", 0.03
RULE = {"delete_below": 1.0, "allow": True}


@pytest.fixture
def world_of(kafka, tmp_path):
    made = []

    def make(events):
        made.append(World(kafka, tmp_path, events))
        return made[-1]

    yield make
    for world in made:
        world.clean_up()


@pytest.mark.parametrize("events", ["made up", pytest.param("real", marks=[pytest.mark.data, news_data])])
def test_every_event_counts_once_and_all_say_the_same_whatever_is_asked_and_killed(world_of, events):
    world = world_of(made_up() if events == "made up" else real(NEWS))
    submit(world)
    fed = world.fed()
    predict_with_a_pinned_version(world, fed)
    set_a_learning_rate(world)
    export(world)
    shrink(world)
    kill_the_service(world, fed)
    for worker in ("trainer-1", "shard-1"):
        kill_a_worker(world, worker, fed)
    fed = kill_the_replica(world, fed)
    end_the_stream(world)
    exported = export_all(world, fed)
    last = drain(world)
    everybody_says_the_same(world, (fed, exported), last)
    deltas_replay_to_the_base(world)
    every_event_counted_once(world, last)
    the_log_and_the_audit_tell_it(world)
    nothing_is_left(world)
    a_rerun_is_identical(world)
    world.say("done")


def submit(world):
    """Who may not is refused; who asks twice under one key has one job."""
    cluster = {"trainers": 2, "shards": 2}
    sections = spec(world.kafka.servers, world.producer.topic, cluster=cluster)
    body = {"spec": sections, "base": str(world.news.data)}
    for caller in (world.viewer, world.operator):
        assert caller.answer("POST", "/jobs", body).status_code == 403
    first, again = (world.admin.answer("POST", "/jobs", body, Idempotency_Key="submit") for _ in range(2))
    assert first.status_code == again.status_code == 201, first.text
    assert again.headers["Idempotency-Replayed"] == "true" and again.json() == first.json()
    world.watching.start()
    world.producer.start()
    world.news.until(lambda job: (job["version"] or 0) >= 2, "two passes were closed")
    world.say("submitted, and two passes are closed")


def predict_with_a_pinned_version(world, fed):
    """A commit that somebody keeps is predicted with while training goes on; the replica says the same with it."""
    world.operator.ask("POST", f"{AT}/pause")
    world.news.until(lambda job: job["phase"] == "paused", "it paused")
    name, version = committed_where_a_replica_is(world, fed)
    assert "olga" in world.operator.ask("POST", f"{AT}/commits/{name}/pin")["held_by"]  # maybe beside an export
    assert fed.model_at(version)["held_back"]
    world.operator.ask("POST", f"{AT}/resume")
    manifest, table = world.predicted(name, "pinned")
    assert manifest["version"]["commit"] == name
    compare(world, fed, table, version)
    fed.follow()
    world.news.until(lambda job: job["version"] > version, "training went on")
    fed.until(version + 1)
    world.pinned = name
    world.say(f"predicted with {name}")


def committed_where_a_replica_is(world, fed):
    """A commit of a version that the replica holds: name and version. A pass or two may be closed after a pause."""
    deadline = Deadline.after(WITHIN_S)
    while True:
        key = f"commit-{world.news.job()['version']}"
        first = world.operator.answer("POST", f"{AT}/commits", Idempotency_Key=key)
        again = world.operator.answer("POST", f"{AT}/commits", Idempotency_Key=key)
        assert again.headers["Idempotency-Replayed"] == "true" and again.json()["id"] == first.json()["id"]
        name = world.operator.done(first.json())["name"]
        version = int(name.split("-")[1])
        fed.until(version)
        if version in fed.versions():
            return name, version
        assert not deadline.passed(), f"the replica never came to a version at rest: {fed.said()}"


def set_a_learning_rate(world):
    """By PATCH, which needs the state that it is of."""
    keys = {"keys": {LR: LR_NOW}}
    tag = world.viewer.answer("GET", AT).headers["etag"]
    assert world.operator.answer("PATCH", AT, keys).status_code == 428
    assert world.operator.answer("PATCH", AT, keys, If_Match='"0"').status_code == 412
    assert world.viewer.answer("PATCH", AT, keys, If_Match=tag).status_code == 403
    result = world.operator.done(world.operator.ask("PATCH", AT, keys, If_Match=tag))
    world.set_at = result["version"]
    world.news.until(lambda job: job["overrides"] == {LR: LR_NOW}, "it told of the learning rate")
    world.say(f"the learning rate is another from version {world.set_at} on")


def export(world):
    """One of each stream; asked for twice under one key, it is made once."""
    body = {"stream": "whole", "kind": "base"}
    first, again = (world.operator.ask("POST", f"{AT}/exports", body, Idempotency_Key="whole") for _ in range(2))
    assert first["id"] == again["id"]
    assert world.operator.done(first)["current"]
    found = world.viewer.all(f"{AT}/exports?stream=whole")
    assert [(each["kind"], each["complete"], each["current"]) for each in found] == [("base", True, True)]
    world.say(f"exported {found[0]['name']}")


def shrink(world):
    """What a dry run counts is there still; then it goes."""
    path = f"{AT}/tables/default/shrink"
    dry = world.operator.do(path, RULE | {"dry_run": True, "allow": False})
    assert 0 < dry["going"] < dry["rows"], dry
    again = world.operator.do(path, RULE | {"dry_run": True, "allow": False})
    assert again["rows"] >= dry["rows"], "nothing goes by a dry run, and training makes rows"
    asked = [world.operator.ask("POST", path, RULE, Idempotency_Key="shrink") for _ in range(2)]
    assert asked[0]["id"] == asked[1]["id"]
    shrunk = world.operator.done(asked[0])
    world.shrunk_at = shrunk["version"]
    assert shrunk["going"] > 0
    world.say(f"{shrunk['going']} of {shrunk['rows']} rows went with version {world.shrunk_at}")


def kill_the_service(world, fed):
    """Training and the replica go on without it; its successor finds all, and what was asked before is known."""
    news = world.news
    before = news.job()
    runs_there = launcher(news.store.parent)
    news.service.kill()
    version = news.closed()
    deadline = Deadline.after(WITHIN_S)
    while news.closed() < version + 2:
        assert not deadline.passed(), f"nothing was closed after version {version} without the service"
        time.sleep(0.1)
    fed.until(version + 2)
    news.service.start()
    after = news.until(lambda job: (job["version"] or 0) >= version + 2, "the new service told of the job")
    assert launcher(news.store.parent) == runs_there
    assert (after["generation"], after["restarts"]) == (before["generation"], before["restarts"])
    again = world.operator.answer("POST", f"{AT}/exports", {"stream": "whole", "kind": "base"}, Idempotency_Key="whole")
    assert again.headers["Idempotency-Replayed"] == "true"
    world.say("the service was killed and is back")


def kill_a_worker(world, worker, fed):
    """The next generation goes on, and whoever follows the feed with it."""
    before = world.news.job()
    kill(workers_of(world.news.store)[worker])
    after = world.news.until(
        lambda job: (job["generation"] or 0) > before["generation"] and job["version"] > before["version"] + 1,
        f"training went on without {worker}",
    )
    assert after["restarts"] == after["generation"] - 1 and after["last_death"], after
    fed.until(after["version"])
    world.say(f"{worker} was killed: {after['last_death']}")


def kill_the_replica(world, fed):
    """Another one has all again; training never noticed."""
    before = world.news.job()
    fed.process.kill()
    fed.process.wait()
    fed = world.fed()
    fed.until(before["version"])
    assert world.news.job()["restarts"] == before["restarts"]
    world.say("the replica was killed, and another one serves")
    return fed


def end_the_stream(world):
    """All that was written is learnt."""
    num = world.producer.end()
    told = world.news.until(
        lambda job: job["events"] == num and not any(job["lag"].values()), f"{num} events are learnt"
    )
    assert told["samples"] == world.producer.num_samples and told["rejected"] == {}
    assert sum(told["positions"].values()) == num
    world.say(f"{num} events of {told['samples']} samples are learnt")


def export_all(world, fed):
    """The state as a delta and as a base; who follows the one, and who the feed, says what it must. -> the former."""
    for stream in ("hourly", "whole"):
        name = world.operator.do(f"{AT}/exports", {"stream": stream})["name"]
        fed.until(int(name.split("-")[0]))
    folder = world.news.store / "exports" / "hourly" / "news"
    current = json.loads((folder / "current.json").read_text())
    exported = world.replica("--exports", str(folder))
    exported.until(current["version"])
    inputs, wanted = tensors(folder / current["path"])
    fed.model_at(current["version"])
    for replica in (fed, exported):
        difference = np.abs(replica.answers(inputs, current["version"]) - wanted).max()
        assert difference <= TOLERANCE, (difference, replica.said())
    fed.follow()
    world.say(f"golden predictions of {current['path']} are answered")
    return exported


def drain(world):
    """It ends well, and who watched has heard so. -> the last version."""
    world.operator.ask("POST", f"{AT}/drain")
    ended = world.news.until(lambda job: job["phase"] in ("ended", "failed"), "it ended")
    assert (ended["phase"], ended["outcome"]["code"]) == ("ended", 0), world.news.service.said()[-3000:]
    world.watching.wait()
    assert world.watching.end == {"phase": "ended"}
    world.say("drained")
    return world.news.closed()


def everybody_says_the_same(world, replicas, last):
    """Of the last version: a prediction job, the replica of the feed, and that of the exports."""
    fed, exported = replicas
    fed.until(last)
    manifest, table = world.predicted(str(last), "last")
    assert manifest["version"]["version"] == last
    compare(world, fed, table, last)
    compare(world, exported, table, exported.version())  # nothing was learnt since
    world.say(f"version {last} says the same everywhere")


def deltas_replay_to_the_base(world):
    """By the hour of event time; what the service lists is what lies there."""
    hourly, whole = (world.news.store / "exports" / stream / "news" for stream in ("hourly", "whole"))
    chain, base = manifests(hourly), manifests(whole)[-1]
    assert [told["kind"] for told in chain] == ["base", *["delta"] * (len(chain) - 1)]
    assert sum("each 1h" in told["why"] for told in chain) >= 2, [told["why"] for told in chain]
    *_, (told, rows) = replayed(hourly, chain)
    assert told["positions"] == base["positions"]
    assert rows == rows_of(whole / "t1" / base["name"])
    listed = world.viewer.all(f"{AT}/exports?stream=hourly")
    assert [each["name"] for each in listed] == [each["name"] for each in chain]
    path = f"{AT}/exports/hourly/t1/{told['name']}"
    assert world.viewer.get(path)["manifest"]["version"] == told["version"]
    world.say(f"{len(chain) - 1} deltas replay to {base['name']}, {len(rows)} rows")


def every_event_counted_once(world, last):
    """By the closes that the API tells, which are those that were told as they came, and by the report."""
    closes = world.viewer.all(f"{AT}/metrics/history")
    assert [close["version"] for close in closes] == list(range(1, last + 1))
    assert sum(close["events"] for close in closes) == world.producer.num_sent
    assert sum(close["samples"] for close in closes) == world.producer.num_samples
    assert world.watching.closes == closes and world.watching.num_streams >= 2
    report = json.loads((world.news.store / "report.json").read_text())
    assert (report["events"], report["samples"]) == (world.producer.num_sent, world.producer.num_samples)
    assert report["metrics"]["life"]["ctr"]["count"] == world.producer.num_samples
    world.say(f"{len(closes)} passes, told in {world.watching.num_streams} streams")


def the_log_and_the_audit_tell_it(world):
    """What was asked acted once, at the version told; and it is written down who asked."""
    acted, version = {}, 0
    for line in reversed(world.viewer.all(f"{AT}/log")):
        if line["kind"] == "close":
            version = int(re.match(r"pass (\d+)", line["words"])[1])
        elif line["kind"] == "operation" and line["words"].startswith(("set", "shrink")):
            acted.setdefault(line["words"].partition(":")[0], []).append(version)
    assert acted == {"set": [world.set_at], "shrink": [world.shrunk_at]}
    done = [each["kind"] for each in world.viewer.all("/operations?job=news")]
    assert {kind: done.count(kind) for kind in done} == {
        **{"set": 1, "shrink": 1, "shrink-dry-run": 2, "export": 3, "predict": 2},
        "commit": done.count("commit"),
    }
    audit = world.admin.all("/audit")
    said = {
        (each["who"], each["role"], each["method"], each["path"].removeprefix("/v1"), each["status"]) for each in audit
    }
    for act in (
        ("ada", "admin", "POST", "/jobs", 201),
        ("vera", None, "POST", "/jobs", 403),
        ("olga", None, "POST", "/jobs", 403),
        ("olga", "operator", "PATCH", AT, 412),
        *(("olga", "operator", "POST", f"{AT}/{act}", 200) for act in ("pause", "resume", "drain")),
        *(("olga", "operator", "POST", f"{AT}/{what}", 202) for what in ("commits", "exports", "predictions")),
        ("olga", "operator", "POST", f"{AT}/tables/default/shrink", 202),
        ("olga", "operator", "PATCH", AT, 202),
    ):
        assert act in said, (act, sorted(said, key=str))
    assert [each["method"] for each in audit if each["who"] == "service"] == ["start"]
    world.say("log and audit tell it")


def nothing_is_left(world):
    """Once the service ends and the replicas do, none of their processes runs."""
    for replica in world.replicas:
        if replica.process.poll() is None:
            assert replica.end() == 0, replica.said()
    assert world.news.service.end() == 0
    deadline = Deadline.after(30)
    while left := world.news.processes():
        assert not deadline.passed(), f"still running 30 s after the service ended: {left}"
        time.sleep(0.05)


def a_rerun_is_identical(world):
    """What was logged from the pinned commit on comes out alike when it is trained again."""
    (world.news.data / "job.toml").write_text((EXAMPLE / "job.toml").read_text())
    command = [
        sys.executable,
        "-m",
        "headrace.service",
        "rerun",
        str(world.news.data / "job.toml"),
        "--from",
        world.pinned,
    ]
    ended = subprocess.run(
        [*command, "--set", f"store.path={world.news.store}"], capture_output=True, text=True, timeout=WITHIN_S
    )
    assert ended.returncode == 0 and "are identical" in ended.stdout, ended.stdout + ended.stderr
    world.say(ended.stdout.strip().splitlines()[-1])
