"""A full disk, at any step of a commit or of the log, costs time and nothing else."""

import itertools
import time

import numpy as np
import pytest
import torch

from headrace.deadline import Deadline
from headrace.failpoints import Failpoint
from headrace.pserver.commit import shard_commits as shard_commit
from headrace.pserver.config import ShardProcess
from headrace.pserver.server.commands import CountRows, DigestRows, RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.store import rocks_store
from headrace.retry import Backoff
from headrace.trainer.checkpoint import commits as commits_module
from headrace.trainer.checkpoint import committer as rank0_commit
from headrace.trainer.checkpoint.commit_store import CommitStore
from headrace.trainer.checkpoint.commits import Commits, ManifestFacts, problems_of
from headrace.trainer.checkpoint.committer import CommitHooks, CommitSteps, Committer
from headrace.trainer.config import CommitSection
from headrace.trainer.journal import log as log_module
from headrace.trainer.journal.log import Log, LogFull, RecordKind, read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.replay_log import ReplayLog
from headrace.trainer.train.commit_state import SavedState
from tests.contract import shards_world as w
from tests.contract.test_shards import some_batches
from tests.fakes.records import close
from tests.small_disk import PAGE, small_disk

EVERY_S = 0.001


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "store") as mounted:
        yield mounted


# Commits


class RankZero:
    """Real rows, a real log and their commits, in a store on a small disk."""

    def __init__(self, store):
        self.store, self.commits, self.version = store, Commits(store), 0
        self.shards = EmbeddedShards(ShardProcess.alone(w.TABLES, w.SEED, live=store / "live"))
        self.shards.call(RestoreCommit(store, [], 0), w.soon())
        self.log = Log.claim(store / "log", 1, Deadline.after(5), timeline="t1")
        hooks = CommitHooks(
            lambda dense: SavedState(self.version, 1, {}, dense, {"m": np.ones(30_000)}, {}), lambda positions: None
        )
        section, facts = CommitSection(every=EVERY_S, keep=1), ManifestFacts("news", "t1", 1, 1, {})
        steps = CommitSteps(CommitStore(store), section, facts, self.log, self.shards, hooks, None)
        self.committer = Committer(steps)

    def train(self):
        self.version += 1
        w.train(self.shards, self.version, some_batches(seed=self.version), seed=self.version, steps=4)

    def commit(self):
        """Try once; the reason of the failure, or None."""
        time.sleep(EVERY_S)  # a commit is due, a pause is over
        assert self.committer.due(self.version)
        self.committer.begin(self.version, {"w": torch.ones(30_000)})
        self.committer._thread.submit(int).result()  # it is behind the commit
        assert not self.committer.due(0)
        return self.committer.status().failing

    def dirty_rows(self):
        return sum(stats.dirty_rows for stats in self.shards.call(CountRows(), w.soon()).tables.values())

    def assert_only(self, version):
        """Only the whole commit of that version exists: no other folder, no file under a temporary name."""
        (commit,) = self.commits.whole()
        assert commit.version == version == self.committer.version and not problems_of(commit)
        assert [path.name for path in self.commits.folder.iterdir()] == [commit.name]
        assert {str(path.relative_to(commit.folder)) for path in commit.folder.rglob("*") if path.is_file()} == {
            "manifest.json",
            *commit.files,
        }
        assert not [path for path in self.store.rglob("*") if path.suffix in (".tmp", ".part")]

    def assert_holds_all(self):
        """The newest commit restores every row."""
        commit = self.commits.whole()[-1]
        again = EmbeddedShards(ShardProcess.alone(w.TABLES, w.SEED, live=self.store / "again"))
        again.call(RestoreCommit(commit.folder, commit.shards, commit.version), w.soon())
        assert again.call(DigestRows(), w.soon()) == self.shards.call(DigestRows(), w.soon())
        again.close()

    def close(self):
        self.committer.close()
        self.shards.close()
        self.log.close()


@pytest.fixture
def rank0(disk, monkeypatch):
    monkeypatch.setattr(rocks_store, "RECOVERY", Backoff((0.0,) * 7))
    made = RankZero(disk.folder)
    made.train()
    assert made.commit() is None and made.dirty_rows() == 0
    yield made
    made.close()


@pytest.mark.parametrize("what", ["room", "names"])
def test_a_commit_without_room_leaves_nothing_and_is_made_once_there_is_room(disk, rank0, what):
    """Gives a little more room at each try, so that the disk is full at one step after the other."""
    rank0.train()
    dirty_rows, reasons = rank0.dirty_rows(), []
    for amount in itertools.count():
        disk.leave(amount * PAGE) if what == "room" else disk.leave_names(amount)
        reason = rank0.commit()
        if reason is None:
            break
        reasons.append(reason)
        rank0.assert_only(1)
        assert "No space left on device" in reason and str(disk.folder) in reason
        assert rank0.dirty_rows() == dirty_rows
    # The first step and the last one before the manifest. Compaction frees room at any time, so a try may miss a step
    # between. The test below has every step.
    missing = [words for words in ("next.sst.part", "serializ") if not any(words in reason for reason in reasons)]
    assert len(reasons) > 10 and (what == "names" or not missing), reasons
    disk.free()
    assert rank0.dirty_rows() == 0
    rank0.assert_only(2)
    rank0.assert_holds_all()


@pytest.mark.parametrize("what", ["room", "names"])
@pytest.mark.parametrize(
    ("point", "module"),
    [
        (Failpoint.SNAPSHOT_TAKEN, shard_commit),
        (Failpoint.ROWS_WRITTEN, shard_commit),
        (Failpoint.CHECKPOINT_MADE, shard_commit),
        (Failpoint.DENSE_WRITTEN, rank0_commit),
        (Failpoint.PARTS_WRITTEN, rank0_commit),
        (Failpoint.MANIFEST_WRITTEN, commits_module),
        (Failpoint.COMMITTED, rank0_commit),
        (Failpoint.PRUNE_BEGUN, commits_module),
    ],
)
def test_a_disk_that_fills_up_between_two_steps_of_a_commit(disk, rank0, monkeypatch, what, point, module):
    def fill(reached):
        if reached is point:
            disk.leave(0) if what == "room" else disk.leave_names(0)

    monkeypatch.setattr(module, "failpoint", fill)
    rank0.train()
    reason = rank0.commit()
    needs_no_room = point in (Failpoint.MANIFEST_WRITTEN, Failpoint.COMMITTED, Failpoint.PRUNE_BEGUN)
    assert (reason is None) == needs_no_room, reason
    rank0.assert_only(2 if needs_no_room else 1)
    monkeypatch.undo()
    disk.free()
    rank0.train()
    assert rank0.commit() is None
    rank0.assert_only(3)
    rank0.assert_holds_all()


# The log


def records(folder):
    return [(record.kind, record.body.get("number")) for record in read(folder)]


def close_of(number):
    digests = {"dense": "d" * 64, "pushes": "p" * 32, "metrics": "m" * 64}
    return close(number, events=10, samples=10, digests=digests)


@pytest.fixture
def joblog(disk):
    log = Log.claim(disk.folder / "log", 1, Deadline.after(5), timeline="t1")
    yield log
    log.close()


def test_the_log_has_reserved_room_on_a_full_disk(disk, joblog):
    disk.leave(0)
    passes = log_module.RESERVE_BYTES // 2 // 500
    for number in range(1, passes):
        joblog.append(PassPlan(number, ()))
        joblog.append(close_of(number))
    assert len(records(joblog.folder)) == 2 * passes - 1


@pytest.fixture
def nothing_reserved(monkeypatch):
    monkeypatch.setattr(log_module, "RESERVE_BYTES", 0)


def test_a_log_without_room_takes_records_again_once_there_is_some(nothing_reserved, disk, joblog):
    told = []
    for kind in (RecordKind.PLAN, RecordKind.CLOSE) * 3:
        disk.leave(0)
        number = len(told) + 1
        with pytest.raises(LogFull, match="make room"):
            while True:
                joblog.append(PassPlan(number, ()) if kind is RecordKind.PLAN else close_of(number))
                told.append((kind, number))
                number += 1
        disk.free()
        assert records(joblog.folder)[1:] == told
    assert len(told) > 10


def test_a_close_waits_for_room_and_says_so(nothing_reserved, disk, joblog, monkeypatch):
    told = ReplayLog(joblog, None, [], None, "fail", 60.0)
    troubles = []

    def wait(seconds):
        troubles.append(told.trouble)
        disk.free()

    monkeypatch.setattr(told._retrier._stopping, "wait", wait)
    disk.leave(0)
    number = 0
    while not troubles:
        number += 1
        told.close(close_of(number))
    (trouble,) = troubles
    assert trouble.startswith("training waits, for the log cannot be written; the job stops after 60 s of it: ")
    assert f"{joblog.folder}/00000001-0001.log: No space left on device" in trouble and told.trouble == ""
    assert records(joblog.folder)[1:] == [(RecordKind.CLOSE, n) for n in range(1, number + 1)]


@pytest.mark.parametrize("what", ["room", "names"])
def test_a_claim_without_room_leaves_the_job_to_the_generation_before(nothing_reserved, disk, joblog, what):
    joblog.append(PassPlan(1, ()))
    disk.leave(0) if what == "room" else disk.leave_names(0)
    with pytest.raises(LogFull, match="make room"):
        Log.claim(disk.folder / "log", 2, Deadline.after(5), timeline="t1")
    assert sorted(path.name for path in joblog.folder.iterdir()) == ["00000001-0001.log", "lock"]
    joblog.append(close_of(1))
    assert records(joblog.folder)[1:] == [(RecordKind.PLAN, 1), (RecordKind.CLOSE, 1)]
