"""After the death of a shard, a trainer, the launcher or a replica, items are found as by an index built from scratch.

A replica follows a two-tower job, and another one begins anew after each recovery, with all rows of the version. Both
have to find the same items with the same bits of scores. An item that was forgotten before is found nowhere.
"""

import os
import random
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace import Export
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.service.exports.export_request import make_export
from headrace.service.spec.job import load_job
from headrace.service.tables.forget import forget
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports.reader import DENSE
from headrace.trainer.replica import feed_address
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.replica.inference_messages import RequestReader
from headrace.trainer.replica.item_indexer import ItemIndexer
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.retrieval import RetrievalRequest, request_of
from tests.integration.followed_job import PASS_EVENTS, FollowedJob
from tests.integration.test_operations import until
from tests.integration.test_replica import start  # noqa: F401  # a fixture
from tests.integration.test_retrieval_jobs import ITEMS, TOWERS, write_items
from tests.jobs import changed

SPEC = changed(TOWERS, {"cluster": {"trainers": 1, "shards": 1}, "model.settings.cached": 1000})
USERS = [{"a": a, "history": [a, 2 * a], "d": [0.1 * a, 1.0]} for a in range(20)]
VICTIMS = ("shard-0", "trainer-0", "launcher", "replica")
EXPORTS, STREAM = 'exports={serving={delta="72h", clock="wall"}}', "serving"
WITHIN_S = 100.0
EXPORT_S = 300.0
"""Exporters have a low priority: they wait for all others."""


class Followed:
    """A job, the replica that follows it, and the item that it has forgotten."""

    def __init__(self, folder, start, num_passes, spec=SPEC):  # noqa: F811  # the fixture, handed on
        self.job_file = FollowedJob(folder, num_passes + 1, spec)  # a start empties a stream that is there as a whole
        of_lines = [int(line.split()[6]) for line in (folder / "part-0.txt").read_text().splitlines()]
        self.gone = min({*of_lines[:PASS_EVENTS]} - {*of_lines[PASS_EVENTS:]})
        write_items(folder, ITEMS)
        self.job, self._start, self._passes = self.job_file.start(EXPORTS), start, 0

    def begin(self):
        """Train a pass, follow it, export it, and forget the item."""
        self.arrive()
        self.trained()
        self.replica = self._start("--store", str(self.job.store))
        self.replica.until(1)
        assert all(self.gone in items for items, _ in self.live()[1])
        assert self.gone in self.export("base").rows("b")["sign"].to_pylist()
        job = load_job(self.job_file.spec, [f"store.path={self.job.store}"])
        said = [*forget(job, "b", str(self.gone), Deadline.after(WITHIN_S), everywhere=True)]
        assert "the value has no row from version" in said[0]

    def export(self, kind):
        make_export(self.job.store, STREAM, kind, Deadline.after(EXPORT_S))
        return Export.open(self.job.store / "exports" / STREAM / "small")

    def arrive(self):
        self._passes += 1
        self.job_file.arrive(self._passes)

    def trained(self):
        events = self._passes * PASS_EVENTS
        until(self.job, lambda status: status["events"] >= events, f"pass {self._passes}", WITHIN_S)

    def kill(self, victim):
        """End a process, and start what nobody else starts again."""
        match victim:
            case "launcher":
                self.job.process.kill()
                self.job.process.wait()
                self.job = self.job_file.start(EXPORTS)
            case "replica":
                self.replica.process.kill()
                self.replica = self._start("--store", str(self.job.store))
            case _:
                os.kill(self.job.workers()[victim], signal.SIGKILL)

    def live(self):
        """The version that the replica serves, and for each user the items, with the bits of their scores."""
        answer = self.replica.get("/v2/models/small/retrieve", {"users": USERS, "k": len(ITEMS)})
        found = [(each["items"], np.array(each["scores"], np.float32).tobytes()) for each in answer["results"]]
        return int(answer["model_version"]), found

    def recovered(self):
        """Compare the live index with one from scratch as soon as both have the last pass; the latter."""
        self.trained()
        self.replica.until(version := from_scratch(self.job.store).version)
        deadline = Deadline.after(WITHIN_S)
        while (live := self.live())[0] != (scratch := from_scratch(self.job.store)).version:
            deadline.check(f"version {version} is the last one")
        assert live[1] == scratch.found()
        assert all(len(items) > 100 and self.gone not in items for items, _ in live[1])
        return scratch


class FromScratch:
    """An index that is built from all rows of a version."""

    def __init__(self, update):
        self.version = update.version
        self._state = ReplicaState(1, 0, ItemIndexer())
        self._state.apply(update)
        self.index = self._state.items.index

    def found(self):
        model = self._state.model()
        request = request_of(RetrievalRequest.model_construct(users=USERS), model, ["b"])
        _, index, user_BV = self._state.users(model, RequestReader(model, len(USERS)).inputs(request))
        found = index.search(user_BV, len(ITEMS), index.there_I)
        return [(index.catalogue.id_I.take(at_K).to_pylist(), score_K.tobytes()) for score_K, at_K in found]


def from_scratch(store):
    deadline = Deadline.after(WITHIN_S)
    while True:
        feed = FeedUpdates(feed_address.in_store(store))
        try:
            if (update := feed.next(deadline)) is not None:
                assert update.whole
                return FromScratch(update)
        except Unavailable:
            time.sleep(0.05)
        finally:
            feed.close()
        deadline.check("the job sends all its rows")


def assert_gone_from_files(followed):
    """A delta has the vectors of the index from scratch, and neither it nor the newest commit has the item."""
    delta = followed.export("delta")
    scratch = followed.recovered()
    assert delta.version == scratch.version and delta.manifest["kind"] == "delta"
    items, there_I = delta.index(), scratch.index.there_I
    assert items.vectors()[there_I].tobytes() == scratch.index.vectors_IV[there_I].tobytes()
    assert not items.vectors()[~there_I].any() and len(items) == there_I.sum()
    assert followed.gone not in delta.rows("b")["sign"].to_pylist()
    forgotten = Commits(followed.job.store).whole()[-1]
    (sign_M,) = (each for name, each in load_file(forgotten.folder / DENSE).items() if name.endswith("cache.sign_M"))
    assert followed.gone not in sign_M and np.count_nonzero(sign_M) >= PASS_EVENTS // 2, "nor do its vectors teach"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_items_are_found_as_from_scratch_after_each_death(tmp_path, start):  # noqa: F811
    followed = Followed(tmp_path, start, 1 + len(VICTIMS))
    try:
        followed.begin()
        for victim in VICTIMS:
            followed.arrive()
            followed.kill(victim)
            followed.recovered()
        assert_gone_from_files(followed)
    finally:
        followed.job.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_items_are_found_as_from_scratch_after_deaths_at_any_time(tmp_path, start, seed):  # noqa: F811
    chance, deaths = random.Random(seed), 10
    spec = changed(SPEC, {"cluster": {"trainers": 2, "shards": 2, "max_restarts": 1000}})
    followed = Followed(tmp_path, start, 1 + deaths, spec)
    try:
        followed.begin()
        for _ in range(deaths):
            followed.arrive()
            time.sleep(chance.choice((0.0, 0.02, 0.1, 0.5)) * chance.random())
            followed.kill(chance.choice((*VICTIMS, "shard-1", "trainer-1")))
            followed.recovered()
        assert_gone_from_files(followed)
    finally:
        followed.job.kill()
