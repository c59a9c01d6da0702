"""Parallel streams advance together in time: by the time stamps of records, or by the periods of files."""

from bisect import bisect_left, bisect_right

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.pass_plan import cut, is_drained
from headrace.trainer.rank0.skew import caps_by_period, caps_by_time, first_cells, heads

SKEW_MS = 1_000
START_MS = 1_700_000_000_000


class Topic:
    """Partitions of records with rising time stamps, with the queries of a broker."""

    def __init__(self, *times_ms):
        self.times = {f"t/{i}": [START_MS + t for t in times] for i, times in enumerate(times_ms)}
        self.partitions = [Partition(name, i, 0, 0, len(t), True) for i, (name, t) in enumerate(self.times.items())]
        self.num_asked = 0

    def ask(self, times_ms):
        self.num_asked += 1
        found = {name: bisect_left(self.times[name], ms) for name, ms in times_ms.items()}
        return {name: at for name, at in found.items() if at < len(self.times[name])}

    def passes(self, max_events, num_ranks=1, skew_ms=SKEW_MS, *, remembers=True):
        """The time stamps of each pass, by partition."""
        positions, number, lowest, found = {}, 0, {}, []
        while not is_drained(self.partitions, positions):
            number += 1
            waiting = heads(self.partitions, positions)
            caps = caps_by_time(waiting, waiting, skew_ms, self.ask, lowest) if len(waiting) > 1 else {}
            if not remembers:
                lowest = {}
            plan = cut(number, self.partitions, positions, max_events, num_ranks, learn=True, caps=caps)
            positions |= plan.positions()
            taken = {}
            for s in (s for rank in plan.segments for s in rank):
                taken.setdefault(s.partition, []).extend(self.times[s.partition][s.begin : s.end])
            found.append(taken)
        return found


times = st.lists(st.integers(0, 20_000), max_size=40).map(sorted)


@given(st.lists(times, min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 3))
def test_events_of_different_partitions_lie_no_further_apart_in_a_pass_than_is_allowed(
    all_times, max_events, num_ranks
):
    topic = Topic(*all_times)
    seen = {name: [] for name in topic.times}
    passes = topic.passes(max_events, num_ranks)
    assert passes == topic.passes(max_events, num_ranks, remembers=False)  # as after a restart
    for taken in passes:
        assert sum(map(len, taken.values())) > 0
        for name, found in taken.items():
            seen[name] += found
        if len(taken) > 1:
            stamps = [ms for found in taken.values() for ms in found]
            assert max(stamps) - min(stamps) < SKEW_MS
    assert seen == topic.times  # every one once, in order


def test_one_partition_with_ten_times_the_rate_of_the_other_waits_for_it():
    topic = Topic(range(0, 60_000, 100), range(0, 60_000, 10))
    passes = topic.passes(max_events=1_000_000)
    assert all(max(map(max, p.values())) - min(map(min, p.values())) < SKEW_MS for p in passes)
    assert len(passes) < 75  # nearly as many as there are skews in a minute: a sixteenth is lost to cells
    assert topic.num_asked < 10 * len(passes)


def test_a_gap_inside_a_single_partition_limits_no_stream():
    topic = Topic([0, 10_000, 20_000, 30_000], [30_000, 30_200])
    first, second = topic.passes(max_events=100)
    assert {name: len(found) for name, found in first.items()} == {"t/0": 3}
    assert {name: len(found) for name, found in second.items()} == {"t/0": 1, "t/1": 2}


def test_a_stream_that_limits_no_other_is_still_limited():
    topic = Topic([5_000], [0, 100, 9_000], [50, 8_000])
    waiting = heads(topic.partitions, {})
    assert caps_by_time(waiting, ["t/1", "t/2"], SKEW_MS, topic.ask, {}) == {"t/0": 0, "t/1": 2, "t/2": 1}


def test_records_without_time_stamps_do_not_block_streams():
    def ask(times_ms):
        return {}

    parts = [Partition(f"t/{i}", i, 0, 0, 5, True) for i in range(2)]
    assert caps_by_time(heads(parts, {}), ["t/0", "t/1"], SKEW_MS, ask, {}) == {}


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=30).map(sorted), st.data())
def test_the_cell_is_that_of_the_next_record(stamps, data):
    at = data.draw(st.integers(0, len(stamps) - 1))
    cell_ms = data.draw(st.integers(1, 1 << 20))
    lowest = data.draw(st.integers(0, stamps[at] // cell_ms))
    num_asked = 0

    def ask(times_ms):
        nonlocal num_asked
        num_asked += 1
        found = bisect_left(stamps, times_ms["t"])
        return {"t": found} if found < len(stamps) else {}

    last = bisect_right(stamps, stamps[at]) - 1  # of equal ones the broker names the first: ask from there
    first = bisect_left(stamps, stamps[last])
    assert first_cells({"t": first}, cell_ms, ask, {"t": lowest}) == {"t": stamps[at] // cell_ms}
    assert num_asked <= 2 * 42 + 2


def shards(*files):
    return [
        Partition(f"{shard}/{hour}", i, 0, 0, 10, True, "", f"shard={shard}", (hour,))
        for i, (shard, hour) in enumerate(files)
    ]


def test_files_of_parallel_partitions_advance_by_their_periods():
    parts = shards(("a", "9"), ("a", "10"), ("b", "9"), ("b", "10"))
    waiting = heads(parts, {})
    assert caps_by_period(parts, waiting, waiting) == {"a/10": 0, "b/10": 0}
    waiting = heads(parts, {"a/9": 10})
    assert caps_by_period(parts, waiting, waiting) == {"a/10": 0, "b/10": 0}
    waiting = heads(parts, {"a/9": 10, "b/9": 10})
    assert caps_by_period(parts, waiting, waiting) == {}


def test_a_shard_that_is_alone_is_read_up_to_the_others():
    parts = shards(("a", "1"), ("a", "2"), ("a", "3"), ("b", "3"))
    waiting = heads(parts, {})
    assert caps_by_period(parts, waiting, waiting) == {"a/3": 0, "b/3": 0}


def test_skipped_positions_are_no_backlog():
    parts = shards(("a", "1"), ("a", "2"), ("b", "1"))
    found = heads(parts, {"b/1": 10}, [SkippedRange("a/1", 0, 10), SkippedRange("a/2", 0, 4)])
    assert {name: (head.partition.name, head.position) for name, head in found.items()} == {"shard=a": ("a/2", 4)}
