"""Parallel streams advance together in time: by the time stamps of records, or by the periods of files."""

from bisect import bisect_left, bisect_right

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.pass_plan import PassPlan, cut, is_drained
from headrace.trainer.rank0.skew import caps_by_period, caps_by_time, first_cells, heads, merged_caps, rests_of

SKEW_MS = 1_000
START_MS = 1_700_000_000_000


def plan_of(number, partitions, positions, max_events, num_ranks, learn=True, *more, **named):
    return PassPlan(number, cut(partitions, positions, max_events, num_ranks, *more, **named), learn)


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
            rests = rests_of(self.partitions, positions, ())
            caps = caps_by_time(rests, waiting, waiting, skew_ms, self.ask, lowest) if len(waiting) > 1 else {}
            if not remembers:
                lowest = {}
            plan = plan_of(number, self.partitions, positions, max_events, num_ranks, learn=True, caps=caps)
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
    caps = caps_by_time(rests_of(topic.partitions, {}, ()), waiting, ["t/1", "t/2"], SKEW_MS, topic.ask, {})
    assert caps == {"t/0": 0, "t/1": 2, "t/2": 1}


def test_records_without_time_stamps_do_not_block_streams():
    def ask(times_ms):
        return {}

    parts = [Partition(f"t/{i}", i, 0, 0, 5, True) for i in range(2)]
    caps = caps_by_time(rests_of(parts, {}, ()), heads(parts, {}), ["t/0", "t/1"], SKEW_MS, ask, {})
    assert caps == {"t/0": 5, "t/1": 5}


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


class Files:
    """Streams of files, whose events may be out of order, with the queries of a source of files."""

    def __init__(self, streams):
        self.times = {f"{s}/{f}": times for s, files in enumerate(streams) for f, times in enumerate(files)}
        names = list(self.times)
        self.partitions = [
            Partition(name, names.index(name), 0, 0, len(times), True, stream=name[0], period=(name[2:],))
            for name, times in self.times.items()
        ]

    def ask(self, times_ms):
        found = {
            name: next((at for at, t in enumerate(self.times[name]) if t >= ms), None) for name, ms in times_ms.items()
        }
        return {name: at for name, at in found.items() if at is not None}

    def merged(self, skips):
        """All events in the order in which they count: by the greatest time so far of their file, then by stream."""
        order = []
        for number, stream in enumerate(sorted({each.stream for each in self.partitions})):
            reached = 0
            for each in (each for each in self.partitions if each.stream == stream):
                for at, time in enumerate(self.times[each.name]):
                    reached = max(reached, time)
                    if not any(skip.partition == each.name and skip.begin <= at < skip.end for skip in skips):
                        order.append((reached, number, len(order), (each.name, at)))
        return [event for *_, event in sorted(order)]


rising = st.lists(st.integers(0, 60), min_size=1, max_size=25).map(sorted)
files = st.lists(rising, min_size=1, max_size=3).map(
    lambda found: [[1_000 * n + t for t in f] for n, f in enumerate(found)]
)


@given(st.lists(files, min_size=1, max_size=3), st.integers(1, 30), st.data())
def test_passes_of_merged_streams_are_pieces_of_the_one_stream_in_order_of_time(all_files, max_events, data):
    source = Files(all_files)
    skips = [SkippedRange(data.draw(st.sampled_from(sorted(source.times))), 1, 3)] if data.draw(st.booleans()) else []
    positions, number, lowest, passes = {}, 0, {}, []
    while not is_drained(source.partitions, positions, skips):
        number += 1
        rests = rests_of(source.partitions, positions, skips)
        caps = merged_caps(rests, max_events, source.ask, lowest)
        assert caps == merged_caps(rests, max_events, source.ask, {})
        plan = plan_of(number, source.partitions, positions, max_events, 2, learn=True, skips=skips, caps=caps)
        positions |= plan.positions()
        passes.append({(s.partition, at) for rank in plan.segments for s in rank for at in range(s.begin, s.end)})
    order = source.merged(skips)
    assert passes == [set(order[at : at + max_events]) for at in range(0, len(order), max_events)]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 40))
def test_out_of_order_events_count_at_the_greatest_time_before_them(times, max_events):
    source = Files([[times], [sorted(times)]])
    caps = merged_caps(rests_of(source.partitions, {}, ()), max_events, source.ask, {})
    plan = plan_of(1, source.partitions, {}, max_events, 1, learn=True, caps=caps)
    taken = {(s.partition, at) for rank in plan.segments for s in rank for at in range(s.begin, s.end)}
    assert taken == set(source.merged(())[:max_events])


def test_streams_without_times_are_not_merged():
    parts = [Partition(f"t/{i}", i, 0, 0, 5, True) for i in range(2)]
    assert merged_caps(rests_of(parts, {}, ()), 3, lambda _: {}, {}) == {}


def test_only_partitions_that_the_next_pass_can_reach_are_asked_for_their_times():
    source, asked = Files([[[1_000 * n, 1_000 * n + 500] for n in range(50)], [[0, 49_000]]]), set()

    def ask(times_ms):
        asked.update(times_ms)
        return source.ask(times_ms)

    caps = merged_caps(rests_of(source.partitions, {}, ()), 5, ask, {})
    assert {name: end for name, end in caps.items() if end} == {"0/0": 2, "0/1": 2, "1/0": 1}
    assert asked == {"0/0", "0/1", "0/2", "1/0"}
