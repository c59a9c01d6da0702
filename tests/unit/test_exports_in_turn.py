"""Exports that wait their turn: which versions are exported follows from the events, however long one takes."""

import threading
import time
from dataclasses import replace

import pytest

from headrace.codec import plain, typed
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded
from headrace.failpoints import ArmedFailpoint, Failpoint
from headrace.trainer.config import ExportSection
from headrace.trainer.exports import exporter_process
from headrace.trainer.exports.__main__ import answer_request, exclusive_turn
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.exporter_process import ExporterConfig, ExporterGone, ExporterProcess
from headrace.trainer.journal.log import Log, Superseded
from headrace.trainer.journal.pass_plan import PassPlan
from tests.unit.test_exporting import HOUR, World

SECTION = ExportSection(base=24 * HOUR, delta=HOUR, on_late="wait")


class Patient(World):
    """A world whose committer can be asked how the commit in flight ended."""

    def __init__(self, store, **more):
        super().__init__(store, {"main": SECTION}, **more)
        self.committer.version, self.committer.finish = 0, lambda version: True


@pytest.fixture
def world(tmp_path):
    return Patient(tmp_path)


def later(seconds, call):
    thread = threading.Timer(seconds, call)
    thread.start()
    return thread


def test_what_falls_due_while_one_is_made_is_cut_at_that_very_close(world):
    world.close(0.0)
    assert world.close(HOUR) == ["export 0000000002-base"]
    assert world.close(HOUR + 1) == [], "nothing falls due, so nothing is waited for"
    later(0.1, world.exporter.end)
    assert world.close(2 * HOUR) == ["exported 0000000002-base", "export 0000000004-delta"]


def test_unless_told_to_wait_it_is_cut_at_a_later_close(tmp_path):
    world = World(tmp_path)
    for time_s in (0.0, HOUR, 2 * HOUR):
        world.close(time_s)
    world.complete()
    assert world.close(2 * HOUR + 1) == ["exported 0000000002-base", "export 0000000004-delta"]


def test_one_that_is_given_up_is_waited_for_no_longer(world):
    world.close(0.0)
    world.close(HOUR)
    later(0.1, lambda: world.exporter.end("failed", error="no room", final=True))
    assert world.close(2 * HOUR) == ["exported 0000000002-base", "export 0000000003-base"]


def test_one_whose_commit_is_still_being_written_is_waited_for(world):
    world.close(0.0)
    looked, world.committer.tick = [], lambda: None
    world.close(HOUR)

    def finish(version):
        looked.append(version)
        if len(looked) == 3:
            type(world.committer).tick(world.committer)
            later(0.05, world.exporter.end)
        return True

    world.committer.finish = finish
    assert world.close(2 * HOUR) == ["exported 0000000002-base", "export 0000000003-delta"]


def test_there_is_an_end_to_waiting(world, monkeypatch):
    monkeypatch.setattr("headrace.trainer.exports.coordinator.LONGEST_PAUSE_S", 0.1)
    section = SECTION.model_copy(update={"deadline": 0.05, "tries": 1})
    world.exporting._streams["main"].section = section
    world.close(0.0)
    world.close(HOUR)
    began_s = time.monotonic()
    assert world.close(2 * HOUR) == []
    assert time.monotonic() - began_s < 30


def test_the_last_passes_say_so_in_the_log_and_others_as_before():
    assert typed(PassPlan, plain(PassPlan(3, ((),), last=True)), "it") == PassPlan(3, ((),), last=True)
    assert plain(PassPlan(3, ((),))) == {"number": 3, "segments": ((),), "learn": True}
    assert not typed(PassPlan, {"number": 3, "segments": [[]], "learn": True}, "it").last


def test_a_process_that_died_as_told_is_followed_by_one_that_lives(tmp_path, monkeypatch):
    told = []

    class Child:
        def __init__(self, config):
            told.append(config.faults)

        def ask(self, request, deadline):
            raise ExporterGone("was killed by signal 9")

        def close(self):
            pass

    monkeypatch.setattr(exporter_process, "ExporterChild", Child)
    fault = ArmedFailpoint(point=Failpoint.EXPORT_BEGUN)
    exporter = ExporterProcess(ExporterConfig(store=tmp_path, faults=(fault,)))
    world = World(tmp_path)
    world.close(0.0)
    world.close(HOUR)
    (request,) = world.exporter.requests
    for _ in range(2):
        exporter.submit(request)
        while exporter.poll() is None:
            time.sleep(0.01)
    assert told == [(fault,), ()]


# Ranks 0 that were taken for dead and go on


def log_of(store, *generations):
    for generation in generations:
        Log.claim(store / "log", generation, Deadline.after(5), timeline="t1").close()


def test_an_exporter_of_a_generation_that_was_replaced_makes_nothing(tmp_path):
    log_of(tmp_path, 1, 2)
    for generation in (2, None):
        with exclusive_turn(ExporterConfig(store=tmp_path, generation=generation), Deadline.after(1)):
            pass
    with pytest.raises(Superseded), exclusive_turn(ExporterConfig(store=tmp_path, generation=1), Deadline.after(1)):
        pass
    world = World(tmp_path / "job")
    world.close(0.0)
    world.close(HOUR)
    line = world.exporter.requests[0].model_dump_json()
    answer = answer_request(line, ExporterConfig(store=tmp_path, generation=1))
    assert answer.outcome == "failed" and "generation 2 of the workers has claimed" in answer.error


def test_two_exporters_make_one_export_after_the_other(tmp_path):
    config = ExporterConfig(store=tmp_path)
    with exclusive_turn(config, Deadline.after(1)):
        with (
            pytest.raises(DeadlineExceeded, match="exports-stage/lock is locked"),
            exclusive_turn(config, Deadline.after(0.05)),
        ):
            pass
    with exclusive_turn(config, Deadline.after(1)):
        pass


def test_a_rank0_that_was_replaced_takes_nothing_from_the_one_that_follows(tmp_path):
    log_of(tmp_path, 1)
    old = World(tmp_path)
    old.close(0.0)
    old.close(HOUR)
    (lease,), stage = old.held().items(), old.exporter.requests[0].stage
    joblog = Log.claim(tmp_path / "log", 2, Deadline.after(5), timeline="t1")
    setting = replace(old.exporting._setting, exclusive=joblog.exclusive)
    late = ExportCoordinator(setting, old.exporter, old.note)
    log_of(tmp_path, 3)
    with pytest.raises(Superseded):
        late.begin(old.committer, [], 2)
    assert dict([lease]) == old.held() and (stage / "model.json").exists()
    joblog.close()
