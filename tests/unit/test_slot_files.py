"""Histories and counters in the files of exports: rows come back bit for bit, and deltas replay to the base."""

import runpy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import validate
from headrace.dataset.spec.counters import CountersSection
from headrace.pserver.protocol.histories import HistoryAnswers
from headrace.pserver.rows import counter_kernels
from headrace.trainer.exports.destination import ExportFolder, ExportUnusable
from headrace.trainer.exports.reader import ReadableExport
from headrace.trainer.exports.slot_files import (
    HISTORY,
    Histories,
    replay,
    rows_of_sub_windows,
    served_schema,
    sub_windows,
    whole_keys,
)
from headrace.trainer.features.counter_columns import counter_column
from headrace.trainer.rank0.key_memories import counts_of_row

SERVE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "deploy" / "examples" / "serving" / "serve.py"))

WINDOWS_S = (60, 0, 3600, -600)
TIMES = st.one_of(st.integers(-1, 500), st.sampled_from([90_000, 200_000, 400_000, (1 << 32) - 1]))
SAMPLES = st.lists(st.tuples(st.integers(0, 3), TIMES, st.integers(1, 3), st.booleans()), max_size=30)


def counted(samples):
    """Rows of four keys after some samples; those without a sample are left out."""
    number_Q, time_s_Q, show_Q = (np.array([each[at] for each in samples], np.int64) for at in range(3))
    click_Q = np.array([each[2] * each[3] for each in samples], np.int64)
    word_UC = np.zeros((4, counter_kernels.width_of(WINDOWS_S)), np.int64)
    answer_QV = np.empty((len(samples), 2 * len(WINDOWS_S)), np.int64)
    window_s_W = np.array(WINDOWS_S, np.int64)
    order_Q = np.arange(len(samples))
    counter_kernels.count(number_Q, order_Q, time_s_Q, show_Q, click_Q, window_s_W, word_UC, answer_QV)
    return counter_kernels.packed(word_UC[np.unique(number_Q)])


@settings(max_examples=100)
@given(SAMPLES)
def test_sub_windows_are_all_there_is_of_counters(samples):
    rows_UD = counted(samples)
    row_N, counts = sub_windows(rows_UD, WINDOWS_S)
    assert rows_of_sub_windows(row_N, counts, WINDOWS_S).tobytes() == rows_UD.tobytes()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(0, 61, "of no window"), (1, 5, "of another length"), (2, 9, "of another length"), (1, -120, "from before it")],
)
def test_sub_windows_that_are_none_are_refused(place, value, said):
    row_N, counts = sub_windows(counted([(0, 100, 1, True), (0, 90, 1, True)]), WINDOWS_S)
    counts[place] = counts[place].copy()
    counts[place][0] = value
    with pytest.raises(ValueError, match=said):
        rows_of_sub_windows(row_N, counts, WINDOWS_S)


@pytest.mark.parametrize(("place", "value"), [(3, -1), (3, 1 << 32), (4, -1), (4, 1 << 40), (1, 60 << 40)])
def test_sub_windows_that_no_row_holds_are_refused(place, value):
    row_N, counts = sub_windows(counted([(0, 100, 1, True)]), WINDOWS_S)
    counts[place] = np.where(counts[0] == 60, value, counts[place])
    with pytest.raises(ValueError, match="above what a row holds"):
        rows_of_sub_windows(row_N, counts, WINDOWS_S)


KEYS = pa.array([1, 2], pa.uint64())
SIGNS = pa.array([[1], [2, 3]], HISTORY.type)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"history": KEYS}, "cannot be read"),
        ({"history": pa.array([["a"], []])}, "cannot be read"),
        ({"history": pa.array([[-1], []], pa.list_(pa.int64()))}, "not in range"),
        ({"history": pa.array([None, [1]], HISTORY.type)}, "null values"),
        ({"history": pa.array([[None], [1]], pa.list_(pa.uint64()))}, "has nulls"),
        ({"key": pa.array([1.5, 2])}, "truncated"),
        ({"key": pa.array(["a", "b"])}, "cannot be read"),
        ({"history": pa.array([[1, 2, 3, 4], []], HISTORY.type)}, "model.json says 3 at most"),
    ],
)
def test_histories_of_other_types_are_refused(tmp_path, columns, said):
    memory = Histories(slot="s", table="history-s", key="s", group=0, of="s", last=3)
    place = ExportFolder(str(tmp_path), tmp_path / "scratch")
    path = "histories-s-0.parquet"
    good = {"slot": pa.array(["a", "a"]), "sign": KEYS, "key": KEYS, "history": SIGNS}
    pq.write_table(pa.table({**good, "history": SIGNS}), tmp_path / path)
    export = ReadableExport(place, {"name": "x", "tables": {}, "files": {path: {}}})
    assert sum(len(chunk) for chunk in replay([export], memory)) == 2
    pq.write_table(pa.table(good | columns), tmp_path / path)
    with pytest.raises(ExportUnusable, match=said):
        list(replay([export], memory))


@pytest.mark.parametrize("key", ["absent", "filled"])
def test_a_history_of_a_key_that_no_request_has_is_refused(key):
    plain = {"kind": "sparse", "name": "a", "padding": None, "max_len": None, "keep": "head", "group": 0}
    filled = {**plain, "name": "filled", "group": 1, "history": {"key": key, "of": "a", "last": 3}}
    with pytest.raises(ExportUnusable, match=f"'{key}' is the key of a slot that the job fills"):
        served_schema({"slots": [plain, filled]})


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=12), st.data())
def test_batches_are_cut_between_keys(runs, data):
    keys = [key for key, (_, length) in enumerate(runs) for _ in range(length)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=4)))
    table = pa.record_batch({"key": pa.array(keys, pa.uint64())})
    parts = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, len(keys)], strict=True) if b > a]
    found = [batch["key"].to_pylist() for batch in whole_keys(iter(parts))]
    assert [key for batch in found for key in batch] == keys
    assert all(set(one).isdisjoint(other) for at, one in enumerate(found) for other in found[:at])


@settings(max_examples=100)
@given(SAMPLES, TIMES)
def test_the_example_of_a_server_counts_as_the_job_does(samples, now_s):
    counters = {"windows": ["60", "all", "3600"], "half_lives": [600.0], "what": ["shows", "clicks", "ctr"]}
    counters |= {"prior": 0.05, "prior_weight": 20.0}
    rows_UD = counted([(0, 7, 1, False), *samples])[:1]
    number_Q, no_Q, now_s = np.zeros(1, np.int64), np.zeros(1, np.int64), max(now_s, 0)
    count_QV = np.empty((1, 2 * len(WINDOWS_S)), np.int64)
    word_UC, window_s_W = counter_kernels.unpacked(rows_UD), np.array(WINDOWS_S, np.int64)
    counter_kernels.count(number_Q, no_Q, np.full(1, now_s), no_Q, no_Q, window_s_W, word_UC, count_QV)
    answers = HistoryAnswers(np.array([0, 8]), count_QV[0].astype(np.uint64))
    section = validate(CountersSection, {"key": "a", "click": "clicked", **counters, "windows": ["60s", "all", "1h"]})
    expected = counter_column(number_Q, answers, section)[0]
    sub_windows_N = list(zip(*(each.tolist() for each in sub_windows(rows_UD, WINDOWS_S)[1]), strict=True))
    assert SERVE["counts_of"](counters, sub_windows_N, now_s) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-7)


def test_the_counts_of_a_key_are_told_by_window_and_half_life():
    section = validate(
        CountersSection, {"key": "a", "click": "c", "windows": ["60s", "all", "1h"], "half_lives": ["10m"]}
    )
    rows_UD = counted([(0, 100, 2, True), (0, 1300, 1, False)])
    told = {"1m": [1, 0], "all": [3, 2], "1h": [3, 2], "half-life 10m": [1.5, 0.5]}
    assert counts_of_row(rows_UD, section) == told
