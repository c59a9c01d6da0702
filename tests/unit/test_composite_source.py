"""Several sources as one stream, against a plain merge of what each of them has; and turns of sources that wait."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.pipe.segment_work import reject_early
from headrace.dataset.pipe.time_window import AFTER, BEFORE, TimeWindow
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.sources.composite import CompositeSource
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.spec.config import EventTime, SourceSection
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedRecord
from headrace.dataset.stream.source import Events, Segment
from headrace.deadline import Deadline
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import MemoryPlanJournal, PassRules, Planner, StreamEnded

T_S = 1_714_521_600
T = "2024-05-01T00:00:00+00:00"
NAMES = ("a", "b", "c")
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=3)


def soon():
    return Deadline.after(20)


def section(after=None, **keys):
    return SourceSection(after=after, **keys)


def made(counts, **keys):
    """A source in memory; its values name source, partition and position."""
    return {
        name: MemorySource([[f"{name}{n}.{i}".encode() for i in range(size)] for n, size in enumerate(sizes)], **keys)
        for name, sizes in counts.items()
    }


class Side:
    """A planner over several sources, started anew before each pass if `dies`; reads what it plans."""

    def __init__(self, sections, open_sources, *, dies=False, ranks=1, **passes):
        self.names, self.open_sources, self.dies, self.ranks = SourceSet(sections), open_sources, dies, ranks
        self.passes = PassesSection(**{"wait": "1ms"} | passes)
        self.known, self.skips, self.positions, self.number = {}, (), {}, 0
        self.journal = MemoryPlanJournal()
        self.plans = []

    def start(self):
        source = CompositeSource(self.names, self.open_sources())
        keys = {"journal": self.journal, "known": self.known, "skips": self.skips}
        return Planner(source, PassRules(self.passes, self.ranks, sources=self.names), **keys)

    def run(self, max_passes=1_000):
        """Values of each pass, until the stream ends."""
        planner = self.start()
        try:
            while self.number < max_passes:
                planner.request(self.number + 1, self.positions, 0)
                plan = planner.take(20.0)
                self.known, self.skips = planner.known, planner.skips
                if isinstance(plan, StreamEnded):
                    return
                assert isinstance(plan, PassPlan)
                self.plans.append(plan)
                self.number, self.positions = plan.number, {**self.positions, **plan.positions()}
                if self.dies:
                    planner.close()
                    planner = self.start()
        finally:
            planner.close()

    def values(self):
        """The values that each pass reads, by a source of its own."""
        source = CompositeSource(self.names, self.open_sources())
        return [
            [
                block.value(i).decode()
                for rank in plan.segments
                for each in rank
                for block in source.read(each, soon())
                for i in range(len(block))
            ]
            for plan in self.plans
        ]


@settings(deadline=None, max_examples=25)
@given(st.lists(COUNTS, min_size=2, max_size=3), st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_several_sources_give_what_a_plain_merge_gives(sizes, max_events, ranks, dies):
    counts = dict(zip(NAMES, sizes, strict=False))
    side = Side(
        {name: section() for name in counts}, lambda: made(counts), dies=dies, ranks=ranks, max_events=max_events
    )
    side.run()
    merged = [f"{name}{n}.{i}" for name, sizes in counts.items() for n, size in enumerate(sizes) for i in range(size)]
    values = side.values()
    assert sorted(value for each in values for value in each) == sorted(merged)
    assert [len(each) for each in values[:-1]] == [max_events] * (len(values) - 1)
    ends = {f"{name}:memory/{n}": size for name, sizes in counts.items() for n, size in enumerate(sizes) if size}
    assert side.positions == ends


def test_what_sources_do_not_find_is_told_after_a_while_with_their_names(monkeypatch):
    def opened():
        sources = made({"live": [3], "history": [3]})
        sources["history"].missing = ["no file matches 'x'"]
        return sources

    planner = Side({"live": section(), "history": section()}, opened).start()
    try:
        planner.request(1, {}, 0)
        planner.take(20.0)
        assert list(planner.missing) == []
        monkeypatch.setattr("headrace.trainer.rank0.planner.MISSING_S", 0.0)
        assert list(planner.missing) == ["source history: no file matches 'x'"]
    finally:
        planner.close()


@settings(deadline=None, max_examples=25)
@given(st.lists(COUNTS, min_size=3, max_size=3), st.integers(1, 40), st.booleans())
def test_a_source_begins_when_all_before_it_are_read(sizes, max_events, dies):
    counts = dict(zip(NAMES, sizes, strict=True))
    sections = {"c": section("b"), "b": section("a"), "a": section()}
    side = Side(sections, lambda: made(counts), dies=dies, max_events=max_events)
    side.run()
    order = [value[0] for each in side.values() for value in each]
    assert order == sorted(order) and len(order) == sum(map(sum, sizes))
    assert all(len({value[0] for value in each}) == 1 for each in side.values()), "no pass has events of two turns"


def test_a_source_without_end_begins_after_the_history_also_after_deaths():
    def opened():
        return {**made({"old": [7, 3]}), **made({"live": [9]}, bounded=False)}

    whole, killed = (
        Side({"old": section(), "live": section("old")}, opened, dies=dies, max_events=4) for dies in (False, True)
    )
    for side in (whole, killed):
        side.run(max_passes=5)
    assert [[value[:4].rstrip("0123456789.") for value in each] for each in whole.values()] == [
        ["old"] * 4, ["old"] * 4, ["old"] * 2, ["live"] * 4, ["live"] * 4,
    ]  # fmt: skip
    assert [plan.segments for plan in killed.plans] == [plan.segments for plan in whole.plans]
    assert whole.known["old:memory/0"].end == 7 and whole.known["live:memory/0"].end is None


def test_a_history_that_grows_while_the_job_is_down_keeps_its_end():
    sizes = {"old": [4]}

    def opened():
        return {**made(sizes), **made({"live": [2]}, bounded=False)}

    side = Side({"old": section(), "live": section("old")}, opened, max_events=10)
    side.run(max_passes=1)
    sizes["old"] = [6]
    side.run(max_passes=2)
    assert [sorted(each) for each in side.values()] == [
        ["old0.0", "old0.1", "old0.2", "old0.3"],
        ["live0.0", "live0.1"],
    ]


def test_each_source_has_its_own_rule_for_gaps():
    sections = {"a": section(on_gap="earliest"), "b": section()}
    sources = made({"a": [5], "b": [5]})
    sources["a"].drop_before(0, 2)
    side = Side(sections, lambda: sources, max_events=100)
    side.run()
    assert side.positions == {"a:memory/0": 5, "b:memory/0": 5} and len(side.values()[0]) == 8
    sources["b"].drop_before(0, 1)
    strict = Side(sections, lambda: sources, max_events=100)
    with pytest.raises(SourceGap, match="b:memory/0: position 0 is no longer retained"):
        strict.run()


def test_sources_with_times_of_records_advance_together():
    def topic(name, first_s, step_s):
        records = [ScriptedRecord(f"{name}{i}".encode(), 1000 * (first_s + step_s * i)) for i in range(40)]
        return MemorySource([records])

    sections = {name: KafkaSource(kind="kafka", topics=("t",)) for name in ("a", "b")}
    opened = {"a": topic("a", 0, 60), "b": topic("b", 1200, 60)}
    side = Side(sections, lambda: opened, max_events=10, max_skew="5m")
    side.run()
    for values in side.values():
        times = [60 * int(value[1:]) + (1200 if value[0] == "b" else 0) for value in values]
        assert max(times) - min(times) <= 600, values


def window(**keys):
    found = TimeWindow.of(FilesSource(kind="files", paths=("x",), event_time=EventTime(field="ts"), **keys))
    assert found is not None
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-3_600_000, 3_600_000), max_size=60), st.integers(0, 2), st.randoms(use_true_random=False))
def test_every_event_is_on_one_side_of_the_time_whatever_its_record_says(offsets_ms, unit, random):
    """History until T and Kafka since T hold the same events; record times differ from event times by up to an hour."""
    scale = {0: 1e-3, 1: 1, 2: 1000}[unit]
    name = ("s", "ms", "us")[unit]
    values = [json.dumps({"n": n, "ts": (T_S * 1000 + ms) * scale}).encode() for n, ms in enumerate(offsets_ms)]
    stamps = sorted(T_S * 1000 + ms + random.randint(-3_600_000, 3_600_000) for ms in offsets_ms)
    order = sorted(range(len(values)), key=lambda n: offsets_ms[n])
    records = [values[n] for n in order]  # stamped when the broker got them: in order, and not the event's time
    stamps = [max(stamp, T_S * 1000 + offsets_ms[n] - 3_600_000) for stamp, n in zip(stamps, order, strict=True)]
    stamps = np.maximum.accumulate(np.array(stamps, np.int64)) if stamps else np.empty(0, np.int64)
    first = int(np.searchsorted(stamps, T_S * 1000 - 3_600_000))  # what Kafka answers for T - overlap
    time = EventTime(field="ts", unit=name)
    old = TimeWindow.of(FilesSource(kind="files", paths=("x",), event_time=time, until=T))
    live = TimeWindow.of(KafkaSource(kind="kafka", topics=("t",), event_time=time, since=T))
    segment = Segment("x", 0, 0, len(values))
    taken = []
    for its, events in ((old, values), (live, records[first:])):
        work = reject_early(segment, [Events.of(events, range(len(events)))], 1 << 20, lines=False, window=its)
        kept = [block.value(i) for block in work.blocks for i in range(len(block))]
        assert work.num_events == len(kept) and not work.rejections
        assert sum(work.left_out.values()) == len(events) - len(kept)
        taken += kept
    assert sorted(taken) == sorted(values)


def test_an_event_without_a_time_is_bad_where_bounds_are_set():
    values = [b'{"ts": %d}' % (T_S - 1), b'{"ts": "soon"}', None, b'{"ts": %d}' % T_S, b'{"ts": %d}' % (T_S + 9)]
    bounds = window(since=T, until="2024-05-01T00:00:05+00:00")
    work = reject_early(Segment("x", 0, 0, 5), [Events.of(values, range(5))], 1 << 20, lines=False, window=bounds)
    assert work.left_out == {BEFORE: 1, AFTER: 1} and work.num_events == 3
    assert [(each.offset, each.reason) for each in work.rejections] == [(1, Reason.NO_TIME), (2, Reason.NULL)]
    assert [block.value(0) for block in work.blocks] == [values[3]]
