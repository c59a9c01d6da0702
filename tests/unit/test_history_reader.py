"""From the samples of a pass to questions about histories, and from answers to slots."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import HistorySection, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.pserver.config import ShardProcess
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.features import pass_gate
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.spec.history_tables import history_tables, remembered_of
from headrace.trainer.status.time_spent import StepClock

LAST = 3
HISTORY = HistorySection(key="user", of="item", last=LAST, when="click")
ENTRIES = (
    SparseSlot(name="past", pooling="none", history=HISTORY),
    SparseSlot(names=("user", "item")),
    MetaSlot(name="click", kind="meta"),
)
SCHEMA = Schema.of(ENTRIES)
SAMPLES = st.tuples(
    st.lists(st.integers(0, 3), max_size=2),  # signs of the key: none, one, or one more than counts
    st.lists(st.integers(0, 1 << 63), max_size=3),
    st.sampled_from([0.0, 1.0, 0.5, float("nan")]),
)
BLOCKS = st.lists(st.lists(st.lists(SAMPLES, min_size=1, max_size=3), max_size=4), max_size=3)
"""Blocks of events of samples. Every block numbers its events from 0, as blocks of several partitions may."""


def block_of(events):
    samples = [sample for event in events for sample in event]
    columns = [[sample[place] for sample in samples] for place in (0, 1)]
    ragged = [
        Ragged(
            np.array([sign for signs in column for sign in signs], np.uint64),
            np.array([0, *np.cumsum([len(signs) for signs in column])], np.int64),
        )
        for column in columns
    ]
    event_B = np.repeat(np.arange(len(events)), [len(event) for event in events])
    meta = {"click": np.array([sample[2] for sample in samples], np.float32)}
    return Samples(dict(zip(("user", "item"), ragged, strict=True)), {}, meta, event_B, np.zeros(len(samples)))


class Blocks:
    """A PassReader of made blocks."""

    def __init__(self, passes):
        self._passes, self.closed = passes, False

    def read(self, pass_number, segments, tally):
        tally.slots = SlotCounters(SCHEMA.emitted)
        for events in self._passes[pass_number - 1]:
            block = block_of(events)
            tally.slots.observe(block)
            yield block

    def close(self):
        self.closed = True


def plain(passes):
    """The history of every sample: a dictionary that reads the events in order."""
    known, found = {}, []
    for event in (event for blocks in passes for events in blocks for event in events):
        found += [known.get(keys[0], []) if keys else [] for keys, _, _ in event]
        for keys, items, click in event:
            if keys and click == click and click != 0:
                known[keys[0]] = [*known.get(keys[0], []), *items][-LAST:]
    return found


def told(column):
    ends = column.offset_B1.tolist()
    return [column.values_N[begin:end].tolist() for begin, end in zip(ends[:-1], ends[1:], strict=True)]


def shards_of():
    return EmbeddedShards(ShardProcess.alone(history_tables(SCHEMA), 1, histories=remembered_of(SCHEMA)))


@settings(max_examples=40, deadline=None)
@given(st.lists(BLOCKS, min_size=1, max_size=3))
def test_every_sample_has_the_history_that_the_log_gives_it(passes):
    shards, found = shards_of(), []
    reader = HistoryReader(Blocks(passes), SCHEMA, shards, 20.0)
    for number in range(1, len(passes) + 1):
        shards.open_pass(number, Deadline.after(20))
        reader.opened(number)
        tally, mine = PassTally(), []
        for samples in reader.read(number, (), tally):
            assert list(samples.sparse) == ["past", "user", "item"], "in the order of the schema"
            mine += told(samples.sparse["past"])
        found += mine
        past, user, *_ = tally.slots.figures()
        assert past.num_samples == user.num_samples == len(mine)
        assert round(past.mean_count * max(1, len(mine))) == sum(map(len, mine))
        shards.close_pass(0, Deadline.after(20))
    shards.close()
    assert found == plain(passes)


def test_a_pass_waits_until_it_is_open_and_ends_where_the_job_ends():
    shards, inner = shards_of(), Blocks([[]])
    reader = HistoryReader(inner, SCHEMA, shards, 20.0)
    found = []
    reading = threading.Thread(target=lambda: found.append(list(reader.read(1, (), PassTally()))))
    reading.start()
    reader.opened(0)
    assert reading.is_alive()
    reader.close()
    reading.join(20)
    assert found == [[]] and inner.closed
    shards.close()


def test_a_history_has_the_rows_of_the_slot_that_it_remembers():
    past, user, item = SCHEMA.sparse
    assert past.group == item.group != user.group and past.sparse.max_len == LAST
    assert [slot.name for slot in SCHEMA.emitted.slots] == ["user", "item", "click"]
    own = Schema.of((SparseSlot(name="past", share="past", history=HISTORY), *ENTRIES[1:]))
    assert len({slot.group for slot in own.sparse}) == 3
    shared = Schema.of((ENTRIES[0], SparseSlot(names=("user", "item"), share="all"), ENTRIES[2]))
    assert len({slot.group for slot in shared.sparse}) == 1


@pytest.mark.parametrize("more", [{"max_len": 2}, {"weighted": True}, {"padding": 0}, {"keep": "tail"}])
def test_a_history_has_no_settings_of_slots_that_are_emitted(more):
    with pytest.raises(ValueError, match=r"leave max_len out|a history has no"):
        SparseSlot(name="past", history=HISTORY, **more)


def test_the_time_that_a_pass_waits_for_the_questions_of_others_is_counted_apart(monkeypatch):
    """It is no part of a rank's speed."""
    at_s = iter([10.0, 12.5, 20.0, 21.0, 30.0, 34.0])
    monkeypatch.setattr(pass_gate.time, "monotonic", lambda: next(at_s))
    gated = GatedReader(Blocks([]))
    gated.opened(1)
    for _ in range(2):
        with gated.asking():
            pass
    assert gated.asked_s() == 3.5
    gated.opened(2)
    with gated.asking():
        pass
    assert gated.asked_s() == 4.0


def test_only_questions_that_are_asked_while_a_pass_is_learnt_are_taken_from_its_time():
    """With `metrics.infer_first` a pass is predicted, and its questions asked, before it is learnt."""
    now_s, asked_s = [100.0], [0.0]
    clock = StepClock(120.0, lambda: now_s[0])
    clock.asked_s = lambda: asked_s[0]
    for before_s, within_s, wanted_s in ((3.0, 0.0, 4.0), (0.0, 3.0, 1.0), (3.0, 5.0, 0.0)):
        asked_s[0] = before_s
        clock.pass_begins()
        asked_s[0], now_s[0] = asked_s[0] + within_s, now_s[0] + 4
        clock.pass_ends()
        assert clock.pass_s == wanted_s
