"""Replicas that follow a two-tower job retrieve its items: live, from exports, after a kill, from a new catalogue."""

import json
import signal
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace import Export
from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.service.predict.retrieval import retrieve
from headrace.service.spec.job import load_job
from headrace.trainer.predict.batch_retrieval import BatchRetrieval
from tests.integration.followed_job import FollowedJob, by_count, closes
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.integration.test_replica import EXPORTS, start  # noqa: F401  # a fixture
from tests.jobs import changed

ITEMS = range(300)
NEW = 999_999
USER = {"a": 3, "history": [1, 2], "d": [0.5, 1.0]}
SETTINGS = {"item": ["b"], "hidden": [8], "dim": 4, "frequency_buckets": 1024, "popularity": 50}
TOWERS = changed(
    by_count(SPEC),
    {
        "model": {"name": "two_tower", "settings": SETTINGS},
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
        job.until_stored()
        fed = start("--store", str(job.store))
        fed.until(1)
        _, first = retrieved(fed)
        assert first["items"] and set(first["items"]) < set(ITEMS), "NEW was never seen"
        assert first["scores"] == sorted(first["scores"], reverse=True) and max(first["scores"]) <= 1.001, (
            "popularity is a logarithm of shares"
        )
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
        (tmp_path / "items.jsonl").unlink()
        export = Export.open(folder)
        assert str(tmp_path) not in json.dumps(export.model()), "it is read on other machines"
        items = export.index()
        user = export.predict({**{name: [value] for name, value in USER.items()}, "b": [[]]}, outputs=["user_vector"])
        found = items.search(user["user_vector"].to_pylist(), 1000)
        assert {*found["item"].to_pylist()} == {*older["items"]}
        assert np.allclose(found["score"].to_numpy(), older["scores"], rtol=1e-4, atol=1e-6)
    finally:
        job.kill()


def interrupt():
    raise InterruptedError


@pytest.mark.long
def test_many_users_get_the_items_of_an_export_by_it_and_by_its_commit(tmp_path):
    write_items(tmp_path, [*ITEMS, NEW])
    spec = write_job(tmp_path, 1, 300, TOWERS)
    ran = headrace(spec, "exports={serving={}}")
    assert ran.code == 0, ran.output
    exports, users = tmp_path / "store" / "exports" / "serving" / "small", tmp_path / "users.jsonl"
    items, export = Export.open(exports).index(), Export.open(exports)
    assert str(tmp_path) not in json.dumps(export.model()), "it is read on other machines"
    user = export.predict({**{name: [value] for name, value in USER.items()}, "b": [[]]}, outputs=["user_vector"])
    wanted = items.search(user["user_vector"].to_pylist(), 1000)
    users.write_text("\n" + "".join(json.dumps({**USER, "a": sign}) + "\n" for sign in [*range(600), 3]) + " \n")

    def run(output, version="live", check=lambda: None, settings=(), **more):
        asked = {"users": (str(users),), "output": str(tmp_path / output), "version": version, "k": 1000, **more}
        return retrieve(load_job(spec, settings), BatchRetrieval(**asked), lambda *_: None, check)

    one = run("by-export", str(exports), segment_users=250)
    assert one["users"] == 601 and len(one["parts"]) == 3 and (tmp_path / "by-export" / "_SUCCESS").exists()
    table = pq.read_table(tmp_path / "by-export")
    assert table["offset"].to_pylist() == list(range(1, 602)), "lines count from 0, and empty ones are no user"
    assert {*table["items"][600].as_py()} == {*wanted["item"].to_pylist()}
    assert np.allclose(table["scores"][3].as_py(), wanted["score"].to_numpy(), rtol=1e-4, atol=1e-6)
    other = run("by-commit", segment_users=250, threads=3, settings=["cluster={trainers=2, shards=2}"])
    hashes = lambda each: [part["sha256"] for part in each["parts"].values()]  # noqa: E731
    assert hashes(other) == hashes(one) and run("by-commit", segment_users=250) == other
    with pytest.raises(InterruptedError):
        run("by-export-2", str(exports), check=interrupt)
    assert run("by-export-2", str(exports))["users"] == 601
    users.write_text('{"a": 1, "history": [], "d": [0.5, 1.0]}\n{"a": 1, "history": []}\n')
    with pytest.raises(BadInput, match=r"users\.jsonl, line 2: has no 'd'"):
        run("refused")
