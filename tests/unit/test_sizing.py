"""The figures of `headrace size`: growth of ids, counts of a sample, and the arithmetic of a job's size."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import validate
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.dataset.stream.source import Partition
from headrace.pserver.admission import Admission
from headrace.pserver.admission_entries import AdmissionEntry, CountEntry, ProbabilityEntry, ShowClickEntry
from headrace.pserver.config import TableSection
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.table_rows import RowArrays
from headrace.service.planning import stream_facts
from headrace.service.planning.job_size import (
    Demand,
    format_size,
    how_sure,
    in_bytes,
    size_job,
    size_message,
    table_needs,
    width_of,
)
from headrace.service.planning.stream_facts import (
    MOST_DOUBT,
    IdCurve,
    SlotIds,
    StreamFacts,
    admitted,
    backtest,
    factor_of_doubt,
    sample_for,
)
from headrace.service.planning.training_facts import ProcessCost, TrainingFacts
from headrace.service.spec.job import JobFile

EVENTS = tuple(int(256 * 1.5**n) for n in range(12))


def heaps(k, b):
    return IdCurve(EVENTS, tuple(k * n**b for n in EVENTS))


# -- growth -----------------------------------------------------------------------------------------------------------


@given(st.floats(0.5, 50), st.floats(0.05, 1.0), st.floats(1, 1e5))
def test_ids_that_follow_the_law_are_continued_by_it(k, b, times):
    curve, events = heaps(k, b), EVENTS[-1] * times
    assert curve.exponent() == pytest.approx(b, abs=1e-6)
    assert curve.at(events) == pytest.approx(k * events**b, rel=1e-4)
    assert backtest([curve]) == pytest.approx(1)


def test_ids_that_are_complete_stay_so_and_are_read_off_inside_the_sample():
    curve = IdCurve((10, 100, 1000, 4000), (5.0, 24.0, 24.0, 24.0))
    assert (curve.at(1e9), curve.at(55), curve.at(0)) == (24, pytest.approx(14.5), 0)
    assert IdCurve((10, 100), (0.0, 0.0)).at(1e9) == 0


def test_the_doubt_grows_with_the_distance_and_with_what_the_test_was_wrong_by():
    assert factor_of_doubt(0.8, 1000, 900) == 1
    assert factor_of_doubt(0.8, 1000, 4000) == pytest.approx(1.25)
    assert factor_of_doubt(1.25, 1000, 16_000) == pytest.approx(1.25**2)
    assert factor_of_doubt(None, 1000, 4000) == factor_of_doubt(9.0, 1, 1e300) == float("inf")
    assert factor_of_doubt(1.0, 1000, 4000) > 1.1
    saturating = IdCurve(EVENTS, tuple(1000 * (1 - np.exp(-n / 2000)) for n in EVENTS))
    assert backtest([saturating]) > 1.05  # the law promises too many where ids run out, and the test says so


# -- counts of a sample -----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=20), min_size=1, max_size=6), st.integers(1, 4))
def test_ids_are_counted_block_by_block_as_a_dictionary_would(blocks, n):
    counter = stream_facts._Counter("t", "s", [CountEntry(kind="count", n=n)], None, ())
    seen, expected = Counter(), []
    for number, block in enumerate(blocks, 1):
        counter.pending.append(np.array(block, np.uint64))
        counter.count(number)
        seen.update(block)
        expected.append(float(sum(count >= n for count in seen.values())))
    assert counter.ids().curve == IdCurve(tuple(range(1, len(blocks) + 1)), tuple(expected))
    assert dict(zip(counter.keys_U.tolist(), counter.count_U.tolist(), strict=True)) == dict(seen)


@given(st.lists(st.tuples(*[st.lists(st.integers(0, 3), max_size=2)] * 2, st.booleans()), min_size=1, max_size=12))
def test_keys_of_histories_and_counters_are_counted(rows):
    window = {"windows": ["1h"], "what": ["shows"]}
    slots = [
        {"names": ["user", "item"]},
        {"name": "seen", "history": {"key": "user", "of": "item", "last": 5, "when": "click"}},
        {"name": "hot", "kind": "dense", "size": 1, "counters": {"key": "item", **window}},
        {"name": "both", "kind": "dense", "size": 1, "counters": {"key": ["user", "item"], **window}},
        {"name": "click", "kind": "meta"},
    ]
    schema = Schema.of(validate(SlotsSpec, {"slots": slots}).slots)
    columns = {
        name: Ragged(
            np.array([sign for row in rows for sign in row[place]], np.uint64),
            np.cumsum([0, *(len(row[place]) for row in rows)]),
        )
        for place, name in enumerate(("user", "item"))
    }
    clicks = np.array([row[2] for row in rows], np.float32)
    samples = Samples(columns, {}, {"click": clicks}, np.arange(len(rows)), np.zeros(len(rows)))
    counters = stream_facts._counters(schema, {"default": TableSection()})
    stream_facts._add(counters, schema, samples)
    stream_facts._count(counters, len(rows))
    firsts = [(user[0], item[0]) for user, item, _ in rows if user and item]
    for table, keys in {
        "history-seen": {user[0] for user, _, click in rows if user and click},
        "counters-hot": {item[0] for _, item, _ in rows if item},
        "counters-both": set(firsts),
    }.items():
        assert counters[table, -1].ids().curve.ids == (len(keys),), table


class Clicked(AdmissionEntry):
    needs_clicks = True
    kind: str = "clicked"


def test_an_entry_that_needs_clicks_is_named_as_not_modelled():
    table = TableSection(admission=(ShowClickEntry(kind="show_click", score=2), CountEntry(kind="count", n=2)))
    outside = TableSection.model_construct(**{**dict(table), "admission": (Clicked(),)})
    schema = Schema.of(validate(SlotsSpec, {"slots": [{"name": "user"}, {"name": "ad", "table": "ads"}]}).slots)
    found = stream_facts._counters(schema, {"default": table, "ads": outside})
    assert [each.unmodelled for each in found.values()] == [("show_click",), ("clicked",)]


def test_every_entry_of_admission_must_admit():
    """A key is drawn once, however often it is seen, and all entries use the same draw."""
    entries = [CountEntry(kind="count", n=2), *(ProbabilityEntry(kind="probability", p=p) for p in (0.75, 0.5))]
    assert admitted(np.array([1, 2, 3]), entries) == 0.5 + 0.5


def test_the_share_of_admitted_keys_is_the_one_that_a_table_admits():
    entries = [ProbabilityEntry(kind="probability", p=0.25)]
    keys = np.arange(1, 4001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    table = Admission.of(entries, nonclk_coeff=0.1, click_coeff=1.0, seed=7, buckets=(0, 4096))
    once = np.ones(len(keys), np.float32)
    has_row = np.zeros(len(keys), np.bool_)
    for _ in range(5):
        has_row |= table.admit(keys, once, once, 0)
    assert has_row.sum() == pytest.approx(admitted(np.full(len(keys), 5), entries), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3000)), min_size=1, max_size=4), st.integers(1, 6000))
def test_blocks_are_the_first_positions_of_all_partitions_once(ranges, limit):
    partitions = [
        Partition(f"p{number}", number, begin, begin, begin + length, final=True)
        for number, (begin, length) in enumerate(ranges)
    ]
    blocks = list(stream_facts._blocks(partitions, limit))
    seen = [(each.partition, at) for block in blocks for each in block for at in range(each.begin, each.end)]
    assert len(seen) == len(set(seen)) == min(limit, sum(length for _, length in ranges))
    assert set(seen) <= {(each.name, at) for each in partitions for at in range(each.begin, each.end)}


# -- arithmetic -------------------------------------------------------------------------------------------------------


def job(**table):
    return JobFile.model_validate(
        {
            "name": "sized",
            "sources": {"s": {"kind": "simulated", "rate": 10.0}},
            "pipe": {"command": ["cat"]},
            "slots": [{"names": ["user", "item"]}, {"name": "click", "kind": "meta"}],
            "tasks": [{"name": "ctr", "label": "click"}],
            "tables": {"default": {"dim": 8, **table}},
            "model": {"name": "deepfm"},
            "train": {"batch_size": 100},
            "store": {"path": "store"},
        }
    )


def slot(name, curve, days=None):
    return SlotIds("default", name, curve, days, ())


STREAM = StreamFacts(EVENTS[-1], 2 * EVENTS[-1], 0, 1e-5, (slot("user", heaps(3, 0.5)), slot("item", heaps(1, 0.25))))
TRAINING = TrainingFacts(
    events=1000,
    samples=2000,
    passes=10,
    costs={
        "trainer-0": ProcessCost(2e-5, 1 << 29),
        "shard-0": ProcessCost(5e-6, 1 << 28),
        "pipe": ProcessCost(0.0, 1 << 26),
    },
    with_start=False,
    rows={"default": 100},
    row_memory_bytes={"default": 10_000},
    sent_bytes=500.0,
    received_bytes=300.0,
    dense_parameters=10_000,
    commit_row_bytes={"default": 70.0},
    commit_other_bytes=1_000,
    log_pass_bytes=600.0,
)
DEMAND = Demand(events_a_day=86_400e3, days=10, peak=1)


def test_cores_and_bytes_are_in_proportion_to_events_and_workers_suffice_for_them():
    size = size_job(job(), STREAM, TRAINING, DEMAND)
    assert (size.events_a_second, size.samples_a_second) == (1000, 2000)
    assert size.cores == pytest.approx({"trainer-0": 0.04, "shard-0": 0.01, "pipe": 0.02})
    assert (size.trainers, size.shards, size.steps_a_second) == (1, 1, 20)
    assert (size.push_bytes_step, size.pull_bytes_step, size.dense_bytes_step) == (50_000, 30_000, 0)
    assert size.shard_bytes_second == size.trainer_bytes_second == 80_000 * 20
    many = size_job(job(), STREAM, TRAINING, replace(DEMAND, events_a_day=100 * DEMAND.events_a_day))
    assert many.trainers == 6  # 4 cores, of which each may use 0.7
    assert many.shards == 2
    assert many.dense_bytes_step == pytest.approx(2 * 5 / 6 * 40_000)
    assert many.shard_bytes_second == pytest.approx(100 * size.shard_bytes_second / 2)
    assert "trainers need 4.0 cores" in " ".join(many.reasons)


def test_rows_follow_the_law_or_are_as_many_as_given_and_ageing_bounds_them():
    events = DEMAND.events_a_day * DEMAND.days
    (table,) = table_needs(job(), STREAM, TRAINING, DEMAND, shards=1)
    assert table.rows == pytest.approx(3 * events**0.5 + events**0.25, rel=1e-4)
    assert table.commit_bytes == 70 * table.rows
    (given_ids,) = table_needs(job(), STREAM, TRAINING, replace(DEMAND, ids=5e6), shards=1)
    assert given_ids.low == given_ids.rows == given_ids.high == pytest.approx(5e6)
    aged = replace(STREAM, slots=(slot("user", heaps(3, 0.5), days=1), slot("item", heaps(1, 0.25))))
    (less,) = table_needs(job(), aged, TRAINING, DEMAND, shards=1)
    assert less.rows == pytest.approx(3 * (2 * DEMAND.events_a_day) ** 0.5 + events**0.25, rel=1e-4)
    assert any("last 2 days" in note for note in less.notes)


@given(
    st.integers(1, 5000), st.floats(1, 20), st.floats(0.01, 1.0), st.floats(0.5, 30.0), st.floats(1, 1e12),
    st.floats(1, 3000),
)  # fmt: skip
def test_bounds_are_possible_and_hold_the_rows(sample, per_event, new, exponent, events, days):
    points = sorted({max(1, sample // 4), max(1, sample // 2), sample})
    values = int(sample * per_event) + 1
    ids = tuple(new * values * (n / sample) ** min(1.0, exponent) for n in points)
    stream = StreamFacts(sample, sample, 0, 0.0, (replace(slot("user", IdCurve(tuple(points), ids)), values=values),))
    demand = Demand(events_a_day=events, days=days)
    (need,) = table_needs(job(), stream, TRAINING, demand, shards=1)
    most = ids[-1] + values / sample * max(0.0, events * days - sample)
    assert min(ids[-1], need.rows) <= need.low * (1 + 1e-9) and need.low <= need.rows * (1 + 1e-9)
    assert need.rows <= need.high * (1 + 1e-9) and need.high <= max(most, need.rows) * (1 + 1e-9)


def test_a_sample_that_is_too_small_is_told_with_the_one_that_would_do():
    short = IdCurve((256, 384, 576, 864, 1000), (200.0, 290.0, 400.0, 600.0, 690.0))
    stream = StreamFacts(1000, 1000, 0, 0.0, (replace(slot("user", short), values=3000),))
    size = size_job(job(), stream, TRAINING, DEMAND)
    text = "\n".join(format_size(size))
    assert size.backtest is None and "sample is too small" in text and "give a larger --sample, or --ids" in text
    assert (size.tables[0].low, size.tables[0].high) == (690, pytest.approx(690 + 3 * (864e6 - 1000)))
    far = size_job(job(), replace(STREAM, slots=(slot("user", heaps(3, 0.5)),)), TRAINING, DEMAND)
    assert "too small" not in "\n".join(format_size(far)), "its test was right"
    unknown = size_job(job(), replace(stream, slots=(slot("user", short),)), TRAINING, DEMAND)
    assert "?" in list(format_size(unknown))[3] and "Infinity" not in json.dumps(size_message(unknown, TRAINING))
    for ratio in (2.0, 0.4, 1.0):
        needed = sample_for(ratio, 1e12)
        assert factor_of_doubt(ratio, needed, 1e12) == pytest.approx(MOST_DOUBT)
    wrong = replace(size, backtest=1.5)
    assert f"--sample of {sample_for(1.5, 864e6):,.0f} or more" in how_sure(wrong)
    assert "give a larger --sample, or" in how_sure(replace(size, backtest=5.0)), "more than can be measured"


def test_more_rows_than_a_machine_holds_need_shards_and_too_many_are_told():
    size = size_job(job(), STREAM, TRAINING, replace(DEMAND, ids=5e8, machine_bytes=16 << 30))
    assert size.shards == 4
    assert "a shard may have 16 GiB" in size.reasons[0]
    assert size.shard_bytes < (16 << 30) + (1 << 28)
    endless = size_job(job(), STREAM, TRAINING, replace(DEMAND, ids=1e12))
    assert endless.shards == 64
    assert "at most 64" in endless.reasons[0]
    bounded = size_job(job(memory="1GiB"), STREAM, TRAINING, replace(DEMAND, ids=5e8))
    assert bounded.shards == 1
    assert bounded.tables[0].memory_bytes == 1 << 30


@given(st.integers(1, 3000), st.sampled_from([{"dim": 0}, {"dim": 8}, {"dim": 3, "optimizer": {"kind": "adam"}}]))
def test_memory_of_rows_is_that_of_the_arrays(num_rows, section):
    table = TableSection.model_validate(section)
    rows = RowArrays("default", RowSettings.of(table, {}), 1)
    rows.reserve(np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, np.uint16))
    stream = replace(STREAM, slots=(slot("user", IdCurve((1,), (float(num_rows),))),))
    (need,) = table_needs(job(**section), stream, TRAINING, Demand(events_a_day=1, days=1), shards=1)
    assert width_of(table) == rows.width
    assert need.memory_bytes == rows.num_bytes


def test_a_size_is_told_in_words_with_its_reasons():
    size = size_job(job(), STREAM, replace(TRAINING, with_start=True), DEMAND)
    text = "\n".join(format_size(size))
    assert "proposal   1 trainer, 1 shard" in text
    assert "Heaps' law" in text and "1.00 times the sample's rows" in text
    assert "give a larger --sample" in text
    assert [in_bytes(n) for n in (0, 1023, 1536, 250 << 30)] == ["0 B", "1,023 B", "1.5 KiB", "250 GiB"]
