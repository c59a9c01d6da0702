"""Operations: run in order, with progress, cancelled, and interrupted if the service dies."""

import threading
from datetime import timedelta

import pytest

from headrace.errors import HeadraceError
from headrace.service.jobs.errors import LimitReached, UnknownOperation
from headrace.service.jobs.operation_queue import Operation, OperationQueue, OperationState, UntilCancelled
from headrace.service.records.database import KEEP_OPERATIONS, opened, utc_now

WITHIN_S = 20


@pytest.fixture
def records(url):
    with opened(url) as records:
        yield records


@pytest.fixture
def work(records):
    work = OperationQueue(records, max_operations=3, threads=1)
    yield work
    work.close()


class Step:
    """An act that is where the test wants it."""

    def __init__(self, result=None, error=None):
        self.result, self.error = result, error
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, progress, cancelled):
        progress(0.5, "half")
        self.begun.set()
        assert self.go.wait(WITHIN_S)
        if self.error is not None:
            raise self.error
        progress(0.9, "nearly")
        return self.result


def over(work, id) -> Operation:
    looked = threading.Event()
    for _ in range(WITHIN_S * 100):
        if (found := work.get(id)).state.over:
            return found
        looked.wait(0.01)
    raise AssertionError(f"{found} is not over")


def test_an_operation_is_told_of_from_its_beginning_to_its_end(work):
    step = Step({"name": "t0-1"})
    asked = work.start("commit", "clicks", "ann", step)
    assert (asked.kind, asked.job, asked.who, asked.state) == ("commit", "clicks", "ann", OperationState.WAITING)
    assert step.begun.wait(WITHIN_S)
    running = work.get(asked.id)
    assert (running.state, running.progress, running.said, running.ended) == (OperationState.RUNNING, 0.5, "half", None)
    step.go.set()
    done = over(work, asked.id)
    assert (done.state, done.result, done.problem, done.said) == (OperationState.DONE, {"name": "t0-1"}, None, "nearly")
    assert done.ended >= done.created


def test_one_that_fails_says_what_was_wrong_and_a_bug_that_it_is_one(work):
    for error, problem in (
        (HeadraceError("no room"), {"type": "about:blank", "title": "HeadraceError", "detail": "no room"}),
        (KeyError("x"), {"type": "about:blank", "title": "a bug", "detail": "KeyError: 'x'"}),
    ):
        step = Step(error=error)
        step.go.set()
        failed = over(work, work.start("export", None, "ann", step).id)
        assert (failed.state, failed.result, failed.problem) == (OperationState.FAILED, None, problem)


def test_what_waits_is_done_in_turn_and_beyond_the_limit_nothing_is_taken(work):
    steps = [Step(n) for n in range(3)]
    asked = [work.start("n", "clicks", "ann", step) for step in steps]
    with pytest.raises(LimitReached, match="3 operations wait or run, at most 3 may"):
        work.start("n", None, "ann", Step())
    assert work.going("clicks") and not work.going("news")
    assert not steps[1].begun.is_set() and work.get(asked[1].id).state is OperationState.WAITING
    for step in steps:
        step.go.set()
    assert [over(work, each.id).result for each in asked] == [0, 1, 2]
    for _ in range(WITHIN_S * 100):  # room is made a moment after the end is told
        if not work.going("clicks"):
            break
        threading.Event().wait(0.01)
    work.start("n", None, "ann", steps[0])


def test_the_operations_of_one_caller_leave_room_for_others(records):
    work = OperationQueue(records, threads=1, max_operations=4)
    steps = [Step(n) for n in range(4)]
    for step in steps[:3]:
        work.start("n", "clicks", "ann", step)
    with pytest.raises(LimitReached, match="3 operations of 'ann' wait or run"):
        work.start("n", "clicks", "ann", Step())
    work.start("n", "clicks", "bob", steps[3])
    for step in steps:
        step.go.set()
    work.close()


def test_one_that_is_cancelled_while_it_waits_never_begins_and_one_that_runs_ends_at_its_next_word(work):
    running, waiting = Step(1), Step(2)
    first, second = (work.start("n", None, "ann", step) for step in (running, waiting))
    assert running.begun.wait(WITHIN_S)
    work.cancel(second.id)
    work.cancel(first.id)
    running.go.set()
    assert over(work, first.id).state is OperationState.CANCELLED
    assert over(work, second.id).state is OperationState.CANCELLED and not waiting.begun.is_set()
    assert work.cancel(first.id).state is OperationState.CANCELLED


def test_an_act_that_fails_because_it_was_cancelled_is_cancelled_and_says_how_far_it_came(work):
    begun = threading.Event()

    def act(progress, cancelled):
        begun.set()
        deadline = UntilCancelled.within(WITHIN_S, cancelled)
        while not deadline.passed():
            threading.Event().wait(0.01)
        assert deadline.left_s() == 0
        raise HeadraceError("it is logged, and acts later")

    asked = work.start("set", None, "ann", act)
    assert begun.wait(WITHIN_S)
    work.cancel(asked.id)
    told = over(work, asked.id)
    assert (told.state, told.said, told.problem) == (OperationState.CANCELLED, "it is logged, and acts later", None)


def test_lists_have_the_newest_first_go_on_after_any_and_may_be_of_one_job(work):
    done = Step()
    done.go.set()
    ids = []
    for n in range(5):
        ids.append(work.start("n", "odd" if n % 2 else "even", "ann", done).id)
        over(work, ids[-1])
        while work.going("odd") or work.going("even"):
            threading.Event().wait(0.005)
    ids.sort()
    assert [each.id for each in work.list(limit=2)] == ids[:-3:-1]
    assert [each.id for each in work.list(after=ids[3])] == ids[2::-1]
    assert {each.job for each in work.list(job="odd")} == {"odd"}
    assert [each.id for each in work.list(kind="n", limit=2)] == ids[:-3:-1] and work.list(kind="m") == []


def test_what_ran_when_the_service_died_is_interrupted_after_its_restart(records):
    dying = OperationQueue(records, threads=1)
    step = Step()
    asked = [dying.start("n", None, "ann", step), dying.start("n", None, "ann", Step())]
    assert step.begun.wait(WITHIN_S)
    # The process is gone here: nothing of `dying` acts any more.
    again = OperationQueue(records, threads=1)
    assert [again.get(each.id).state for each in asked] == [OperationState.INTERRUPTED] * 2
    assert all(again.get(each.id).ended for each in asked)
    step.go.set()
    dying.close()
    again.close()


def test_at_the_services_end_what_runs_is_interrupted_and_nothing_more_is_taken(records):
    work = OperationQueue(records, threads=1)

    def act(progress, cancelled):
        assert cancelled.wait(WITHIN_S)
        progress(None, "on")

    asked = work.start("n", None, "ann", act)
    work.close()
    assert work.get(asked.id).state is OperationState.INTERRUPTED
    with pytest.raises(LimitReached):
        work.start("n", None, "ann", act)


def test_what_ended_days_ago_is_forgotten(records, work):
    step = Step()
    step.go.set()
    asked = work.start("n", None, "ann", step)
    over(work, asked.id)
    records.prune(utc_now() + KEEP_OPERATIONS + timedelta(minutes=1))
    while work.going(""):
        pass
    with pytest.raises(UnknownOperation):
        for _ in range(WITHIN_S * 100):  # until the thread has let go of it
            work.get(asked.id)
            threading.Event().wait(0.01)
