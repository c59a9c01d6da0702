"""From the events of a pass to samples with their labels."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.spec.config import MetaSlot, SparseSlot
from headrace.dataset.spec.join_section import JoinSection, LearnAt
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.deadline import Deadline
from headrace.pserver.config import ShardProcess
from headrace.pserver.rows.join_kernels import join_reference
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.features.join_reader import JoinReader, too_long_text
from headrace.trainer.spec.join_tables import join_tables, windows_of
from headrace.trainer.train.losses import fake_negative_weights

SCHEMA = Schema.of(
    (
        SparseSlot(name="signs"),
        MetaSlot(name="click", kind="meta"),
        MetaSlot(name="key", kind="meta", type="string"),
        MetaSlot(name="weight", kind="meta"),
    )
)
SOURCES = SourceSet.of(FilesSource(kind="files", paths=["x"]))
JOIN = JoinSection(label="click", key="key", window=10.0, max_sample_bytes=64)
EVENTS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.one_of(st.integers(0, 12), st.just(float("nan"))),
            st.sampled_from([0.0, float("nan"), 1.0]),
            st.lists(st.integers(0, 9), max_size=6),
        ),
        max_size=2,
    ),
    max_size=8,
)
"""Events of (key, time in the pass, label, signs); more than five are too long."""


def block_of(events, begin_s):
    samples = [sample for event in events for sample in event]
    signs = [each for *_, each in samples]
    offsets = np.array([0, *np.cumsum([len(each) for each in signs])], np.int64)
    keys = np.empty(len(samples), object)
    keys[:] = [key for key, *_ in samples]
    return Samples(
        {"signs": Ragged(np.array([sign for each in signs for sign in each], np.uint64), offsets)},
        {},
        {
            "click": np.array([label for _, _, label, _ in samples], np.float32),
            "key": keys,
            "weight": np.full(len(samples), 2.0, np.float32),
        },
        np.repeat(np.arange(len(events)), [len(event) for event in events]),
        np.array([begin_s + at for _, at, _, _ in samples], np.float64),
    )


class Blocks:
    """A PassReader of two blocks a pass, each with its own numbers of events."""

    def __init__(self, passes, advance_s=6.0):
        self._passes, self.rejected, self._advance_s = passes, [], advance_s

    def read(self, pass_number, segments, tally):
        tally.slots = SlotCounters(SCHEMA)
        events = self._passes[pass_number - 1]
        for part in (events[:3], events[3:]):
            yield block_of(part, self._advance_s * pass_number)

    def partitions(self):
        return ["x", "x"]

    def reject(self, pass_number, samples, tally):
        self.rejected.append(samples)
        for block, event in {(each.block, each.event) for each in samples}:
            tally.reject(next(each.reason for each in samples if (each.block, each.event) == (block, event)))

    def close(self):
        pass


def run(passes, join, blocks=None):
    """By pass: the samples as (signs, label, weight, time, event), and the tally."""
    shards = EmbeddedShards(ShardProcess.alone(join_tables(join), 1, joins=windows_of(join)))
    blocks = blocks or Blocks(passes)
    reader, found = JoinReader(blocks, join, SCHEMA, shards, 20.0, 5, "weight", SOURCES), []
    for number in range(1, len(passes) + 1):
        shards.open_pass(number, Deadline.after(20))
        reader.opened(number)
        tally = PassTally()
        mine = [sample for block in reader.read(number, (), tally) for sample in told(block)]
        assert tally.num_samples == len(mine) == next(iter(tally.slots.figures())).num_samples
        found.append((mine, tally))
        shards.close_pass(0, Deadline.after(20))
    shards.close()
    return found


def told(block):
    signs, ends = block.sparse["signs"].values_N.tolist(), block.sparse["signs"].offset_B1.tolist()
    lists = [tuple(signs[begin:end]) for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    columns = block.meta["click"].tolist(), block.meta["weight"].tolist(), block.time_s_B.tolist()
    return list(zip(lists, *columns, block.event_B.tolist(), strict=True))


def plain(passes, *, at_once=False, holds=False):
    """By pass: the samples as (signs, label, time), and how many are left out."""
    known, found = {}, []
    for number, events in enumerate(passes, 1):
        given, num_long = [], 0
        for key, at, label, signs in (sample for event in events for sample in event):
            clicked = label == 1
            num_long += bool(at == at and not clicked and len(signs) > 5)
            if at == at and (clicked or len(signs) <= 5):
                given.append((key, number << 32 | len(given), 6.0 * number + at, float(clicked), bytes(signs)))
        outcomes, ended, unmatched = join_reference(given, 10.0, known, holds=holds)
        samples = []
        for place, (event, (outcome, at_s, label, data)) in enumerate(zip(given, outcomes, strict=True)):
            if not at_once:
                samples += [(tuple(data), label, at_s) for at, _, at_s, label, data in ended if at == place]
            if outcome == 1 and not holds:
                samples.append((tuple(data), label, at_s))
            elif at_once and event[3] == 0 and outcome in (0, 4):
                samples.append((tuple(event[4]), 0.0, event[2]))
        found.append((samples, num_long, unmatched + sum(each[0] > 1 for each in outcomes)))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=4), st.sampled_from(list(LearnAt)))
def test_every_sample_has_the_label_that_the_log_gives_it(passes, learn):
    found = run(passes, JOIN.model_copy(update={"learn": learn}))
    law = plain(passes, at_once=learn is LearnAt.AT_ONCE, holds=learn is LearnAt.AT_WINDOW_END)
    for (samples, tally), (wanted, num_long, num_out) in zip(found, law, strict=True):
        assert [(signs, label, at_s) for signs, label, _, at_s, _ in samples] == wanted
        events = [event for *_, event in samples]
        assert events == sorted(events) and all(weight == 2.0 for _, _, weight, _, _ in samples)
        assert tally.rejected.get("longer than join.max_sample_bytes", 0) <= num_long
        assert sum(tally.left_out.values()) == num_out


RESHOWN = [
    ("a", 0.0, 0.0, [1]),
    ("b", 500.0, 0.0, [2]),
    ("a", 1000.0, 0.0, [3]),
    ("a", 1010.0, 1.0, []),
    ("z", 5000.0, 0.0, [9]),
]
"""An impression whose window has ended, shown again and clicked."""


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.sampled_from(list(LearnAt)))
def test_the_samples_do_not_depend_on_where_passes_begin_and_end(events, learn):
    events = [[(key, 6 * at, label, signs) for key, at, label, signs in event] for event in events]
    join, found = JOIN.model_copy(update={"learn": learn}), []
    for size in (1, 7, 1000):
        passes = [events[begin : begin + size] for begin in range(0, len(events), size)]
        told = run(passes, join, Blocks(passes, advance_s=0.0))
        left_out = sum((Counter(tally.left_out) for _, tally in told), Counter())
        found.append(([sample[:4] for samples, _ in told for sample in samples], left_out))
    assert found[0] == found[1] == found[2]


def test_an_impression_whose_window_has_ended_does_not_take_a_later_click():
    for size in (1, 2, 1000):
        passes = [[[each] for each in RESHOWN[begin : begin + size]] for begin in range(0, len(RESHOWN), size)]
        samples = [sample for told, _ in run(passes, JOIN, Blocks(passes, advance_s=0.0)) for sample in told]
        assert [(signs, label) for signs, label, *_ in samples] == [((1,), 0.0), ((2,), 0.0), ((3,), 1.0)], size


def test_an_event_that_is_too_far_ahead_ends_no_window_and_is_given_back():
    shown = [[("a", 0.0, 0.0, [1])], [("b", 1.0, 0.0, [2])], [("b", 2e9, 1.0, [])], [("c", 1e9, 0.0, [3])]]
    later = [[("a", 1.0, 1.0, [])], [("c", 14.0, 0.0, [4])], [("d", 14.0, 0.0, [1] * 6), ("d", float("nan"), 0.0, [])]]
    blocks = Blocks([shown, later])
    (first, tally), (second, more) = run([shown, later], JOIN.model_copy(update={"max_ahead": 60.0}), blocks)
    assert first == [] and tally.rejected == {"further ahead than join.max_ahead": 2}
    assert [(each.block, each.event) for each in blocks.rejected[0]] == [(0, 2), (1, 0)]
    assert blocks.rejected[0][0].detail == "its time is 2000000006.000, and the latest possible one in this pass 67.000"
    assert [(signs, label) for signs, label, *_ in second] == [((1,), 1.0), ((2,), 0.0)]
    assert [(each.block, each.event) for each in blocks.rejected[1]] == [(0, 2), (0, 2)]
    assert more.rejected == {"longer than join.max_sample_bytes": 1}, "an event is rejected once"
    said = blocks.rejected[1][0].detail
    assert said.endswith(" bytes, and 64 are set; set join.max_sample_bytes = 256")
    (unbounded, _), _ = run([shown, later], JOIN)
    assert [signs for signs, *_ in unbounded] == [(1,), (2,)], "without the bound one event ends every window"


@pytest.mark.parametrize("learn", list(LearnAt))
def test_a_drawn_share_of_the_negatives_is_kept_with_its_weight(learn):
    shown = [[(f"key {number}", 1.0, 0.0, [number % 5])] for number in range(2000)]
    clicked = [[(f"key {number}", 2.0, 1.0, [])] for number in range(0, 2000, 10)]
    ended = [[("last", 100.0, 0.0, [])]]
    join = JOIN.model_copy(update={"keep_negatives": 0.25, "learn": learn})
    samples = [sample for mine, _ in run([shown, clicked, ended], join) for sample in mine]
    kept = [weight for _, label, weight, _, _ in samples if label == 0]
    assert set(kept) == {8.0} and 0.2 < len(kept) / (2000 if learn is LearnAt.AT_ONCE else 1800) < 0.3
    assert [weight for _, label, weight, _, _ in samples if label == 1] == [2.0] * 200


def test_fake_negative_weights_leave_the_true_probability_where_it_is():
    """The law of the formula: at the true logit the expected gradient over both kinds of samples is 0."""
    logit = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(logit.detach())
    for label, share in ((1.0, p / (1 + p)), (0.0, 1 / (1 + p))):
        label_B = torch.full_like(p, label)
        weight_B = share * fake_negative_weights(logit, label_B)
        torch.nn.functional.binary_cross_entropy_with_logits(logit, label_B, weight_B, reduction="sum").backward()
    assert torch.allclose(logit.grad, torch.zeros_like(p), atol=1e-12)


def test_a_size_is_suggested_that_the_longest_sample_of_a_block_fits():
    assert (
        too_long_text(300, 1025, 256) == "its sample has 300 bytes, and 256 are set; set join.max_sample_bytes = 1280"
    )
    assert too_long_text(300, 1024, 256).endswith("join.max_sample_bytes = 1024")
    assert "at most 16000 may be set: emit fewer" in too_long_text(17_000, 17_000, 1024)
