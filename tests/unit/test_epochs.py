"""A source that is read several times: names by epoch, one epoch after another, whatever dies; and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec import plain, typed
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.repeated import RepeatedSource
from headrace.dataset.spec.config import MAX_EPOCHS
from headrace.dataset.spec.epochs import in_epoch, split_epoch
from headrace.dataset.spec.source_set import check_sources
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedRecord
from headrace.dataset.stream.source import Partition, Segment
from headrace.errors import SpecError
from headrace.trainer.journal.pass_plan import PassPlan
from tests.unit.test_composite_source import Side, made, section, soon

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=3)


@given(st.text(min_size=1, max_size=20), st.integers(1, MAX_EPOCHS))
def test_a_name_of_an_epoch_tells_both(name, epoch):
    assert split_epoch(in_epoch(name, epoch)) == (split_epoch(name) if epoch == 1 else (name, epoch))


def test_plans_of_the_first_epoch_are_written_as_before_and_others_say_theirs():
    segments = ((Segment("a", 0, 0, 5),),)
    assert "epoch" not in plain(PassPlan(3, segments))
    later = PassPlan(3, segments, epoch=2)
    assert typed(PassPlan, plain(later), "it") == later and plain(later)["epoch"] == 2


@settings(deadline=None, max_examples=25)
@given(COUNTS, COUNTS, st.integers(1, 3), st.integers(1, 40), st.integers(1, 2), st.booleans())
def test_every_epoch_has_all_events_and_comes_after_the_one_before(old, new, epochs, max_events, ranks, dies):
    counts = {"old": old, "new": new}
    sections = {"old": section(epochs=epochs), "new": section("old")}

    def opened():
        sources = made(counts)
        return {**sources, "old": RepeatedSource(sources["old"], epochs)}

    side = Side(sections, opened, dies=dies, ranks=ranks, max_events=max_events)
    side.run()
    values, plans = side.values(), side.plans
    of_old = [f"old{n}.{i}" for n, size in enumerate(old) for i in range(size)]
    for epoch in range(1, epochs + 1):
        read = [
            value for plan, each in zip(plans, values, strict=True) if plan.epoch == epoch for value in each
            if value.startswith("old")
        ]  # fmt: skip
        assert sorted(read) == sorted(of_old)
    assert all(len({value[:3] for value in each}) == 1 for each in values), "no pass has events of two turns"
    in_order = [(value[0] == "n", plan.epoch) for plan, each in zip(plans, values, strict=True) for value in each[:1]]
    assert in_order == sorted(in_order)
    assert side.positions.get(in_epoch("old:memory/0", epochs), 0) == old[0]


def test_passes_of_a_later_epoch_are_cut_as_in_the_first():
    side = Side({"": section(epochs=2)}, lambda: None, max_events=4)
    side.start = lambda: _planner(side, RepeatedSource(MemorySource([[b"%d" % i for i in range(10)]]), 2))
    side.run()
    cuts = [[(s.begin, s.end) for rank in plan.segments for s in rank] for plan in side.plans]
    assert cuts == [[(0, 4)], [(4, 8)], [(8, 10)]] * 2
    assert [plan.epoch for plan in side.plans] == [1, 1, 1, 2, 2, 2]


def _planner(side, source):
    from headrace.trainer.rank0.planner import PassRules, Planner

    keys = {"journal": side.journal, "known": side.known, "skips": side.skips}
    return Planner(source, PassRules(side.passes, side.ranks, sources=side.names), **keys)


def test_a_repeated_source_keeps_the_contract_of_its_source():
    inner = MemorySource([[ScriptedRecord(b"%d" % i, 1000 * i) for i in range(9)], [b"x"]])
    source = RepeatedSource(inner, 2)
    partitions = source.partitions(soon())
    assert [each.name for each in partitions] == ["memory/0", "memory/1", "memory/0#epoch=2", "memory/1#epoch=2"]
    assert [each.number for each in partitions] == [0, 1, 2, 3] and source.bounded
    for each in partitions[::2]:
        (block,) = source.read(Segment(each.name, each.number, 2, 5, each.identity), soon())
        assert [block.value(i) for i in range(len(block))] == [b"2", b"3", b"4"]
    assert source.positions_at({"memory/0": 3000, "memory/0#epoch=2": 5000}, soon()) == {
        "memory/0": 3,
        "memory/0#epoch=2": 5,
    }
    source.commit({"memory/0#epoch=2": 4, "memory/0": 9}, soon())
    assert inner.committed == {"memory/0": 4}, "lag tools see the newest epoch"
    source.close()
    assert inner.closed


def test_a_name_that_looks_like_that_of_an_epoch_is_refused():
    class Odd(MemorySource):
        def partitions(self, deadline):
            return [Partition("a#epoch=2", 0, 0, 0, 1, True)]

    with pytest.raises(SpecError, match="rename it"):
        RepeatedSource(Odd([[b"x"]]), 2).partitions(soon())


def files(**keys):
    return FilesSource(kind="files", paths=("*.jsonl",), **keys)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"a": files(epochs=2, follow=True)}, r"sources.a.epochs: a source is read again when it has ended"),
        ({"a": KafkaSource(kind="kafka", topics=("t",), epochs=2)}, r"sources.a.epochs: a source is read again"),
        ({"a": files(epochs=2), "b": files(follow=True)}, r"sources.a.epochs: source 'b' never ends"),
    ],
)
def test_epochs_that_would_never_begin_are_refused(sources, words):
    with pytest.raises(SpecError, match=words):
        check_sources(sources)


def test_a_source_without_end_may_come_after_all_epochs():
    check_sources({"a": files(epochs=3), "b": files(follow=True, after="c"), "c": files(after="a")})
