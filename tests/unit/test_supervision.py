"""The decisions of a launcher, without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.cluster.runtime import UNREACHABLE
from headrace.service.cluster.supervision import (
    DrainRankZero,
    EndingLimits,
    Exited,
    KillWorkers,
    NotStarted,
    RunOutcome,
    Started,
    StartFailed,
    StartReaders,
    StopRequested,
    Supervision,
    TerminateWorkers,
    Tick,
    format_exit,
)

LIMITS = EndingLimits(drain_s=100, finish_s=50, end_s=10, settle_s=2)
ALL = ("shard-0", "trainer-0", "trainer-1")


@pytest.fixture
def job():
    supervision = Supervision(["shard-0"], ["trainer-0", "trainer-1"], LIMITS)
    for worker in ALL:
        assert supervision.step(Started(worker), 0) == []
    return supervision


def exit_all(job, *workers, at=1.0, code=0):
    return [effect for worker in workers for effect in job.step(Exited(worker, code), at)]


def test_a_stream_drained_by_all_trainers_ends_the_shards_and_the_job(job):
    assert exit_all(job, "trainer-1", "trainer-0") == [TerminateWorkers(("shard-0",), "the stream is drained")]
    assert job.outcome is None
    exit_all(job, "shard-0", code=-15)
    assert job.outcome == RunOutcome(0, "the stream is drained")


@pytest.mark.parametrize("worker", ALL)
@pytest.mark.parametrize(("code", "words"), [(1, "exit code 1"), (2, "exit code 2 (bad configuration)")])
def test_an_error_that_would_come_again_ends_everything_orderly(job, worker, code, words):
    others = tuple(name for name in ALL if name != worker)
    reason = f"{worker} ended first: {words}"
    assert job.step(Exited(worker, code), 1) == [TerminateWorkers(others, reason)]
    assert exit_all(job, *others, code=75) == []
    assert job.outcome == RunOutcome(code, reason, worker)
    assert not job.outcome.may_pass


@pytest.mark.parametrize("worker", ALL)
def test_a_death_by_a_signal_kills_the_others_at_once(job, worker):
    others = tuple(name for name in ALL if name != worker)
    reason = f"{worker} ended first: killed by SIGKILL"
    assert job.step(Exited(worker, -9), 1) == [KillWorkers(others, reason)]
    assert exit_all(job, *others, code=1) == []
    assert job.outcome == RunOutcome(70, reason, worker)
    assert job.outcome.may_pass


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(70, 70, "exit code 70 (a bug)"), (75, 75, "exit code 75 (unavailable or out of time)"), (3, 70, "exit code 3")],
)
def test_an_exit_that_may_pass_is_given_time_to_settle(job, code, exit_code, words):
    reason = f"trainer-0 ended first: {words}"
    assert job.step(Exited("trainer-0", code), 1) == []
    assert job.ending
    assert job.step(Tick(), 2.9) == []
    assert job.step(Tick(), 3) == [KillWorkers(("shard-0", "trainer-1"), f"still running: {reason}")]
    exit_all(job, "shard-0", "trainer-1", code=-9)
    assert job.outcome == RunOutcome(exit_code, reason, "trainer-0")
    assert job.outcome.may_pass


def test_who_is_to_blame_may_be_seen_after_who_answered_it(job):
    job.step(Exited("trainer-0", 75), 1)
    job.step(Exited("trainer-1", 1), 2)
    job.step(Exited("shard-0", 2), 2)
    assert job.outcome == RunOutcome(1, "trainer-1 ended first: exit code 1", "trainer-1")


@pytest.mark.parametrize(("code", "words"), [(-11, "killed by SIGSEGV"), (UNREACHABLE, "unreachable for longer than")])
def test_a_death_by_a_signal_that_is_reported_late_is_to_blame(job, code, words):
    job.step(Exited("trainer-0", 75), 1)
    job.step(Exited("trainer-1", code), 1.5)
    exit_all(job, "shard-0")
    assert job.outcome.first_dead == "trainer-1" and words in job.outcome.reason


def test_what_answers_a_death_by_a_signal_is_not_to_blame(job):
    job.step(Exited("shard-0", -9), 1)
    exit_all(job, "trainer-0", "trainer-1", code=1)
    assert job.outcome.first_dead == "shard-0"


def test_a_shard_that_ends_orderly_before_the_trainers_is_a_death_too(job):
    reason = "shard-0 ended first: exit code 0"
    assert job.step(Exited("shard-0", 0), 1) == [KillWorkers(("trainer-0", "trainer-1"), reason)]
    exit_all(job, "trainer-0", "trainer-1")
    assert job.outcome == RunOutcome(70, reason, "shard-0")


def test_who_is_still_there_after_sigterm_is_killed_at_the_deadline(job):
    job.step(Exited("trainer-0", 1), 1)
    job.step(Exited("shard-0", -15), 1)
    assert job.step(Tick(), 10.9) == []
    assert job.step(Tick(), 11) == [KillWorkers(("trainer-1",), "still running: trainer-0 ended first: exit code 1")]
    assert job.step(Tick(), 11.1) == []
    exit_all(job, "trainer-1", code=-9)
    assert job.outcome.first_dead == "trainer-0"


def test_a_request_to_stop_drains_and_ends_well(job):
    assert job.step(StopRequested(), 1) == [DrainRankZero("asked to stop")]
    exit_all(job, "trainer-0", "trainer-1", "shard-0")
    assert job.outcome == RunOutcome(0, "stopped after the pass in training")


def test_a_second_request_kills_at_once(job):
    job.step(StopRequested(), 1)
    assert job.step(StopRequested(), 2) == [KillWorkers(ALL, "asked to stop a second time")]
    exit_all(job, *ALL, code=-9)
    assert job.outcome == RunOutcome(1, "stopped at the second request, in the middle of a pass")


def test_draining_is_bounded(job):
    job.step(StopRequested(), 1)
    assert job.step(Tick(), 100.9) == []
    assert job.step(Tick(), 101) == [TerminateWorkers(ALL, "asked to stop, not ended after 100 s")]
    exit_all(job, *ALL)
    assert job.outcome.code == 1
    assert job.stop_asked


def test_a_trainer_that_does_not_finish_with_the_others_is_killed(job):
    assert exit_all(job, "trainer-0", at=5) == []
    assert job.step(Tick(), 55) == [KillWorkers(("shard-0", "trainer-1"), "trainer-0 has finished, trainer-1 has not")]


def test_a_request_before_training_began_ends_well():
    job = Supervision(["shard-0"], ["trainer-0"], LIMITS)
    job.step(Started("shard-0"), 0)
    assert job.step(StopRequested(), 1) == [TerminateWorkers(("shard-0",), "stopped before training began")]
    assert job.ending
    job.step(Exited("shard-0", -15), 2)
    assert job.outcome == RunOutcome(0, "stopped before training began")


def test_a_worker_that_cannot_start_ends_those_that_have():
    job = Supervision(["shard-0"], ["trainer-0"], LIMITS)
    job.step(Started("shard-0"), 0)
    assert job.step(StartFailed("trainer-0", "no such file"), 1) == [
        KillWorkers(("shard-0",), "trainer-0: no such file")
    ]
    job.step(Exited("shard-0", -9), 2)
    assert job.outcome == RunOutcome(75, "trainer-0: no such file", "trainer-0")


def test_a_signal_python_does_not_know_is_still_named():
    assert format_exit(-250) == "killed by signal 250"


exits = st.sampled_from(ALL).flatmap(
    lambda name: st.builds(Exited, st.just(name), st.sampled_from([0, 1, 2, 70, 75, -9]))
)


@given(st.lists(exits | st.just(StopRequested()) | st.just(Tick()), max_size=12))
def test_the_job_always_ends_and_no_dead_worker_is_signalled(events):
    job = Supervision(["shard-0"], ["trainer-0", "trainer-1"], LIMITS)
    alive = dict.fromkeys(ALL)
    for worker in ALL:
        job.step(Started(worker), 0)
    now_s = 0.0
    for event in [*events, *[Tick()] * 4]:
        now_s += 200
        if isinstance(event, Exited):
            if event.worker not in alive:
                continue
            del alive[event.worker]
        for effect in job.step(event, now_s):
            if isinstance(effect, TerminateWorkers | KillWorkers):
                assert set(effect.workers) <= set(alive)
            if isinstance(effect, KillWorkers):
                for worker in effect.workers:
                    alive.pop(worker, None)
                    job.step(Exited(worker, -9), now_s)
    if not alive:
        assert job.outcome is not None
    elif any(isinstance(event, Exited | StopRequested) for event in events):
        assert job.ending


READERS = ("reader-0", "reader-1")


@pytest.fixture
def fed():
    supervision = Supervision(["shard-0"], ["trainer-0"], LIMITS, READERS)
    for worker in ("shard-0", *READERS):
        assert supervision.step(Started(worker), 0) == []
    return supervision


def test_a_reader_that_dies_is_done_without_until_the_last_one_dies(fed):
    fed.step(Started("trainer-0"), 0)
    assert fed.step(Exited("reader-1", -9), 1) == [] and not fed.ending
    assert fed.lost == {"reader-1": "killed by SIGKILL"}
    reason = "reader-0 ended first: killed by SIGKILL"
    assert fed.step(Exited("reader-0", -9), 2) == [KillWorkers(("shard-0", "trainer-0"), reason)]
    exit_all(fed, "shard-0", "trainer-0", code=-9)
    assert fed.outcome == RunOutcome(70, reason, "reader-0") and fed.outcome.may_pass


def test_a_reader_that_dies_is_started_again_after_a_pause_that_grows(fed):
    fed.step(Started("trainer-0"), 0)
    fed.step(Exited("reader-1", -9), 1)
    assert fed.step(Tick(), 1.9) == []
    assert fed.step(Tick(), 2.1) == fed.step(Tick(), 9) == [StartReaders(("reader-1",))], "until it has a place"
    fed.step(Started("reader-1"), 9)
    assert not fed.lost and fed.step(Tick(), 9) == []
    assert fed.step(Exited("reader-1", 2), 10) == [] and not fed.ending, "its new machine may have other files"
    assert fed.step(Tick(), 11.9) == [] and fed.step(Tick(), 12.1) == [StartReaders(("reader-1",))]
    fed.step(StopRequested(), 13)
    assert fed.step(Tick(), 14) == [], "no worker is started any more"


def test_a_reader_without_a_place_is_started_once_it_has_one():
    late = Supervision(["shard-0"], ["trainer-0"], LIMITS, READERS)
    for event in (Started("shard-0"), Started("reader-0"), NotStarted("reader-1", "no worker has come for it")):
        assert late.step(event, 0) == []
    assert late.lost == {"reader-1": "no worker has come for it"}
    assert late.step(Tick(), 100) == [], "while no trainer runs"
    late.step(Started("trainer-0"), 100)
    assert late.step(Tick(), 101) == [StartReaders(("reader-1",))]


def test_a_reader_that_dies_before_trainers_know_where_it_is_ends_the_generation(fed):
    assert fed.step(Exited("reader-1", -9), 1) and fed.ending


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_of_a_reader_that_the_others_would_find_too_ends_the_job(fed, code):
    fed.step(Started("trainer-0"), 0)
    assert fed.step(Exited("reader-1", code), 1) and fed.ending
    assert not fed.lost
