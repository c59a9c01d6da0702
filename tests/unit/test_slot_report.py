"""`headrace doctor`: what looks wrong with a slot, in words, and the order of slots."""

import json
import re
from dataclasses import replace

import pytest

from headrace.errors import SpecError
from headrace.service.history.slot_report import (
    JobReport,
    SlotDiagnosis,
    SlotOrder,
    SlotRows,
    _slot_of,
    drift_of,
    format_report,
    ranked,
    read_worth,
    signs_of,
)

ROWS = SlotRows(100, 0.1, 6800)
WELL = {
    "drift": 0.02, "coverage": 1.0, "reference_coverage": 1.0, "null_rate": 0.0, "mean_count": 1.0, "distinct": 40,
    "new_rows": 0.01,
}  # fmt: skip
OUTSIDE = {"why": "the mean number of values is above 2; drift is above 0.1", "since": 7, "action": "hold"}
SLOT = SlotDiagnosis("user", 0.02, 1.0, 1.0, 0.0, 1.0, 40, 0.01, 100, 0.1, 6800, 0.25, 0.01, [], None)


def test_a_slot_that_is_well_has_no_sign():
    assert list(signs_of(WELL, None, ROWS, 0.01)) == list(signs_of({}, None, ROWS, None)) == []


@pytest.mark.parametrize(
    ("change", "worth", "share", "words"),
    [
        ({"coverage": 0.4}, None, 0.1, "60% of the samples have no value, and 0% had none before"),
        ({"coverage": 0.01, "reference_coverage": 0.01}, None, 0.1, "only 1.0% of the samples have a value"),
        ({"null_rate": 0.6}, None, 0.1, "60% of its values are padding"),
        ({"new_rows": 0.7}, None, 0.1, "70% of its values make a new row"),
        ({}, -0.001, 0.3, "it costs 30% of all rows and is worth nothing"),
    ],
)
def test_each_sign_says_what_is_seen_and_what_to_do(change, worth, share, words):
    [sign] = signs_of(WELL | change, None, replace(ROWS, share=share), worth)
    assert re.match(words, sign) and (":" in sign or "?" in sign)


def test_drift_is_told_apart_from_trouble_unless_it_breaks_a_bound():
    assert list(signs_of(WELL | {"drift": 0.4}, None, ROWS, None)) == []
    assert drift_of(WELL) is None and drift_of({}) is None
    hour = replace(SLOT, slot="hour", drifted=drift_of(WELL | {"drift": 5.05}))
    *_, none, drift, line = format_report(JobReport("t1-0000000009-g1", True, [SLOT, hour]))
    assert none == "0 signs of trouble at commit t1-0000000009-g1" and drift.startswith("drift, usual for ids of new")
    assert line == "  hour: drift 5.05: its last pass has other values than those before"
    bounded = {"figures": {"hour": {"drift": 5.05}}, "outside": {"hour": OUTSIDE | {"why": "drift is above 0.1"}}}
    found = _slot_of("hour", ROWS, bounded, None, None)
    assert (len(found.signs), found.drifted) == (1, None), "told once"
    assert _slot_of("hour", ROWS, {"figures": bounded["figures"]}, None, None).drifted == hour.drifted


def test_a_slot_of_one_row_tells_nothing():
    assert "one value only" in next(signs_of(WELL, None, SlotRows(1, 0.0, 9), None))


def test_a_bound_that_is_broken_comes_first_and_drift_is_told_once():
    first, second = signs_of(WELL, OUTSIDE, ROWS, None)
    assert first == "the mean number of values is above 2, since version 7; its action is hold"
    assert second.startswith("its values are others than before, drift 0.02, since version 7; its action is hold: ")


def test_slots_are_ranked_by_shift_value_and_cost():
    other, unknown = replace(SLOT, slot="item", drift=0.3, num_bytes=9, worth=-0.1), replace(SLOT, drift=None)
    assert [each.slot for each in ranked([SLOT, other], SlotOrder.SHIFT)] == ["item", "user"]
    assert [each.slot for each in ranked([other, SLOT], SlotOrder.VALUE)] == ["user", "item"]
    assert [each.slot for each in ranked([other, SLOT], SlotOrder.COST)] == ["user", "item"]
    assert ranked([unknown, other], SlotOrder.SHIFT)[0] is other


def test_the_report_in_lines():
    lines = list(format_report(JobReport("t1-0000000009-g1", False, [replace(SLOT, signs=("it is odd",))])))
    cells = ["user", "0.020", "100.0%", "1.00", "40", "1.0%", "100", "6,800", "0.2500", "+0.01000"]
    assert lines[1].split() == cells
    assert "add a section [guards]" in lines[2]
    assert lines[3:] == ["1 sign of trouble at commit t1-0000000009-g1:", "  user: it is odd"]


def test_worth_is_read_of_the_first_task_and_anything_else_refused(tmp_path):
    path = tmp_path / "worth.json"
    lines = [{"task": "ctr", "slot": "user", "auc": 0.02}, {"task": "cvr", "slot": "user", "auc": 0.5}]
    path.write_text(json.dumps(lines))
    assert read_worth(path) == {"user": 0.02}
    for text in ("{", "{}", "[3]"):
        path.write_text(text)
        with pytest.raises(SpecError, match="--worth"):
            read_worth(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_worth(tmp_path / "none")
