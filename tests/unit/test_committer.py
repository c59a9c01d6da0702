"""When commits are made, and the order of their effects; a failed one leaves nothing and is made again."""

import errno
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from headrace.deadline import Deadline
from headrace.pserver.errors import ShardUnavailable, StoreDamaged, StoreFailed
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.server.commands import HandOver, SettleSnapshot, TakeSnapshot, WriteSnapshot
from headrace.trainer.checkpoint import committer as module
from headrace.trainer.checkpoint.commit_store import CommitStore, ManifestFailed
from headrace.trainer.checkpoint.commits import Commits, ManifestFacts, hash_of, problems_of
from headrace.trainer.checkpoint.committer import (
    RETRY_S,
    STEP_S,
    CommitHooks,
    CommitsFail,
    CommitSteps,
    Committer,
)
from headrace.trainer.checkpoint.handover import hand_over, handed_over
from headrace.trainer.config import CommitSection
from headrace.trainer.job_status import CommitStatus, MirrorStatus
from headrace.trainer.journal.log import Log, Superseded
from headrace.trainer.train.commit_state import SavedState
from tests.fakes.records import close
from tests.fakes.troubled_disk import TroubledDisk

EVERY_S, MAX_FAILING_S = 30.0, 100.0
RESIZE = "a"


class Shards:
    """One shard, which writes a file; `fails` has the errors of its calls, by name."""

    def __init__(self, commits, done):
        self.commits, self.done, self.fails, self.since = commits, done, {}, []

    def _called(self, name, *words):
        self.done.append(" ".join(map(str, [name, *words])))
        if name in self.fails:
            raise self.fails[name]

    def call(self, command, deadline):
        match command:
            case TakeSnapshot():
                self._called("snapshot", command.version)
                self.since.append(command.changes_since)
                return 7
            case WriteSnapshot():
                rows = self._rows(command.folder, command.folder.name)
                self._called("write")
                return [ShardCommitPart("shard-0", (0, 4096), {}, {"shard-0/rows": hash_of(rows)})]
            case HandOver():
                self._rows(command.folder, "handed")
                self._called("hand over")
                return [ShardCommitPart("shard-0", (0, 4096), {}, {})]
            case SettleSnapshot():
                return self._called("settle", command.committed, *self.commits.names())

    def _rows(self, folder, text):
        (folder / "shard-0").mkdir()
        (folder / "shard-0" / "rows").write_text(text)
        return folder / "shard-0" / "rows"


class Mirror(CommitStore):
    def __init__(self, store, disk, done):
        super().__init__(store, disk)
        self.done, self.held = done, set()

    def offer(self, commit):
        self.done.append(f"offer {commit.version}")

    def holding(self):
        return self.held

    def with_status(self, status):
        return msgspec.structs.replace(status, mirror=MirrorStatus(version=3))


class OneThread:
    """Replaces the commit's thread: works at once, or on command."""

    def __init__(self, *_, **__):
        self.held, self.hold = [], False

    def submit(self, work, *arguments):
        future = Future()
        self.held.append((future, work, arguments))
        if not self.hold:
            self.go()
        return future

    def go(self):
        future, work, arguments = self.held.pop()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001  # as an executor does
            future.set_exception(error)

    def shutdown(self):
        assert not self.held


class World:
    """A committer with a store, fakes around it, and a clock that is set by hand."""

    def __init__(self, store, monkeypatch, **settings):
        self.now_s, self.done = 1000.0, []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(module, "ThreadPoolExecutor", OneThread)
        self.commits, self.log = Commits(store), Log.claim(store / "log", 1, Deadline.after(5))
        self.shards, self.disk = Shards(self.commits, self.done), TroubledDisk()
        self.mirror = Mirror(store, self.disk, self.done)
        section = CommitSection(**({"every": EVERY_S, "max_failing": MAX_FAILING_S} | settings))
        self.version, self.changes_since, self.told = 0, None, []
        hooks = CommitHooks(self.capture, self.show, lambda: self.changes_since)
        facts = ManifestFacts("news", "t1", 1, 1, {})
        steps = CommitSteps(self.mirror, section, facts, self.log, self.shards, hooks, None)
        self.committer = Committer(steps)
        self.thread = self.committer._thread

    def capture(self, dense):
        self.done.append("capture")
        log_from = self.log.append(close(self.version)).number + 1
        state = {"operations": {"acted": [{"id": RESIZE}]}}
        return SavedState(self.version, log_from, {"a": 9}, dense, {"m": np.ones(2)}, state)

    def show(self, positions):
        self.done.append(f"positions {positions['a']}")

    def close_pass(self, after_s=0.0, **asked):
        """One more pass, and the loop's calls after it; returns the committed versions."""
        self.version += 1
        return self.tick(after_s, **asked)

    def tick(self, after_s=0.0, **asked):
        self.now_s += after_s
        self.commit_if_due(self.version, **asked)
        return self.versions()

    def commit_if_due(self, version, **asked):
        """What the loop does between passes; whether it began a commit."""
        is_due = self.committer.due(version, **asked)
        if is_due:
            self.committer.begin(version, {"w": torch.ones(2)})
        return is_due

    def finish(self, version):
        """What the loop does at an orderly end."""
        return not self.commit_if_due(version, ended=True) and self.committer.finish(version)

    def want(self, version, who="export-main"):
        """A client requests this version, once it is closed."""
        self.committer.exactly(version, who, lambda commit, why: self.told.append((commit, why)))

    def reap(self):
        """Process a finished commit, and begin none."""
        assert not self.committer.due(0)
        return self.committer.status()

    def versions(self):
        return [commit.version for commit in self.commits.whole()]

    def assert_nothing_left_but(self, *versions):
        """Nothing of a failed commit is left, under any name."""
        names = [self.commits.read(name).name for name in self.commits.names()]
        assert self.versions() == list(versions)
        assert sorted(path.name for path in self.commits.folder.glob("*")) == names
        assert not any(problems_of(self.commits.read(name)) for name in names)


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    made = []

    def make(**settings):
        made.append(World(tmp_path, monkeypatch, **settings))
        return made[-1]

    yield make
    for world in made:
        world.log.close()


@pytest.fixture
def world(make_world):
    return make_world()


# When a commit is due


def test_a_commit_is_due_when_its_time_has_come_and_something_is_new(world):
    assert world.close_pass(EVERY_S - 1) == []
    assert world.close_pass(1) == [2]
    assert world.tick(EVERY_S) == [2]  # nothing new
    assert world.close_pass() == [2, 3]


def test_a_commit_is_due_after_so_many_passes(make_world):
    world = make_world(every_passes=2)
    assert [world.close_pass() for _ in range(4)] == [[], [2], [2], [2, 4]]


def test_a_commit_is_due_when_asked_for_once_and_when_memory_is_full(world):
    world.committer.ask()
    assert world.close_pass() == [1]
    assert world.close_pass() == [1]
    assert world.close_pass(full=True) == [1, 3]


def test_one_commit_is_in_flight_and_training_continues(world):
    world.thread.hold = True
    assert world.close_pass(EVERY_S) == []
    assert world.committer.status().writing and world.committer.status().rows == 7
    assert world.close_pass(EVERY_S, full=True) == []
    assert not world.finish(world.version)
    world.thread.go()
    assert world.versions() == [1] and world.committer.version == 0  # the loop was not told yet
    world.tick()
    assert world.committer.version == 1 and world.committer.status().writing  # the next one
    world.thread.go()
    assert world.versions() == [1, 2]


def test_an_orderly_end_commits_what_is_new_and_waits_for_it(world):
    world.close_pass()
    assert not world.finish(1)
    assert world.finish(1) and world.versions() == [1]
    assert world.finish(1) and world.done.count("write") == 1


# Requested commits


def test_a_requested_version_is_committed_at_its_close_and_held_before_pruning(make_world):
    world = make_world(keep=1)
    world.want(1)
    assert world.close_pass() == [1]
    world.reap()
    [(commit, why)] = world.told
    assert (commit.version, why) == (1, "") and world.commits.holders() == {commit.name: ["export-main"]}
    assert world.close_pass(EVERY_S) == [1, 2], "it is not pruned"


def test_a_requested_version_waits_for_the_commit_in_flight(world, monkeypatch):
    world.thread.hold = True
    world.close_pass(EVERY_S)

    def wait(futures, timeout):
        assert timeout == 600.0
        world.thread.hold = False
        world.thread.go()

    monkeypatch.setattr(module, "wait", wait)
    world.want(2)
    assert world.close_pass() == [1, 2]
    monkeypatch.setattr(module, "wait", lambda futures, timeout: None)
    world.thread.hold = True
    world.close_pass(EVERY_S)
    world.want(4)
    world.close_pass()
    assert [why for _, why in world.told] == [
        "", "no commit of version 4 could be made: the commit before it was still being written"
    ]  # fmt: skip
    world.thread.go()


def test_only_the_beginning_of_a_requested_commit_waits_so_that_the_close_and_its_publication_do_not(
    world, monkeypatch
):
    waits = []

    def wait(futures, timeout):
        waits.append(timeout)
        world.thread.hold = False
        world.thread.go()

    monkeypatch.setattr(module, "wait", wait)
    world.thread.hold = True
    world.close_pass(EVERY_S)
    world.version += 1
    world.want(2)
    assert world.committer.due(2) and waits == [], "rank 0 says so in the message of the close"
    world.committer.begin(2, {"w": torch.ones(2)})
    assert waits == [CommitSection().deadline] and world.versions() == [1, 2]


def test_the_client_of_a_failed_commit_is_notified_and_holds_nothing(world):
    world.shards.fails = {"write": StoreFailed("full")}
    world.want(1)
    world.close_pass()
    world.reap()
    [(commit, why)] = world.told
    assert commit is None and "full" in why and world.commits.holders() == {}
    world.assert_nothing_left_but()


def test_a_full_disk_after_the_hold_leaves_no_hold(world):
    world.disk.fails = {"rename": errno.ENOSPC}
    world.want(1)
    world.close_pass()
    world.reap()
    assert world.told[0][0] is None and world.commits.holders() == {}


def test_a_version_is_committed_for_a_reader_even_while_others_pause_after_a_failure(world):
    world.shards.fails = {"write": StoreFailed("full")}
    world.close_pass(EVERY_S)
    world.shards.fails = {}
    world.want(2)
    assert world.close_pass() == [2]


def test_a_commit_without_a_holder_and_one_with_two(world):
    world.want(1, None)
    world.close_pass()
    assert world.commits.holders() == {}
    world.want(2, "export-a")
    world.want(2, "export-b")
    world.close_pass()
    assert list(world.commits.holders().values()) == [["export-a", "export-b"]]


def test_shards_receive_the_version_since_which_changes_are_read(world):
    world.close_pass(EVERY_S)
    world.changes_since = 1
    world.close_pass(EVERY_S)
    assert world.shards.since == [None, 1]


# Order of effects


def test_effects_outside_come_after_the_manifest_and_the_mirror_last(world):
    world.close_pass(EVERY_S)
    name = world.commits.names()[0]
    assert world.done == ["snapshot 1", "capture", "write", f"settle True {name}", "positions 9", "offer 1"]


def test_older_commits_and_their_log_go_after_the_newer_ones_manifest(make_world, monkeypatch):
    monkeypatch.setattr("headrace.trainer.journal.log.PART_BYTES", 1)  # each commit begins a new file of the log
    world = make_world(keep=1, every_passes=1)
    world.close_pass()
    world.mirror.held = set(world.commits.names())
    first = world.log.files()[0].path
    world.close_pass()
    assert world.versions() == [1, 2] and first.exists(), "what the mirror reads stays, and its log"
    world.mirror.held = set()
    world.shards.fails = {"write": StoreFailed("full")}
    world.close_pass()
    assert world.versions() == [1, 2] and first.exists(), "a commit that failed takes nothing away"
    world.shards.fails = {}
    world.reap()
    world.tick(RETRY_S)
    assert world.versions() == [3] and not first.exists()


def test_a_failed_cleanup_is_logged_and_the_commit_remains(world, monkeypatch, caplog):
    def prune(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(world.commits.__class__, "prune", prune)
    world.close_pass(EVERY_S)
    assert "older commits cannot be removed now: [Errno 5] input/output error" in caplog.text
    assert world.reap().version == 1 and world.done[-1] == "offer 1"


# Failures


def no_room(world, monkeypatch, step):
    """Make a step of the next commits meet a full disk; returns a function that makes room again."""
    if step == "shards":
        world.shards.fails = {"write": StoreFailed("/store: No space left on device")}
    elif step in ("folder", "dense"):
        owner, name = {"folder": (module, "sync_tree"), "dense": (SavedState, "write")}[step]
        real = getattr(owner, name)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(owner, name, full)
        return lambda: monkeypatch.setattr(owner, name, real)
    else:
        world.disk.fails = {step: errno.ENOSPC}

    def make_room():
        world.shards.fails, world.disk.fails = {}, {}

    return make_room


@pytest.mark.parametrize("step", ["shards", "dense", "folder", "create", "append", "sync", "rename", "sync_folder"])
def test_a_full_disk_at_any_step_fails_the_commit_which_leaves_nothing_and_is_made_once_there_is_room(
    world, monkeypatch, caplog, step
):
    world.close_pass(EVERY_S)
    make_room = no_room(world, monkeypatch, step)
    world.close_pass(EVERY_S)
    world.assert_nothing_left_but(1)
    assert world.done[-1] == f"settle False {world.commits.names()[0]}", "rows given back, nothing shown or mirrored"
    status = world.reap()
    assert status.version == 1 and status.failing
    assert "commit of version 2 failed and was removed" in caplog.text
    make_room()
    world.now_s += 3
    assert world.close_pass() == [1], "it pauses first"
    assert world.reap().failing_s == 3
    assert world.tick(RETRY_S - 3) == [1, 3], "and does not wait until the next one is due"
    assert world.reap().failing is None and "commits succeed again, at version 3" in caplog.text


def test_a_pause_is_no_longer_than_the_time_between_commits(make_world):
    world = make_world(every=1.0)
    world.shards.fails = {"write": StoreFailed("full")}
    world.close_pass(1)
    world.reap()
    world.shards.fails = {}
    assert world.tick(1) == [1]


def test_commits_that_fail_for_too_long_end_the_job_and_name_the_last_error(world):
    world.close_pass(EVERY_S)
    world.shards.fails = {"write": StoreFailed("/store: No space left on device")}
    world.close_pass(EVERY_S)
    world.reap()
    world.tick(MAX_FAILING_S)
    assert world.reap().failing_s == MAX_FAILING_S
    with pytest.raises(CommitsFail, match=r"for 100 s \(commit.max_failing\); version 1 .*last.*No space") as error:
        world.tick(1)
    assert error.value.exit_code == 1  # a restart would end alike
    world.assert_nothing_left_but(1)


def test_an_end_waits_for_room_no_longer_than_training_does(world):
    world.shards.fails = {"write": StoreFailed("full")}
    world.close_pass()
    assert not world.finish(1) and not world.finish(1)
    world.now_s += RETRY_S
    assert not world.finish(1) and world.done.count("write") == 2
    world.now_s += MAX_FAILING_S
    with pytest.raises(CommitsFail):
        world.finish(1)


@pytest.mark.parametrize("operation", ["sync", "rename", "sync_folder"])
def test_a_manifest_that_may_be_lost_ends_rank_0_and_is_removed(world, operation):
    world.close_pass(EVERY_S)
    if operation == "sync_folder":
        world.disk.sync_folder = failing_after_the_first(world.disk.sync_folder)
    else:
        world.disk.fails = {operation: errno.EIO}
    world.close_pass(EVERY_S)
    with pytest.raises(ManifestFailed, match=r"manifest.json: .*Check this disk") as error:
        world.tick()
    assert error.value.exit_code == 75
    world.assert_nothing_left_but(1)
    assert "offer 2" not in world.done


def test_a_manifest_that_may_be_lost_is_removed_before_a_newer_generation_claims(world):
    world.close_pass(EVERY_S)
    world.disk.sync_folder = failing_after_the_first(world.disk.sync_folder)
    exclusive, seen = world.log.exclusive, []

    @contextmanager
    def watched():
        try:
            with exclusive():
                yield
        finally:
            seen.append(world.versions())

    world.log.exclusive = watched
    world.close_pass(EVERY_S)
    with pytest.raises(ManifestFailed):
        world.tick()
    assert seen and all(versions == [1] for versions in seen)


def failing_after_the_first(sync):
    """The first sync of a commit's folder is that of its parent."""
    calls = []

    def maybe(path):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.EIO, "sync failed")
        sync(path)

    return maybe


def test_a_replaced_rank_0_commits_nothing_and_ends(world, tmp_path):
    world.close_pass(EVERY_S)
    world.thread.hold = True
    world.close_pass(EVERY_S)
    Log.claim(tmp_path / "log", 2, Deadline.after(5)).close()
    world.thread.go()
    with pytest.raises(Superseded):
        world.tick()
    world.assert_nothing_left_but(1)
    assert "offer 2" not in world.done


def test_damaged_rows_end_rank_0_at_once(world):
    world.shards.fails = {"write": StoreDamaged("/live/default: Corruption")}
    world.close_pass(EVERY_S)
    with pytest.raises(StoreDamaged) as error:
        world.tick()
    assert error.value.exit_code == 75  # restored from a sound commit, it may fare better
    world.assert_nothing_left_but()


def test_a_commit_that_was_made_is_never_taken_back(world):
    """A shard that is gone before it is notified ends the generation, not the commit."""
    world.shards.fails = {"settle": ShardUnavailable("shard-0", 3, "gone")}
    world.close_pass(EVERY_S)
    with pytest.raises(ShardUnavailable):
        world.tick()
    world.assert_nothing_left_but(1)


def test_the_status_has_a_commits_age_and_cost(world):
    mirror = MirrorStatus(version=3)
    assert world.committer.status() == CommitStatus(
        version=0, age_s=0.0, rows=0, pause_s=0.0, write_s=0.0, failing_s=0.0, mirror=mirror
    )
    world.thread.hold = True
    world.close_pass(EVERY_S)
    world.now_s += STEP_S
    world.thread.go()
    status = world.reap()
    assert (status.version, status.rows, status.age_s, status.write_s) == (1, 7, 0.0, STEP_S)
    world.now_s += 5
    assert world.committer.status().age_s == 5
    world.committer.close()


# A handover in place of the last commit


def test_a_version_is_handed_over_in_place_of_a_commit(world, tmp_path):
    world.close_pass(EVERY_S)
    world.close_pass()
    world.done.clear()
    assert world.committer.due(2, ended=True)
    world.committer.begin(2, {"w": torch.ones(2)}, hand_over=True)
    assert world.finish(2), "nothing is committed any more"
    assert world.done == ["snapshot 2", "capture", "hand over", f"settle False {world.commits.names()[0]}"]
    assert world.versions() == [1]
    handed = handed_over(tmp_path, RESIZE)
    assert (handed.version, handed.timeline, handed.manifest.positions) == (2, "t1", {"a": 9})
    assert set(handed.own_files) == {"dense.safetensors", "metrics.safetensors"}
    assert hash_of(handed.folder / "dense.safetensors") == handed.files["dense.safetensors"]


def test_after_a_handover_that_failed_the_version_is_committed(world, tmp_path):
    world.shards.fails["hand over"] = StoreFailed("no room")
    world.version = 1
    for committed in (False, True):
        assert world.committer.due(1, ended=True)
        world.committer.begin(1, {"w": torch.ones(2)}, hand_over=True)
        assert world.finish(1) == committed and handed_over(tmp_path, RESIZE) is None
        world.now_s += RETRY_S
    assert world.versions() == [1] and not world.committer.has_handed_over


def test_a_commit_that_was_requested_is_made_and_not_handed_over(world, tmp_path):
    world.version = 1
    world.want(1)
    assert world.committer.due(1)
    world.committer.begin(1, {"w": torch.ones(2)}, hand_over=True)
    assert world.finish(1) and world.versions() == [1] and handed_over(tmp_path, RESIZE) is None


def test_a_commit_removes_what_was_handed_over_before(world, tmp_path):
    hand_over(tmp_path, "t1-0000000009-g1", lambda folder: {}, nullcontext)
    assert (tmp_path / "handover").exists()
    world.close_pass(EVERY_S)
    world.reap()
    assert world.versions() == [1] and not (tmp_path / "handover").exists()


@pytest.mark.parametrize("ended", [True, False])
def test_a_version_that_was_handed_over_is_committed_after_the_first_pass_or_at_the_end(world, ended):
    world.committer.begins_after(7, at_once=False)
    assert not world.committer.due(7), "training has just begun to go on"
    world.version = 7 if ended else 8
    assert world.tick(ended=ended) == [world.version]
    assert not world.committer.due(world.version, ended=True)


def test_without_events_a_version_that_was_handed_over_is_committed_after_a_while(world):
    world.committer.begins_after(7, at_once=False)
    world.version = 7
    assert world.tick(EVERY_S / 2) == [] and world.tick(EVERY_S / 2) == [7]


def test_a_version_that_was_handed_over_is_committed_at_once_where_reruns_begin(world):
    world.committer.begins_after(7, at_once=True)
    world.version = 7
    assert world.tick() == [7]
