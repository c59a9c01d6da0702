"""When a pass may be cut: by count, once it is full or the stream has ended; by arrival, once its time is up."""

import threading
from pathlib import Path

import pytest

from headrace import retry
from headrace.dataset.sources.simulated import SimulatedSource, SimulatedStream
from headrace.dataset.spec.config import SourceSection
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedRecord
from headrace.dataset.stream.source import Partition
from headrace.deadline import Deadline
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.log import LogFull
from headrace.trainer.journal.partitions import SkippedRange, with_new_partitions
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import GapOperation
from headrace.trainer.rank0.planner import MemoryPlanJournal, PassRules, Planner, StreamEnded


class Stream:
    """Its partitions end as scripted; the last script repeats."""

    def __init__(self, *ends, bounded=False, fails=None):
        self.ends, self.bounded, self.fails = list(ends), bounded, fails
        self.committed, self.closed = [], False

    def partitions(self, deadline):
        if self.fails:
            raise SourceUnavailable(self.fails)
        end, final = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        return [Partition("t/0", 0, 0, 0, end, final)]

    def resume(self, positions):
        self.resumed = positions

    def commit(self, positions, deadline):
        self.committed.append(dict(positions))

    def close(self):
        self.closed = True


def first(stream, learn_until=None, positions=None, num_positions=0, **passes):
    planner = Planner(stream, PassRules(PassesSection(**passes), 1, learn_until=learn_until))
    try:
        planner.request(1, positions or {}, num_positions)
        answer = planner.take(10.0)
        return answer, planner.lag(positions or {})
    finally:
        planner.close()
        assert stream.closed


def test_by_count_a_pass_waits_until_it_is_full():
    answer, lag = first(Stream((3, False), (7, False), (25, False)), cut="count", max_events=10)
    assert isinstance(answer, PassPlan) and answer.num_positions == 10
    assert lag == {"t/0": 25}


def test_by_count_the_last_pass_takes_what_is_left():
    answer, _ = first(Stream((7, True), bounded=True), max_events=10)
    assert isinstance(answer, PassPlan) and answer.num_positions == 7


def test_a_bounded_stream_at_its_end_is_drained():
    answer, _ = first(Stream((7, True), bounded=True), positions={"t/0": 7})
    assert isinstance(answer, StreamEnded)


@pytest.mark.parametrize("cut", ["count", "arrival"])
def test_a_stream_without_an_end_is_never_drained_even_where_every_partition_is_final(cut):
    planner = Planner(Stream((7, True)), PassRules(PassesSection(cut=cut, wait="1ms"), 1))
    planner.request(1, {"t/0": 7}, 7)
    assert planner.take(0.3) is None
    planner.close()


def test_by_arrival_a_pass_needs_new_events():
    answer, _ = first(Stream((0, False), (0, False), (4, False)), max_events=10, wait="50ms")
    assert isinstance(answer, PassPlan) and answer.num_positions == 4


@pytest.mark.parametrize("cut", ["count", "arrival"])
def test_without_events_an_operation_that_waits_gets_an_empty_pass(cut):
    came = 5 if cut == "count" else 0  # which is less than a pass
    planner = Planner(Stream((came, False)), PassRules(PassesSection(cut=cut, max_events=10, wait="20ms"), 2))
    planner.request(1, {}, 0)
    assert planner.take(0.2) is None
    planner.wants_pass = lambda: True
    assert planner.take(10.0) == PassPlan(1, ((), ()))
    assert planner.lag({}) == {"t/0": came}
    planner.close()


def test_a_waiting_operation_does_not_shorten_a_pass():
    planner = Planner(
        Stream((0, False), (4, False)), PassRules(PassesSection(cut="arrival", max_events=10, wait="1h"), 1)
    )
    planner.wants_pass = lambda: True
    planner.request(1, {}, 0)
    assert planner.take(0.2) is None
    planner.close()


def test_by_arrival_a_full_pass_does_not_wait():
    answer, _ = first(Stream((40, False)), max_events=10, wait="1h")
    assert isinstance(answer, PassPlan) and answer.num_positions == 10


def test_learning_ends_exactly_at_learn_until():
    learning, _ = first(Stream((40, True), bounded=True), learn_until=12, num_positions=8, max_events=10)
    assert learning.learn and learning.num_positions == 4
    frozen, _ = first(Stream((40, True), bounded=True), learn_until=12, num_positions=12, max_events=10)
    assert not frozen.learn and frozen.num_positions == 10


def test_an_error_of_the_source_reaches_the_caller():
    with pytest.raises(SourceUnavailable, match="broker is away"):
        first(Stream((0, False), fails="broker is away"))


def test_positions_are_shown_to_lag_tools():
    stream = Stream((40, True), bounded=True)
    planner = Planner(stream, PassRules(PassesSection(max_events=10), 1))
    planner.request(1, {}, 0)
    planner.commit({"t/0": 10})
    assert planner.take(10.0) is not None
    planner.request(2, {"t/0": 10}, 10)
    assert planner.take(10.0) is not None
    planner.close()
    assert stream.committed == [{"t/0": 10}]


class SlowToCommit(Stream):
    """Its first commit blocks until it is released."""

    def __init__(self, *ends):
        super().__init__(*ends)
        self.committing, self.go = threading.Event(), threading.Event()

    def commit(self, positions, deadline):
        self.committing.set()
        assert self.go.wait(10)
        super().commit(positions, deadline)


def test_positions_closed_while_others_are_shown_are_shown_too_even_at_the_end():
    stream = SlowToCommit((25, True))
    planner = Planner(stream, PassRules(PassesSection(), 1))
    planner.commit({"t/0": 5, "t/1": 5})
    assert stream.committing.wait(10)
    planner.commit({"t/0": 25, "t/1": 10})
    planner.commit({"t/1": 25})
    closing = threading.Thread(target=planner.close)
    closing.start()
    assert planner._stopping.wait(10)
    stream.go.set()
    closing.join()
    assert stream.committed == [{"t/0": 5, "t/1": 5}, {"t/0": 25, "t/1": 25}]


class Forgetful(Stream):
    def partitions(self, deadline):
        return [Partition("t/0", 0, 0, 50, 80, True)]


@pytest.mark.parametrize(("on_gap", "begin"), [("earliest", 50), ("latest", None)])
def test_after_a_gap_the_job_continues_as_configured_and_counts_lost_positions(on_gap, begin):
    planner = Planner(
        Forgetful(bounded=True),
        PassRules(PassesSection(max_events=10), 1, sources=SourceSet.of(SourceSection(on_gap=on_gap))),
    )
    planner.request(3, {"t/0": 20}, 20)
    answer = planner.take(10.0)
    assert planner.jumped == {"t/0": 30 if begin else 60}
    if begin:
        assert [(s.begin, s.end) for s in answer.segments[0]] == [(50, 60)]
    else:
        assert isinstance(answer, StreamEnded)
    planner.close()


def test_a_gap_stops_the_job_by_default():
    planner = Planner(Forgetful(bounded=True), PassRules(PassesSection(max_events=10), 1))
    planner.request(3, {"t/0": 20}, 20)
    with pytest.raises(SourceGap, match="t/0: position 20 is no longer retained, the first one is 50"):
        planner.take(10.0)
    planner.close()


def plan_of(planner, number=1, positions=None):
    planner.request(number, positions or {}, 0)
    try:
        return planner.take(10.0)
    finally:
        planner.close()


class Listening(MemoryPlanJournal):
    """Records the number of answers that the planner had given when it wrote."""

    def __init__(self):
        super().__init__()
        self.order, self.planner = [], None

    def operation(self, operation):
        super().operation(operation)
        self.order.append((operation.op, self.planner._answers.qsize()))

    def plan(self, plan):
        super().plan(plan)
        self.order.append(("plan", self.planner._answers.qsize()))


def test_new_partitions_and_the_plan_are_logged_before_the_answer():
    journal = Listening()
    stream = MemorySource([[b"a"] * 5, [b"b"] * 3])
    journal.planner = planner = Planner(stream, PassRules(PassesSection(), 1), journal=journal)
    plan = plan_of(planner)
    assert journal.order == [("partitions", 0), ("plan", 0)]
    assert journal.plans == [plan]
    (operation,) = journal.operations
    assert {each.name: each for each in operation.partitions} == dict(planner.known)
    assert [(s.partition, s.end, s.identity) for s in plan.segments[0]] == [
        ("memory/0", 5, "0.1"),
        ("memory/1", 3, "1.1"),
    ]


def test_a_restart_with_the_registry_plans_what_the_first_start_planned():
    first = Planner(MemorySource([[b"a"] * 50, [b"b"] * 50]), PassRules(PassesSection(max_events=20), 2))
    plan = plan_of(first)
    journal = MemoryPlanJournal()
    grown = MemorySource([[b"a"] * 70, [b"b"] * 60, [b"c"] * 90])
    again = Planner(grown, PassRules(PassesSection(max_events=20), 2), journal=journal, known=first.known)
    assert plan_of(again) == plan
    assert journal.operations == []
    everything = PassesSection(max_events=1000)
    rest = plan_of(Planner(grown, PassRules(everything, 2), known=first.known), 2, plan.positions())
    assert rest.positions() == {"memory/0": 50, "memory/1": 50}


HOURS = [range(0, 30), range(2, 9), [], range(0, 60, 7)]
"""By partition the hours of its records."""


def hourly():
    return MemorySource([[ScriptedRecord(b"e", 3_600_000 * hour) for hour in hours] for hours in HOURS])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parallel_partitions_are_planned_alike_whenever_the_job_is_restarted(num_ranks):
    passes = PassesSection(max_events=9, max_skew="4h")
    running = Planner(hourly(), PassRules(passes, num_ranks))
    known, positions, plans = {}, {}, []
    while True:
        number = len(plans) + 1
        running.request(number, positions, 0)
        plan = running.take(10.0)
        restarted = Planner(hourly(), PassRules(passes, num_ranks), known=known)
        again = plan_of(restarted, number, positions)
        if isinstance(plan, StreamEnded):
            break
        assert again == plan
        plans.append(plan)
        known, positions = restarted.known, positions | plan.positions()
        segments = [segment for rank in plan.segments for segment in rank]
        hours = [HOURS[s.number][at] for s in segments for at in range(s.begin, s.end)]
        assert len({s.number for s in segments}) == 1 or max(hours) - min(hours) < 4
    running.close()
    assert isinstance(again, StreamEnded)
    assert positions == {"memory/0": 30, "memory/1": 7, "memory/3": 9}


def test_streams_without_backlog_cause_no_queries_for_times():
    source = MemorySource([[ScriptedRecord(b"e", 1)], [ScriptedRecord(b"e", 1)]], bounded=False)
    planner = Planner(source, PassRules(PassesSection(wait="1ms"), 1))
    planner.request(1, {}, 0)
    assert planner.take(10.0).num_positions == 2
    asked = source.num_time_lookups
    source.append(0, [ScriptedRecord(b"e", 10**12)])
    source.append(1, [ScriptedRecord(b"e", 0)])
    planner.request(2, {"memory/0": 1, "memory/1": 1}, 2)
    assert planner.take(10.0).num_positions == 2
    planner.close()
    assert asked > 0 and source.num_time_lookups == asked


def test_a_pause_makes_what_waited_meanwhile_a_backlog():
    source = MemorySource([[ScriptedRecord(b"e", 1)], [ScriptedRecord(b"e", 1)]], bounded=False)
    planner = Planner(source, PassRules(PassesSection(wait="1ms"), 1))
    planner.request(1, {}, 0)
    assert planner.take(10.0).num_positions == 2
    planner.held = lambda: True
    planner.request(2, {"memory/0": 1, "memory/1": 1}, 2)
    assert planner.take(0.2) is None
    source.append(0, [ScriptedRecord(b"e", 10**12)])
    source.append(1, [ScriptedRecord(b"e", 2)])
    planner.held = lambda: False
    assert planner.take(10.0).positions() == {"memory/1": 2}
    planner.close()


def test_a_stream_by_the_clock_continues_after_a_restart_at_the_jobs_position():
    config = SimulatedSource(kind="simulated", rate=1000.0, partitions=2)
    passes = PassesSection(max_events=50, wait="10ms")
    first = Planner(SimulatedStream(config, seed=1), PassRules(passes, 1))
    plan = plan_of(first)
    positions = {name: position + 1_000_000 for name, position in plan.positions().items()}
    again = plan_of(Planner(SimulatedStream(config, seed=1), PassRules(passes, 1), known=first.known), 2, positions)
    assert {s.partition: s.begin for s in again.segments[0]}.items() <= positions.items()
    with pytest.raises(SourceGap, match="simulated/0 is not what it was"):
        plan_of(Planner(SimulatedStream(config, seed=2), PassRules(passes, 1), known=first.known), 2, positions)


def test_a_partition_found_while_down_comes_last_and_is_read_from_its_beginning():
    stream = MemorySource([[b"a"] * 5], bounded=False)
    passes = PassesSection(wait="10ms")
    first = Planner(stream, PassRules(passes, 1))
    assert plan_of(first).positions() == {"memory/0": 5}
    stream.add_partition([b"b"] * 4)
    stream.drop_before(1, 1)
    journal = MemoryPlanJournal()
    again = Planner(stream, PassRules(passes, 1), journal=journal, known=first.known)
    plan = plan_of(again, 2, {"memory/0": 5})
    assert [(s.number, s.begin, s.end) for s in plan.segments[0]] == [(1, 1, 4)]
    assert [each.number for each in journal.operations[0].partitions] == [1]


def test_a_stream_that_loses_its_end_between_two_runs_is_read_on():
    first = Planner(MemorySource([[b"a"] * 5, [b"b"] * 3]), PassRules(PassesSection(), 1))
    ends = plan_of(first).positions()
    assert ends == {"memory/0": 5, "memory/1": 3}
    stream = MemorySource([[b"a"] * 5, [b"b"] * 3], bounded=False)
    journal = MemoryPlanJournal()
    again = Planner(stream, PassRules(PassesSection(wait="10ms"), 1), journal=journal, known=first.known)
    again.request(2, ends, 8)
    assert again.take(0.3) is None, "there is nothing new yet"
    stream.append(0, [b"a"] * 2)
    stream.add_partition([b"c"])
    plan = again.take(10.0)
    again.close()
    assert {(s.partition, s.begin, s.end) for s in plan.segments[0]} == {("memory/0", 5, 7), ("memory/2", 0, 1)}
    logged = {each.name: each.end for operation in journal.operations for each in operation.partitions}
    assert logged == {"memory/0": None, "memory/1": None, "memory/2": None}
    assert again.num_late == 0
    journal.operations.clear()
    once_more = Planner(stream, PassRules(PassesSection(wait="10ms"), 1), journal=journal, known=again.known)
    stream.append(1, [b"b"])
    assert plan_of(once_more, 3, {**ends, **plan.positions()}).positions() == {"memory/1": 4}
    assert journal.operations == []


def test_a_partition_replaced_after_its_end_is_not_read_when_the_stream_loses_its_end(caplog):
    first = Planner(MemorySource([[b"a"] * 5, [b"b"] * 3]), PassRules(PassesSection(), 1))
    ends = plan_of(first).positions()
    stream = MemorySource([[b"a"] * 5, [b"b"] * 3], bounded=False)
    stream.recreate(0, [b"x"] * 50)
    stream.append(1, [b"b"])
    again = Planner(stream, PassRules(PassesSection(wait="10ms"), 1), known=first.known)
    assert plan_of(again, 2, ends).positions() == {"memory/1": 4}
    assert [again.known[name].end for name in ("memory/0", "memory/1")] == [5, None]
    assert "memory/0 was replaced" in caplog.text and "it is not read again" in caplog.text


@pytest.mark.parametrize("size", [4, 5, 50])
def test_a_replaced_partition_stops_the_job_however_long_it_is(size):
    stream = MemorySource([[b"a"] * 5], bounded=False)
    first = Planner(stream, PassRules(PassesSection(wait="10ms"), 1))
    plan = plan_of(first)
    stream.recreate(0, [b"x"] * size)
    journal = MemoryPlanJournal()
    with pytest.raises(SourceGap, match="memory/0 is not what it was"):
        plan_of(
            Planner(stream, PassRules(PassesSection(wait="10ms"), 1), journal=journal, known=first.known),
            2,
            {"memory/0": 5},
        )
    with pytest.raises(SourceGap, match="memory/0 is not what it was"):
        list(stream.read(plan.segments[0][0], Deadline.after(1)))
    assert journal.plans == journal.operations == []


def test_skipped_positions_are_in_no_plan():
    stream = MemorySource([[b"a"] * 30])
    passes = PassesSection(max_events=100)
    planner = Planner(
        stream, PassRules(passes, 1), skips=[SkippedRange("memory/0", 10, 15), SkippedRange("memory/0", 25, 99)]
    )
    assert [(s.begin, s.end) for s in plan_of(planner).segments[0]] == [(0, 10), (15, 25)]
    assert planner.lag({"memory/0": 12}) == {"memory/0": 10}
    over = Planner(stream, PassRules(passes, 1), known=planner.known, skips=planner.skips)
    assert isinstance(plan_of(over, 2, {"memory/0": 25}), StreamEnded)


def test_a_gap_is_logged_once_and_skipped_from_then_on_also_after_a_restart():
    stream = MemorySource([[b"a"] * 30], bounded=False)
    stream.drop_before(0, 20)
    journal, passes = MemoryPlanJournal(), PassesSection(wait="10ms")
    known, _ = with_new_partitions({}, stream.partitions(Deadline.after(1)), False)
    planner = Planner(
        stream, PassRules(passes, 1, sources=SourceSet.of(SourceSection(on_gap="latest"))), journal=journal, known=known
    )
    planner.request(2, {"memory/0": 10}, 10)
    assert planner.take(0.3) is None
    stream.append(0, [b"new"] * 3)
    plan = planner.take(10.0)
    planner.close()
    assert [(s.begin, s.end) for s in plan.segments[0]] == [(30, 33)]
    gap = GapOperation(partition="memory/0", position=10, go_on=30)
    assert journal.operations == [gap]
    assert planner.jumped == {"memory/0": 20}
    stream.append(0, [b"newer"] * 4)
    again = Planner(
        stream,
        PassRules(passes, 1, sources=SourceSet.of(SourceSection(on_gap="latest"))),
        journal=journal,
        known=planner.known,
        skips=planner.skips,
    )
    assert [(s.begin, s.end) for s in plan_of(again, 2, {"memory/0": 10}).segments[0]] == [(30, 37)]
    assert journal.operations == [gap]


class Full(MemoryPlanJournal):
    """Has no room until `room` is set."""

    def __init__(self):
        super().__init__()
        self.room, self.tried = threading.Event(), threading.Event()

    def plan(self, plan):
        self.tried.set()
        if not self.room.is_set():
            raise LogFull(Path("log/00000001-0001.log"), "No space left on device")
        super().plan(plan)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(retry, "PAUSE_S", 0.01)


def test_a_full_log_is_tried_again_and_the_status_says_so(quick):
    journal = Full()
    planner = Planner(MemorySource([[b"a"] * 5]), PassRules(PassesSection(), 1), journal=journal)
    planner.request(1, {}, 0)
    assert planner.take(0.1) is None
    assert journal.tried.is_set()
    assert "No space left on device" in planner.trouble and "the job stops after" in planner.trouble
    journal.room.set()
    plan = planner.take(10.0)
    planner.close()
    assert journal.plans == [plan] and planner.trouble == ""


def test_a_log_that_stays_full_ends_the_job(quick):
    journal = Full()
    planner = Planner(MemorySource([[b"a"] * 5]), PassRules(PassesSection(), 1), journal=journal, max_full_s=0.05)
    with pytest.raises(LogFull):
        plan_of(planner)
    assert journal.plans == []


def test_a_planner_closes_while_the_log_is_full():
    journal = Full()
    planner = Planner(MemorySource([[b"a"] * 5]), PassRules(PassesSection(), 1), journal=journal)
    planner.request(1, {}, 0)
    assert journal.tried.wait(10)
    planner.close()
    assert not planner._thread.is_alive() and journal.plans == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_planner_that_ended_by_a_bug_raises():
    class Broken(Stream):
        def partitions(self, deadline):
            raise ZeroDivisionError("bug")

    planner = Planner(Broken((3, False)), PassRules(PassesSection(), 1))
    planner.request(1, {}, 0)
    with pytest.raises(RuntimeError, match="thread has ended by a bug"):
        while True:
            planner.take(0.05)
    planner.close()
