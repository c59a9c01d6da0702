"""Figures of slots, and the signs that are not kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import (
    NUM_BUCKETS,
    NUM_REGISTERS,
    SlotCounters,
    SlotSum,
    distinct_of,
    observe_signs,
    observe_signs_reference,
)
from headrace.dataset.samples.trim import keep_samples, keep_signs, trim
from headrace.dataset.spec.config import MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema

ROWS = st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=8)


def ragged(rows: list[list[int]], weights: bool = False) -> Ragged:
    values = np.array([value for row in rows for value in row], np.uint64)
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return Ragged(values, offsets, np.arange(len(values), dtype=np.float32) if weights else None)


def samples_of(rows: list[list[int]], weights: bool = False) -> Samples:
    num = len(rows)
    meta = {"label": np.arange(num, dtype=np.float32)}
    return Samples({"s": ragged(rows, weights)}, {}, meta, np.arange(num), np.full(num, np.nan))


def rows_of(column: Ragged) -> list[list[int]]:
    return [column.values_N[b:e].tolist() for b, e in zip(column.offset_B1[:-1], column.offset_B1[1:], strict=True)]


def schema(**settings) -> Schema:
    return Schema.of([SparseSlot(name="s", **settings), MetaSlot(name="label", kind="meta")])


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=50))
def test_registers_equal_those_of_the_twin(signs):
    ours, twins = np.zeros(NUM_REGISTERS, np.uint8), np.zeros(NUM_REGISTERS, np.uint8)
    our_buckets, twins_buckets = (np.zeros(NUM_BUCKETS, np.int64) for _ in range(2))
    observe_signs(np.array(signs, np.uint64), ours, our_buckets)
    observe_signs_reference(np.array(signs, np.uint64), twins, twins_buckets)
    assert ours.tolist() == twins.tolist()
    assert our_buckets.tolist() == twins_buckets.tolist() and our_buckets.sum() == len(signs)


def test_registers_that_are_full_equal_those_of_the_twin():
    signs = np.arange(1, 30_001, dtype=np.uint64)  # about 15 for each register: most do not change it
    ours, twins = np.zeros(NUM_REGISTERS, np.uint8), np.zeros(NUM_REGISTERS, np.uint8)
    ours[:3] = twins[:3] = 52, 53, 54
    for part in (signs, signs[:100]):
        observe_signs(part, ours, np.zeros(NUM_BUCKETS, np.int64))
        observe_signs_reference(part, twins, np.zeros(NUM_BUCKETS, np.int64))
    assert ours.tolist() == twins.tolist()


@pytest.mark.parametrize("num", [1, 100, 3000, 6000, 30_000, 1_000_000])
def test_distinct_is_right_within_three_standard_errors(num):
    registers = np.zeros(NUM_REGISTERS, np.uint8)
    for _ in range(2):
        observe_signs(np.arange(num, dtype=np.uint64), registers, np.zeros(NUM_BUCKETS, np.int64))
    assert abs(distinct_of(registers) - num) <= max(1.0, 3 * 0.023 * num)


def test_figures_tell_empty_rate_mean_count_and_distinct():
    counters = SlotCounters(schema())
    counters.observe(samples_of([[1, 2], [], [2], [3]]))
    s, label = counters.figures()
    assert (s.name, s.num_samples, s.empty_rate, s.mean_count, round(s.distinct)) == ("s", 4, 0.25, 1.0, 3)
    assert (label.sparse, label.num_samples) == (False, 4)


@given(ROWS, ROWS)
def test_counters_of_two_ranks_merge_to_those_of_all_samples(one, two):
    apart, together = [SlotCounters(schema()) for _ in range(2)], SlotCounters(schema())
    for counters, rows in zip(apart, (one, two), strict=True):
        counters.observe(samples_of(rows))
        together.observe(samples_of(rows))
    apart[0].merge(apart[1])
    assert apart[0].sums_SK.tolist() == together.sums_SK.tolist()
    assert apart[0].registers_SR.tolist() == together.registers_SR.tolist()
    assert apart[0].buckets_SK.tolist() == together.buckets_SK.tolist()


@given(ROWS, st.integers(1, 4), st.sampled_from(["head", "tail"]), st.sampled_from([None, 0, 3]))
def test_trimming_drops_padding_then_cuts_to_length(rows, max_len, keep, padding):
    known = schema(max_len=max_len, keep=keep, padding=padding)
    counters = SlotCounters(known)
    trimmed = trim(samples_of(rows), known, counters)
    kept = [[value for value in row if value != padding] for row in rows]
    cut = [row[:max_len] if keep == "head" else row[-max_len:] for row in kept]
    assert rows_of(trimmed.sparse["s"]) == cut
    assert counters.sums_SK[0, SlotSum.PADDING] == sum(map(len, rows)) - sum(map(len, kept))
    assert counters.sums_SK[0, SlotSum.CUT] == sum(map(len, kept)) - sum(map(len, cut))


@given(ROWS, st.data())
def test_weights_go_with_their_signs(rows, data):
    column = ragged(rows, weights=True)
    kept = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(column.values_N), max_size=len(column.values_N))), bool
    )
    trimmed = keep_signs(column, kept)
    assert trimmed.weights_N is not None
    assert trimmed.weights_N.tolist() == np.arange(len(kept), dtype=np.float32)[kept].tolist()
    assert trimmed.values_N.tolist() == column.values_N[kept].tolist()


@given(ROWS, st.data())
def test_samples_are_kept_whole(rows, data):
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), bool)
    left = keep_samples(samples_of(rows, weights=True), kept)
    assert rows_of(left.sparse["s"]) == [row for row, good in zip(rows, kept, strict=True) if good]
    assert left.meta["label"].tolist() == left.event_B.tolist() == np.flatnonzero(kept).tolist()
