"""Who follows a running job's live feed holds what the job commits, also after the job was killed on the way."""

import os
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.server.shard import Shard
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports.onnx_model import OnnxModel, with_weights
from headrace.trainer.replica.feed_address import in_store
from headrace.trainer.replica.feed_updates import FeedUpdates
from tests.integration.followed_job import FollowedJob, by_count
from tests.integration.stream_job import SPEC
from tests.jobs import changed

RARELY = ("commit.every_passes=1000", 'commit.every="1000s"')


@pytest.fixture
def followed(tmp_path):
    return FollowedJob(tmp_path, 6)


class Follower:
    """Applies what it is told."""

    def __init__(self, store):
        self.feed, self.version, self.rows, self.last, self.whole = FeedUpdates(in_store(store)), 0, {}, None, []

    def until(self, version, within_s=60.0):
        deadline = Deadline.after(within_s)
        while self.version < version:
            deadline.check(f"version {version}, at {self.version}")
            try:
                update = self.feed.next(Deadline.after(1.0))
            except Unavailable:
                time.sleep(0.05)
                continue
            if update is not None:
                self.apply(update)
        assert self.version == version

    def apply(self, update):
        assert update.version > self.version
        self.version, self.last = update.version, update
        self.whole.append(update.whole)
        if update.whole:
            self.rows, self.onnx, self.model = {}, update.onnx, update.model
        for rows in update.tables["default"].rows:
            self.rows.update(zip(rows.keys_U.tolist(), (row.tobytes() for row in rows.rows_UD), strict=True))
        for key in update.tables["default"].gone.tolist():
            self.rows.pop(key, None)


def committed(store, live, table=TableSection(dim=4)):  # noqa: B008  # frozen
    """Rows and tensors of the newest commit."""
    commit = Commits(store).whole()[-1]
    shard = Shard(ShardProcess.alone({"default": table}, 3, live=live))
    shard.restore(commit.folder, commit.shards, commit.version)
    rows = {}
    for piece in shard.tables["default"].feed.scan(0):
        rows.update(zip(piece.keys_P.tolist(), (row.tobytes() for row in piece.rows_PD), strict=True))
    shard.close()
    tensors = load_file(commit.folder / "dense.safetensors")
    return commit.version, rows, {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}


SHAPES = [
    pytest.param((), id="embedded"),
    pytest.param(("cluster.shards=2", "cluster.trainers=2"), id="2x2", marks=pytest.mark.slow),
    pytest.param(
        ("cluster.shards=1", "cluster.trainers=2", "dense={strategy='sharded', stage=3, bucket_bytes=256}"),
        id="divided",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_who_follows_a_job_holds_what_it_commits_also_after_kill_9(followed, shape, tmp_path):
    job = followed.start(*RARELY, *shape)
    follower = Follower(job.store)
    try:
        followed.arrive(2)
        job.until_events(200, within_s=120)
        follower.until(2)  # while nothing comes
        followed.arrive(4)
        follower.until(4)
        os.kill(job.workers()["trainer-0"], signal.SIGKILL)  # nothing is committed: all is trained again
        job.until_said("restarting")
        followed.arrive(6)
        follower.until(6)
        job.process.send_signal(signal.SIGTERM)
        code, output = job.end()
        assert code == 0, output
    finally:
        follower.feed.close()
        job.kill()
    version, rows, tensors = committed(job.store, tmp_path / "live")
    assert (version, rows) == (follower.version, follower.rows)
    assert {name: value.tobytes() for name, value in tensors.items()} == {
        name: value.tobytes() for name, value in follower.last.dense.items()
    }
    assert follower.whole[0] and [each["name"] for each in follower.model["tasks"]] == ["ctr"]
    dense = OnnxModel(with_weights(follower.onnx, follower.last.dense))
    inputs = {each["name"]: np.zeros((2, *each["shape"][1:]), np.float32) for each in follower.model["inputs"]}
    assert dense.run(inputs)["ctr"].shape == (2,)


ITEMS = by_count(
    changed(
        SPEC.replace('names = ["click", "group"]', 'name = "group"'),
        {
            "model": {"name": "next_item", "settings": {"classes": 40, "mode": "divided", "hidden": [8], "dim": 4}},
            "metrics": None,
        },
        slots=[{"name": "click", "kind": "meta", "type": "uint64"}],
    ).replace('label = "click"', 'label = "click"\nloss = "softmax"')
)


@pytest.mark.long
def test_who_follows_a_job_whose_items_are_divided_holds_those_of_all_trainers(tmp_path):
    """Of a version that comes while it follows, and of one that was there before."""
    followed = FollowedJob(tmp_path, 2, ITEMS)
    job = followed.start(*RARELY, "cluster={trainers=2,shards=1}")
    followed.arrive(1)
    job.until_events(100, within_s=120)
    follower = Follower(job.store)
    try:
        follower.until(1)
        first = follower.last.dense["classes"]
        followed.arrive(2)
        follower.until(2)
        job.process.send_signal(signal.SIGTERM)
        code, output = job.end()
        assert code == 0, output
    finally:
        follower.feed.close()
        job.kill()
    tensors = load_file(Commits(job.store).whole()[-1].folder / "dense.safetensors")
    assert first.shape == (40, 4) and (follower.last.dense["classes"] == tensors["model.classes"]).all()
    assert (first != tensors["model.classes"]).any()
    dense = OnnxModel(with_weights(follower.onnx, follower.last.dense))
    inputs = {each["name"]: np.zeros((2, *each["shape"][1:]), np.float32) for each in follower.model["inputs"]}
    assert dense.run(inputs)["items"].shape == (2, 10)
