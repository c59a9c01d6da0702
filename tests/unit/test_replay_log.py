"""The replay log: the order of passes, and the comparison of their closes."""

import pytest

from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.trainer.journal.job_history import JobHistory, ReplayedPass
from headrace.trainer.journal.log import Log, LogFull, RecordKind, read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import DayTickOperation, PassClose, SetOperation
from headrace.trainer.rank0.planner import StreamEnded
from headrace.trainer.rank0.replay_log import LogPlanJournal, ReplayDiffers, ReplayLog


def plan(number):
    return PassPlan(number, ((Segment("t/0", 0, 10 * number - 10, 10 * number),),))


def close(number, dense="d", events=10):
    digests = {"dense": dense, "pushes": "p", "metrics": "m"}
    return PassClose(number=number, day=0, events=events, samples=10, rejected={}, digests=digests)


@pytest.fixture
def joblog(tmp_path):
    log = Log.claim(tmp_path / "log", 1, Deadline.after(5), timeline="t1")
    yield log
    log.close()


class Planned:
    """Answers each request with a plan."""

    def request(self, number, positions, num_positions):
        self.number = number

    def take(self, wait_s):
        return plan(self.number)


def replay_log(joblog, replay=(), planner=None, on_mismatch="fail", journal=None):
    return ReplayLog(joblog, journal, replay, planner, on_mismatch, 0.0)


def test_logged_passes_come_first_and_then_the_planners(joblog):
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, close(4), 12), ReplayedPass(plan(5), 13, None)], Planned())
    assert told.take(0) == plan(4) and told.replaying
    told.close(close(4))
    assert told.take(0) == plan(5) and not told.replaying
    told.request(6, {}, 0)
    assert told.take(0) == plan(6)


def test_without_a_planner_only_logged_passes_come(joblog):
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, close(4), 12)])
    assert told.take(0) == plan(4) and isinstance(told.take(0), StreamEnded)


def test_a_replayed_close_is_compared_and_not_logged_again(joblog):
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, close(4), 12)])
    told.take(0)
    told.close(close(4))
    assert told.compared == [(4, [])] and not told.forked
    assert [record.kind for record in read(joblog.folder)] == [RecordKind.CLAIM]


def test_a_replayed_pass_that_differs_is_named_with_its_differences(joblog):
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, close(4), 12)])
    told.take(0)
    with pytest.raises(ReplayDiffers, match=r"pass 4.*events were 10, are 9; digests differ in dense") as error:
        told.close(close(4, dense="other", events=9))
    assert error.value.exit_code == 1  # a restart would end alike


def test_with_warn_a_forked_job_continues(joblog):
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, close(4), 12)], on_mismatch="warn")
    told.take(0)
    told.close(close(4, dense="other"))
    assert told.forked and told.compared == [(4, ["digests differ in dense"])]


def test_a_replay_that_cannot_give_what_exports_hold_forks_the_job_though_its_closes_are_equal(joblog):
    replay = [ReplayedPass(plan(4), 11, close(4), 12), ReplayedPass(plan(5), 13, None)]
    told = ReplayLog(joblog, None, replay, None, "fail", 0.0, unlike=["a commit is damaged"])
    for number in (4, 5):
        told.take(0)
        told.close(close(number))
    assert told.forked and told.compared == [(4, ["a commit is damaged"])], "pass 5 was not closed before"


def test_a_new_close_is_in_the_log_when_it_returns(joblog):
    journal = LogPlanJournal(joblog)
    told = replay_log(joblog, planner=Planned(), journal=journal)
    for number in (1, 2):
        journal.plan(plan(number))
    told.close(close(1))
    history = JobHistory.of(read(joblog.folder))
    assert history.closed == 1 and history.closes[1].content == close(1)
    assert told.needed_from == history.plans[2].number  # a replay from version 1 needs the plan of pass 2
    told.close(close(2))
    assert told.needed_from == JobHistory.of(read(joblog.folder)).closes[2].number + 1


def test_a_replayed_close_has_its_logged_operations_and_a_new_one_none(joblog):
    tick = DayTickOperation(id="a", to=1)
    told = replay_log(
        joblog, [ReplayedPass(plan(4), 11, close(4), 12, [tick]), ReplayedPass(plan(5), 13, None)], Planned()
    )
    told.take(0)
    assert told.operations(4) == [tick]
    told.close(close(4))
    told.take(0)
    assert told.operations(5) is None and told.operations(6) is None


def test_a_pass_of_no_events_is_logged_where_new_passes_may_be_planned(joblog):
    journal = LogPlanJournal(joblog)
    told = replay_log(joblog, [ReplayedPass(plan(4), 11, None)], Planned(), journal=journal)
    assert told.carry(5, 2, learn=True) is None, "a logged one comes first"
    told.take(0)
    carried = told.carry(5, 2, learn=True)
    assert carried == PassPlan(5, ((), ()), last=True) and carried.num_positions == 0
    assert JobHistory.of(read(joblog.folder)).plans[5].content == carried
    told.close(close(4))
    assert told.needed_from == JobHistory.of(read(joblog.folder)).plans[5].number
    assert replay_log(joblog, journal=journal).carry(6, 1, learn=True) is None, "only what is logged is trained"


def test_a_close_waits_for_room_in_the_log_and_a_request_does_not(joblog, monkeypatch):
    tries = []

    def full_twice(content, append=joblog.append):
        tries.append(content)
        if len(tries) < 3:
            raise LogFull(joblog.folder, "no space left")
        return append(content)

    monkeypatch.setattr(joblog, "append", full_twice)
    monkeypatch.setattr("headrace.retry.PAUSE_S", 0.01)
    told = ReplayLog(joblog, None, (), None, "fail", 5.0)
    with pytest.raises(LogFull):
        told.note(SetOperation(id="a", keys={}))
    told.operate(SetOperation(id="a", keys={}))
    assert len(tries) == 3 and len(JobHistory.of(read(joblog.folder)).operations) == 1


def test_a_log_without_room_ends_the_job_after_the_time_limit(joblog, monkeypatch):
    def full(content):
        raise LogFull(joblog.folder, "no space left")

    monkeypatch.setattr(joblog, "append", full)
    with pytest.raises(LogFull):
        replay_log(joblog).close(close(1))
