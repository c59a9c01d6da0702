"""Replicas that follow a two-tower job retrieve its items: live, from exports, after a kill, from a new catalogue."""

import json
import signal
import time

import pytest

from headrace.deadline import Deadline
from tests.integration.followed_job import FollowedJob, by_count, closes
from tests.integration.stream_job import SPEC
from tests.integration.test_replica import EXPORTS, start  # noqa: F401  # a fixture
from tests.jobs import changed

ITEMS = range(300)
NEW = 999_999
USER = {"a": 3, "history": [1, 2], "d": [0.5, 1.0]}
TOWERS = changed(
    by_count(SPEC),
    {
        "model": {"name": "two_tower", "settings": {"item": ["b"], "hidden": [8], "dim": 4, "frequency_buckets": 64}},
        "retrieval": {"items": {"slot": "b", "files": ["items.jsonl"]}},
    },
)


def write_items(folder, ids):
    unfinished = folder / "_items"
    unfinished.write_text("".join(json.dumps({"b": each, "even": each % 2 == 0}) + "\n" for each in ids))
    unfinished.replace(folder / "items.jsonl")


def retrieved(replica, **asked):
    answer = replica.get("/v2/models/small/retrieve", {"users": [USER], "k": 1000, **asked})
    return answer["model_version"], answer["results"][0]


@pytest.mark.long
def test_replicas_retrieve_the_items_of_a_running_job(tmp_path, start):  # noqa: F811
    followed = FollowedJob(tmp_path, 3, TOWERS)
    write_items(tmp_path, [*ITEMS, NEW])
    job = followed.start(EXPORTS)
    try:
        followed.arrive(1)
        fed = start("--store", str(job.store))
        fed.until(1)
        _, first = retrieved(fed)
        assert first["items"] and set(first["items"]) < set(ITEMS), "NEW was never seen"
        assert first["scores"] == sorted(first["scores"], reverse=True) and max(first["scores"]) <= 1.001
        followed.arrive(3)
        job.until_events(300)
        last = max(closes(job.store))
        fed.until(last)
        version, newest = retrieved(fed)
        assert int(version) >= last and newest["scores"] != first["scores"]
        assert set(first["items"]) < set(newest["items"])
        _, even = retrieved(fed, filter={"equal": {"even": True}})
        assert even["items"] == [each for each in newest["items"] if each % 2 == 0]
        fed.process.kill()
        again = start("--store", str(job.store))
        again.until(last)
        assert retrieved(again)[1] == newest, "as if it had followed from the start; later passes have no events"
        write_items(tmp_path, newest["items"][:5])
        deadline = Deadline.after(20)
        while len(retrieved(again)[1]["items"]) > 5:
            deadline.check("the catalogue is read again")
            time.sleep(0.05)
        assert retrieved(again)[1]["items"] == newest["items"][:5]
        write_items(tmp_path, [*ITEMS, NEW])
        job.process.send_signal(signal.SIGTERM)
        code, output = job.end(100)
        assert code == 0, output
        folder = job.store / "exports" / "serving" / "small"
        current = json.loads((folder / "current.json").read_text())
        exported = start("--exports", str(folder))
        exported.until(current["version"])
        version, older = retrieved(exported)
        assert version == str(current["version"])
        assert older["items"] and set(older["items"]) <= set(newest["items"])
    finally:
        job.kill()
