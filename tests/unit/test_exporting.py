"""The decider that exports: what it logs, which commits it requests and holds, how a restart continues."""

import dataclasses
import json
import time
from collections import deque
from pathlib import Path

import pytest

from headrace.dataset.spec.config import SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.errors import NotYet, SpecError
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.table_stats import TableStats
from headrace.trainer.checkpoint.commits import MANIFEST, Commit, Commits
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.destination import STAGES
from headrace.trainer.exports.export_messages import ExportAnswer, ExportSettings
from headrace.trainer.job_status import LastExport
from headrace.trainer.journal.log import LogFull
from headrace.trainer.journal.records import ExportedOperation, ExportOperation
from headrace.trainer.rank0.job_in_force import cut_of
from headrace.trainer.rank0.operations import ClosingPass
from tests.fakes.manifests import manifest_of

HOUR = 3600.0


class Exporter:
    """Answers when a test says so."""

    def __init__(self):
        self.requests, self.answers, self.closed = [], deque(), False

    def submit(self, request):
        self.requests.append(request)

    def poll(self):
        return self.answers.popleft() if self.answers else None

    def close(self):
        self.closed = True

    def end(self, outcome="complete", **more):
        request = self.requests[-1]
        if outcome == "complete":
            done = Path(request.address) / request.job / request.timeline / request.name / "_DONE"
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
        self.answers.append(ExportAnswer(name=request.name, outcome=outcome, **more))


class Committer:
    """Makes folders that look like commits."""

    def __init__(self, store, timeline="t1"):
        self.commits, self.timeline, self.wanted, self.fails = Commits(store), timeline, [], ""

    def exactly(self, version, who, told):
        self.wanted.append((version, who, told))

    def make(self, version, generation=1):
        folder = self.commits.folder / f"{self.timeline}-{version:010d}-g{generation}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).touch()
        return Commit(folder, manifest_of(folder.name))

    def tick(self):
        """What the loop does after a close."""
        wanted, self.wanted = self.wanted, []
        for version, who, told in wanted:
            if self.fails:
                told(None, self.fails)
                continue
            commit = self.make(version)
            if who is not None:
                self.commits.hold(commit.name, who)
            told(commit, "")


class World:
    """A job with exports, its log as a list of bodies, its loop as a few calls."""

    def __init__(self, store, streams=None, log=(), timeline="t1", fingerprint="1", state=None, version=0, timed=True):
        self.store, self.log, self.version = store, list(log), version
        self.exporter, self.committer = Exporter(), Committer(store, timeline)
        self.full, self.forks, self.sweeping, self.waiting = False, 0, False, []
        self.streams = streams or {"main": ExportSection(base=24 * HOUR, delta=HOUR)}
        setting = ExportSettings(
            job="news", store=store, folder=store, timeline=timeline, fingerprint={"cpu": fingerprint}, timed=timed,
            streams=self.streams, schema=Schema.of([SparseSlot(name="a", kind="sparse")]),
            tables=lambda: {"default": TableSection()}, forks=lambda: self.forks, stage=self.stage,
        )  # fmt: skip
        self.exporting = ExportCoordinator(setting, self.exporter, self.note)
        self.exporting.load_state(json.loads(json.dumps(state or {})))
        self.exporting.begin(self.committer, self.log, version)

    def stage(self, request, folder):
        (folder / "model.json").write_text(request.name)

    def note(self, body):
        if self.full:
            raise LogFull(self.store, "the disk is full")
        self.waiting.append(body)

    def close(self, time_s=None, samples=1, ended=False, replay=None, low_s=None, day_end_s=None, auc=float("nan")):
        """A pass closes: `replay` are the bodies that act again."""
        self.version += 1
        times_s = None if time_s is None else (time_s if low_s is None else low_s, time_s)
        self.last_s = time_s if time_s is not None else getattr(self, "last_s", None)
        stats = {"default": TableStats(1, 1, 1, {}, sweeping=self.sweeping)}
        closing = ClosingPass(
            version=self.version, day=0, event_time_s=self.last_s, pass_times_s=times_s, wall_s=time.time(),
            day_end_s=day_end_s, stats=stats, positions={"p": self.version}, num_samples=samples,
            metrics={"window": {"ctr": {"auc": auc}}}, ended=ended,
        )  # fmt: skip
        self.exporting.saw(closing)
        waiting, self.waiting = ([], self.waiting) if replay is not None else (self.waiting, [])
        ordered = list(replay) if replay is not None else [*waiting, *self.exporting.due(closing, tuple(waiting))]
        self.log += [] if replay is not None else ordered
        for each in ordered:
            self.exporting.acted(self.version, each, replay is not None)
        self.committer.tick()
        self.exporting.tick()
        return [f"{each.op} {each.name}" for each in ordered if isinstance(each, ExportOperation | ExportedOperation)]

    def complete(self, **more):
        self.exporter.end(**more)
        self.exporting.tick()

    def held(self):
        return {name: whos for name, whos in self.committer.commits.holders().items() if whos}

    def status(self, stream="main"):
        return self.exporting.status()[stream]

    def restarted(self, state=None, version=0, logged=None, **more):
        """A new rank 0 on the same store, which goes on from a state at `version`; `logged`: what still acts."""
        again = World.__new__(World)
        keep = {"streams": self.streams} | more
        World.__init__(again, self.store, state=state, version=version, log=logged or (), **keep)
        again.last_s = self.last_s
        return again


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_an_export_is_cut_committed_held_made_and_logged(world):
    assert world.close(10 * HOUR) == []
    assert world.close(11 * HOUR) == ["export 0000000002-base"]
    (request,) = world.exporter.requests
    assert (request.version, request.kind, request.commit.name) == (2, "base", "t1-0000000002-g1")
    assert request.facts["positions"] == {"p": 2} and request.facts["event_time"] == [10 * HOUR, 11 * HOUR]
    assert request.facts["metrics"] == {"ctr": {"auc": None}} and request.slots == {"default": {0: "a"}}
    assert (request.stage / "model.json").read_text() == "0000000002-base"
    assert world.held() == {"t1-0000000002-g1": ["export-main"]} and world.status().making == "0000000002-base"
    world.complete(current=True)
    assert [each.outcome for each in world.waiting] == ["complete"]
    assert world.held() == {} and not request.stage.exists()
    assert world.close(11 * HOUR + 1) == ["exported 0000000002-base"]
    status = world.status()
    assert (status.name, status.making, status.failing) == ("0000000002-base", None, None)
    assert world.close(12 * HOUR) == ["export 0000000004-delta"]
    (delta,) = world.exporter.requests[1:]
    assert delta.parent.name == "0000000002-base" and delta.facts["event_time"] == [11 * HOUR + 1, 12 * HOUR]


def test_one_event_from_2099_does_not_block_exports_for_years(world):
    world.close(10 * HOUR, day_end_s=24 * HOUR)
    assert world.close(1e6 * HOUR, low_s=10 * HOUR, day_end_s=24 * HOUR) == ["export 0000000002-base"]
    assert world.exporter.requests[0].facts["event_time"] == [10 * HOUR, 1e6 * HOUR], "but the manifest tells of it"
    world.complete()
    assert world.close(23 * HOUR, day_end_s=24 * HOUR) == ["exported 0000000002-base"]
    assert world.close(25 * HOUR, day_end_s=48 * HOUR) == ["export 0000000004-delta"]


def test_an_export_that_is_due_waits_for_the_one_in_progress(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    assert world.close(13 * HOUR) == []
    world.complete()
    assert world.close(13 * HOUR) == ["exported 0000000002-base", "export 0000000004-delta"]


def test_commits_tell_changes_since_the_parent_of_the_next(tmp_path):
    world = World(tmp_path, {"a": ExportSection(delta=HOUR), "b": ExportSection(base=HOUR), "c": ExportSection()})
    assert world.exporting.changes_since() is None
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    assert world.exporting.changes_since() == 2, "that of a, which alone has deltas"
    world.complete()
    world.close(11 * HOUR)
    assert world.exporting.changes_since() == 2


def test_thresholds_are_in_the_log_and_cleared_by_the_one_stream_that_has_them(tmp_path):
    section = ExportSection(delta=HOUR, base_threshold=1.0, delta_threshold=2.0, delta_keep_days=7)
    world = World(tmp_path, {"main": section})
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(12 * HOUR)
    base, delta = (each for each in world.log if isinstance(each, ExportOperation))
    assert base.clears and delta.clears
    assert (cut_of(base).since, cut_of(base).base_threshold, cut_of(base).delta_threshold) == (0, 1.0, 0.0)
    assert (cut_of(delta).since, cut_of(delta).delta_threshold, cut_of(delta).delta_keep_days) == (2, 2.0, 7)


def test_a_failed_commit_fails_its_export_and_the_next_includes_everything(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.committer.fails = "its commit failed: no room"
    assert world.close(12 * HOUR)[-1] == "export 0000000003-delta"
    world.committer.fails = ""
    assert world.waiting[0].outcome == "failed" and world.held() == {} and len(world.exporter.requests) == 1
    world.close(12 * HOUR)
    assert "0000000003-delta: its commit failed: no room" in world.status().failing
    world.close(13 * HOUR)
    assert world.exporter.requests[-1].all and world.exporter.requests[-1].parent.version == 2


def test_an_export_that_is_given_up_releases_its_commit_and_the_next_is_a_base(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete(outcome="failed", error="no such bucket", final=True)
    assert world.waiting[0].outcome == "failed" and world.held() == {}
    assert world.close(12 * HOUR) == ["exported 0000000002-base", "export 0000000003-base"]
    assert "a base failed (0000000002-base: no such bucket)" in world.exporter.requests[-1].why


def test_a_parent_that_is_gone_makes_a_base_that_says_so(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    (done,) = world.store.glob("exports/main/news/t1/*/_DONE")
    done.unlink()
    assert world.close(12 * HOUR)[-1] == "export 0000000003-base"
    assert world.exporter.requests[-1].why == "each 1h; a base, for its parent 0000000002-base is gone"


def test_an_end_is_logged_once_the_log_has_room_and_no_delta_builds_on_it_before(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.full = True
    world.complete()
    assert world.close(12 * HOUR) == [] and world.held() != {}
    world.full = False
    world.exporting.tick()
    assert world.held() == {}
    assert world.close(12 * HOUR) == ["exported 0000000002-base", "export 0000000004-delta"]


# The end, wishes


def test_the_end_of_a_stream_makes_one_more_export_and_waits_for_it(world):
    world.close(10 * HOUR)
    assert world.exporting.wants_pass(ended=False) is False
    assert world.exporting.wants_pass(ended=True) is True
    assert world.close(samples=0, ended=True) == ["export 0000000002-base"]
    assert not world.exporting.wants_pass(ended=True) and not world.exporting.finish(stopping=False)
    world.complete()
    assert world.exporting.finish(stopping=False) and not world.exporting.wants_pass(ended=True)


def test_the_last_export_comes_after_the_one_in_progress(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.close(11 * HOUR + 5)
    assert not world.exporting.wants_pass(ended=True) and not world.exporting.finish(stopping=False)
    world.exporter.end()
    assert not world.exporting.finish(stopping=False), "one more is wanted now"
    assert world.exporting.wants_pass(ended=True)


def test_an_end_waits_while_a_table_is_swept(world, monkeypatch):
    monkeypatch.setattr("headrace.trainer.exports.coordinator.SWEEP_LOOK_S", 0.0)
    world.sweeping = True
    world.close(10 * HOUR)
    assert world.exporting.wants_pass(ended=True) and world.close(samples=0, ended=True) == []
    monkeypatch.setattr("headrace.trainer.exports.coordinator.SWEEP_LOOK_S", 60.0)
    assert not world.exporting.wants_pass(ended=True) and not world.exporting.finish(stopping=False)
    monkeypatch.setattr("headrace.trainer.exports.coordinator.SWEEP_LOOK_S", 0.0)
    world.sweeping = False
    assert world.exporting.wants_pass(ended=True)
    assert world.close(samples=0, ended=True) == ["export 0000000003-base"]


def test_a_stop_begins_no_export_and_waits_for_the_one_in_progress_for_a_while(world, monkeypatch, caplog):
    world.close(10 * HOUR)
    assert world.exporting.finish(stopping=True)
    world.close(11 * HOUR)
    assert not world.exporting.finish(stopping=True)
    monkeypatch.setattr("headrace.deadline.Deadline.passed", lambda self: True)
    assert world.exporting.finish(stopping=True)
    assert "0000000002-base of main; the next run makes those that were begun" in caplog.text
    assert world.held() == {"t1-0000000002-g1": ["export-main"]}, "from this commit"


def test_a_request_is_granted_once_at_the_next_close(world):
    request = {"op": "export", "stream": "main", "kind": None, "id": "x"}
    assert world.exporting.asked({"op": "shrink", "id": "y"}) is None
    world.close(10 * HOUR)
    for _ in range(2):
        with pytest.raises(NotYet, match="at the next close"):
            world.exporting.asked(request)
    with pytest.raises(NotYet, match="another export"):
        world.exporting.asked({**request, "id": "z"})
    assert world.exporting.wants_pass(ended=False)
    assert world.close(samples=0) == ["export 0000000002-base"] and world.log[-1].id == "x"
    with pytest.raises(NotYet):
        world.exporting.asked(request)
    world.complete(current=True)
    assert world.close(samples=0) == ["exported 0000000002-base"]
    assert world.status().last == LastExport(id="x", name="0000000002-base", outcome="complete", current=True)


def test_an_impossible_request_is_refused(world):
    def refused(**request):
        with pytest.raises(SpecError) as error:
            world.exporting.asked({"op": "export", "id": "x", **request})
        return str(error.value)

    assert "'man'" in refused(stream="man") and "main" in refused(stream="man")
    assert "'bass' is no kind" in refused(stream="main", kind="bass")


def test_a_delta_is_refused_where_commits_do_not_record_changes(tmp_path):
    world = World(tmp_path, {"main": ExportSection(base=HOUR)})
    with pytest.raises(SpecError, match=r"exports.main.delta: is not set"):
        world.exporting.asked({"op": "export", "id": "x", "stream": "main", "kind": "delta"})


def test_the_wall_clock_makes_exports_due_while_no_events_come(tmp_path, monkeypatch):
    world = World(tmp_path, {"main": ExportSection(base=HOUR, clock="wall")}, timed=False)
    now_s = 1e6 * HOUR + 10
    monkeypatch.setattr(time, "time", lambda: now_s)
    world.close()
    assert not world.exporting.wants_pass(ended=False)
    now_s += HOUR
    assert world.exporting.wants_pass(ended=False)
    assert world.close(samples=0) == ["export 0000000002-base"]
    world.complete()
    now_s += HOUR
    assert not world.exporting.wants_pass(ended=False), "nothing came since"


def test_a_clock_of_events_without_times_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"exports.main.clock"):
        World(tmp_path, {"main": ExportSection(clock="event")}, timed=False)


# Restarts


def test_an_export_cut_before_the_restored_commit_is_made_from_its_held_commit(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.close(11 * HOUR + 1)
    state, first = world.exporting.state(), world.exporter.requests[0]
    world.committer.make(2, generation=7)
    again = world.restarted(state, version=3)
    again.exporting.tick()
    assert again.exporter.requests == [first], "the same commit, the same facts, what was staged"
    assert (first.stage / "model.json").exists()
    again.complete()
    assert again.close(12 * HOUR) == ["exported 0000000002-base", "export 0000000004-delta"]


def test_an_export_with_a_logged_end_is_not_made_again(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    state = world.exporting.state()
    world.complete()
    (ended,) = world.waiting
    again = world.restarted(state, version=2, logged=[ended])
    again.exporting.tick()
    assert again.exporter.requests == [] and again.held() == {}
    again.waiting = [ended]
    assert again.close(12 * HOUR) == ["exported 0000000002-base", "export 0000000003-delta"]


def test_a_replayed_export_is_committed_and_made_again_unless_its_end_is_logged(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(12 * HOUR)
    base, ended, delta = world.log
    first = world.exporter.requests[-1]
    again = world.restarted(logged=[base, ended, delta])
    assert again.held() == {}, "old commits are let go: they are made again"
    again.close(10 * HOUR, replay=[])
    again.close(11 * HOUR, replay=[base])
    assert again.exporter.requests == [] and again.committer.commits.names() != []
    again.close(12 * HOUR, replay=[ended, delta])
    assert again.exporter.requests == [first] and again.held() == {"t1-0000000003-g1": ["export-main"]}
    assert again.exporting.state() == world.exporting.state()


@pytest.mark.parametrize("elsewhere", ["/elsewhere", "s3://other/place?endpoint_override=evil", "nowhere://\0"])
@pytest.mark.parametrize("replayed", [False, True])
def test_an_export_is_not_made_at_a_place_that_only_the_log_names(world, elsewhere, replayed):
    """Whoever writes to an object store with the log could send the model anywhere."""
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    (cut,) = world.log
    forged = dataclasses.replace(cut, address=elsewhere)
    if replayed:
        again = world.restarted(logged=[forged])
        again.close(10 * HOUR, replay=[])
        again.close(11 * HOUR, replay=[forged])
    else:
        state = json.loads(json.dumps(world.exporting.state()).replace(json.dumps(cut.address), json.dumps(elsewhere)))
        again = world.restarted(state, version=2)
    again.exporting.tick()
    assert again.exporter.requests == [] and again.held() == {}
    (ended,) = again.waiting
    assert ended.outcome == "failed" and "nothing is written to another place than that of the job file" in ended.error
    assert again.close(13 * HOUR) == ["exported 0000000002-base", "export 0000000003-base"]
    assert again.exporter.requests[-1].address == cut.address


def test_an_export_without_its_commit_is_given_up_and_nothing_is_lost(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(12 * HOUR)
    state = world.exporting.state()
    (world.committer.commits.folder / "t1-0000000003-g1" / MANIFEST).unlink()
    again = world.restarted(state, version=3)
    (ended,) = again.waiting
    assert (ended.outcome, ended.error) == ("failed", "its commit does not exist any more")
    assert again.close(13 * HOUR) == ["exported 0000000003-delta", "export 0000000004-delta"]
    request = again.exporter.requests[-1]
    assert request.all and request.parent.version == 2 and request.facts["event_time"][0] == 12 * HOUR


def test_a_version_restored_exactly_is_staged_again_where_that_was_lost(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    (stage,) = (world.store / STAGES).iterdir()
    (stage / "model.json").unlink()
    stage.rmdir()
    again = world.restarted(world.exporting.state(), version=2)
    assert (stage / "model.json").exists()
    again.exporting.tick()
    assert len(again.exporter.requests) == 1


def test_another_timeline_begins_with_a_base_and_forgets_what_was_in_flight(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(12 * HOUR)
    again = world.restarted(world.exporting.state(), version=3, timeline="t2")
    again.exporting.tick()
    assert again.exporter.requests == [] and again.held() == {}
    assert again.close(13 * HOUR) == ["export 0000000004-base"]
    assert again.exporter.requests[0].why == "each 1h; a base, for it is the first of timeline t2"


@pytest.mark.parametrize("what", ["libraries", "replay"])
def test_after_a_fork_the_next_is_a_base(world, what):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(11 * HOUR + 1)
    again = world.restarted(world.exporting.state(), version=3, fingerprint="2" if what == "libraries" else "1")
    again.forks = int(what == "replay")
    state = again.exporting.state()
    later = again.restarted(state, version=3, fingerprint="2" if what == "libraries" else "1")
    assert later.close(12 * HOUR) == ["export 0000000004-base"]
    later.complete()
    assert later.close(13 * HOUR)[-1] == "export 0000000005-delta"


def test_a_stream_that_had_no_deltas_for_a_while_begins_again_with_a_base(world):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete()
    world.close(11 * HOUR + 1)
    without = world.restarted(
        world.exporting.state(), version=3, streams={"main": ExportSection(base=24 * HOUR), "new": ExportSection()}
    )
    assert without.exporting.changes_since() is None and set(without.exporting.status()) == {"main", "new"}
    again = world.restarted(without.exporting.state(), version=3)
    assert again.close(12 * HOUR) == ["export 0000000004-base"]
    assert "did not record what changed since 0000000002-base" in again.exporter.requests[0].why


def test_a_failed_stage_does_not_fail_the_export(world, caplog):
    def stage(request, folder):
        raise SpecError("no module")

    object.__setattr__(world.exporting._setting, "stage", stage)
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    assert len(world.exporter.requests) == 1 and not world.exporter.requests[0].stage.exists()
    assert "is made without what rank 0 adds: no module" in caplog.text


def test_failed_gates_and_commands_are_reported(world, caplog):
    world.close(10 * HOUR)
    world.close(11 * HOUR)
    world.complete(failed_gates=("auc 0.5 is below 0.6",), command_error="exit code 3")
    world.close(11 * HOUR)
    status = world.status()
    assert status.failed_gates == ["auc 0.5 is below 0.6"] and status.command_error == "exit code 3"
    assert "current.json does not point to export 0000000002-base of main: auc 0.5 is below 0.6" in caplog.text
    world.exporting.close()
    assert world.exporter.closed
