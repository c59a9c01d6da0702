"""The benches of tables that live still run: a small round of each tells every figure."""

import math
from argparse import Namespace

import numpy as np

from tests.bench import admission, aging, exports, filled, search


def told(figures):
    """Every number, however deep, by its path."""
    found = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= {f"{name}/{path}": number for path, number in told(value).items()}
        else:
            found[name] = value
    return found


def test_a_filled_table_holds_the_rows_asked_for_and_tells_what_changed_after(tmp_path):
    base, changed = filled.store_of(tmp_path / "store", 3000, [np.arange(100)])
    assert [(each.version, each.num_rows) for each in (base, changed)] == [(1, 3000), (2, 3000)]
    increments = changed.shards[0].tables[filled.TABLE].changes
    assert [each.changed for each in increments] == [3000, 100]


def test_exports_are_timed_by_type_and_as_deltas(tmp_path):
    found = exports.alone(tmp_path, 12_000)
    assert found["delta"]["rows"] == exports.CHANGED
    bases = [found[f"base, {dtype}"] for dtype in exports.DTYPES]
    assert [base["rows"] for base in bases] == [12_000] * 3
    assert bases[0]["mb"] > bases[1]["mb"] > bases[2]["mb"] > found["delta"]["mb"] * 0.1
    assert all(each["s"] > 0 for each in found.values())


def test_a_turn_takes_samples_to_come_evenly_between_closes():
    turn = exports.Turn(begin_s=1.0, end_s=3.0, exports_s=[2.0])
    assert math.isclose(turn.rate([(0.0, 0), (2.0, 200), (4.0, 1000)]), 250.0)


def test_what_a_shrink_takes_is_what_was_last_seen_on_day_0(tmp_path):
    for memory, stepping in ((None, True), (32 << 20, False)):
        found = told(aging.measure(tmp_path, 100_000, memory, stepping=stepping))
        assert found["gone"] == 30_000
        assert all(math.isfinite(value) for value in found.values())


def test_admission_is_timed_of_every_kind_of_entry():
    found = told(admission.figures(steps=3))
    assert len(found) == len(admission.ENTRIES) * 9
    assert all(math.isfinite(value) for value in found.values())


def test_the_bench_of_search_tells_every_index():
    lines = [*search.measure(3000, Namespace(dim=8, k=10, rounds=1, graphs=False))]
    assert lines[0].startswith("| Headrace, exact |") and " | 1.000 | " in lines[0]
