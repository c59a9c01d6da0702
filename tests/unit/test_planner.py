"""When a pass may be cut: by count once it is full or the stream has ended, by arrival once its time is up."""

import threading

import pytest

from dataset.errors import SourceGap, SourceUnavailable
from dataset.source import Partition
from trainer.config import PassesSection
from trainer.plan import Plan
from trainer.planner import Drained, Planner


class Stream:
    """Ends as scripted; the last ones stay."""

    def __init__(self, *ends, bounded=False, fails=None):
        self.ends, self.bounded, self.fails = list(ends), bounded, fails
        self.committed, self.closed = [], False

    def partitions(self, deadline):
        if self.fails:
            raise SourceUnavailable(self.fails)
        end, final = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        return [Partition("t/0", 0, 0, 0, end, final)]

    def commit(self, positions, deadline):
        self.committed.append(dict(positions))

    def close(self):
        self.closed = True


def first(stream, learn_until=None, positions=None, num_positions=0, **passes):
    planner = Planner(stream, PassesSection(**passes), 1, learn_until)
    try:
        planner.request(1, positions or {}, num_positions)
        answer = planner.take(10.0)
        return answer, planner.lag(positions or {})
    finally:
        planner.close()
        assert stream.closed


def test_by_count_a_pass_waits_until_it_is_full():
    answer, lag = first(Stream((3, False), (7, False), (25, False)), cut="count", max_events=10)
    assert isinstance(answer, Plan) and answer.num_positions == 10
    assert lag == {"t/0": 25}


def test_by_count_the_last_pass_takes_what_is_left():
    answer, _ = first(Stream((7, True), bounded=True), max_events=10)
    assert isinstance(answer, Plan) and answer.num_positions == 7


def test_a_bounded_stream_at_its_end_is_drained():
    answer, _ = first(Stream((7, True), bounded=True), positions={"t/0": 7})
    assert isinstance(answer, Drained)


def test_by_arrival_nothing_is_no_pass_and_what_came_is_one():
    answer, _ = first(Stream((0, False), (0, False), (4, False)), max_events=10, wait="50ms")
    assert isinstance(answer, Plan) and answer.num_positions == 4


def test_by_arrival_a_full_pass_does_not_wait():
    answer, _ = first(Stream((40, False)), max_events=10, wait="1h")
    assert isinstance(answer, Plan) and answer.num_positions == 10


def test_learning_ends_exactly_where_the_spec_says():
    learning, _ = first(Stream((40, True), bounded=True), learn_until=12, num_positions=8, max_events=10)
    assert learning.learn and learning.num_positions == 4
    frozen, _ = first(Stream((40, True), bounded=True), learn_until=12, num_positions=12, max_events=10)
    assert not frozen.learn and frozen.num_positions == 10


def test_what_the_source_says_reaches_the_one_who_asks():
    with pytest.raises(SourceUnavailable, match="broker is away"):
        first(Stream((0, False), fails="broker is away"))


def test_positions_are_shown_to_lag_tools():
    stream = Stream((40, True), bounded=True)
    planner = Planner(stream, PassesSection(max_events=10), 1, None)
    planner.request(1, {}, 0)
    planner.commit({"t/0": 10})
    assert planner.take(10.0) is not None
    planner.request(2, {"t/0": 10}, 10)
    assert planner.take(10.0) is not None
    planner.close()
    assert stream.committed == [{"t/0": 10}]


class SlowToCommit(Stream):
    """Its first commit takes until it is let go."""

    def __init__(self, *ends):
        super().__init__(*ends)
        self.committing, self.go = threading.Event(), threading.Event()

    def commit(self, positions, deadline):
        self.committing.set()
        assert self.go.wait(10)
        super().commit(positions, deadline)


def test_positions_closed_while_others_are_shown_are_shown_too_even_at_the_end():
    stream = SlowToCommit((25, True))
    planner = Planner(stream, PassesSection(), 1, None)
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
def test_past_a_gap_the_job_goes_on_where_the_spec_says_and_counts_what_is_lost(on_gap, begin):
    planner = Planner(Forgetful(bounded=True), PassesSection(max_events=10), 1, None, on_gap)
    planner.request(3, {"t/0": 20}, 20)
    answer = planner.take(10.0)
    assert planner.jumped == {"t/0": 30 if begin else 60}
    if begin:
        assert [(s.begin, s.end) for s in answer.segments[0]] == [(50, 60)]
    else:
        assert isinstance(answer, Drained)
    planner.close()


def test_a_gap_stops_the_job_unless_the_spec_says_otherwise():
    planner = Planner(Forgetful(bounded=True), PassesSection(max_events=10), 1, None)
    planner.request(3, {"t/0": 20}, 20)
    with pytest.raises(SourceGap, match="t/0: position 20 is no longer retained, the first one is 50"):
        planner.take(10.0)
    planner.close()
