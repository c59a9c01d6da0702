"""Gates: what passes, what does not, and what is said then."""

import json
import math
from dataclasses import replace

import pytest

from headrace.trainer.exports.gates import GateFacts, check_gates
from headrace.trainer.exports.scores import Score
from headrace.trainer.guard_config import GatesSection

FOUND = {"index_recall": 0.4, "popular_recall": 0.45}
WINDOW = {"click": {"auc": 0.71, "calibration": 1.02, **FOUND}, "dwell": {"auc": None, "calibration": 0.9}}


def failures(facts, **section):
    return [gate.why for gate in check_gates(GatesSection(**section), facts).values() if not gate.passed]


def test_nothing_is_asked_for_but_finite_weights_and_golden_predictions():
    assert list(check_gates(GatesSection(), GateFacts())) == ["finite"]
    assert failures(GateFacts()) == []
    assert failures(GateFacts(not_finite=3)) == ["3 exported weights are no finite numbers"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"min_auc": 0.7}, None),
        ({"min_auc": 0.72}, "auc of the window is below 0.72: 0.71 (click)"),
        ({"min_recall": 0.4}, None),
        ({"min_recall": 0.5}, "index_recall of the window is below 0.5: 0.4 (click)"),
        ({"beats_popular": True}, "index_recall of the window, 0.4, is below that of the most clicked items, 0.45"),
        ({"calibration": (0.8, 1.1)}, None),
        ({"calibration": (0.95, 1.1)}, "calibration of the window is not within 0.95 and 1.1: 0.9 (dwell)"),
        ({"min_rows": 1000}, None),
        ({"min_rows": 1001}, "1,000 rows are fewer than 1,001"),
        ({"max_row_change": 0.25}, None),
        ({"max_row_change": 0.2}, "rows went from 800 to 1,000: by more than 0.2 of them"),
        ({"max_clicks_unmatched": 0.02}, None),
        ({"max_clicks_unmatched": 0.01}, "1.50% of recent clicks found no impression, more than 0.01 of them"),
        ({"max_norm": 0.5}, None),
        ({"max_norm": 0.1}, "root mean square of the weights of users is above 0.1"),
    ],
)
def test_each_gate_compares_with_its_limit(section, words):
    norms = {"items": 0.05, "users": 0.5}
    facts = GateFacts(window=WINDOW, model_rows=1000, current_rows=800, norms=norms, clicks_unmatched=0.015)
    assert failures(facts, **section) == ([] if words is None else [words])


def test_a_window_without_the_measure_cannot_be_told_and_does_not_pass():
    assert failures(GateFacts(), min_auc=0.5) == ["auc of the window: no task has one yet"]
    assert failures(GateFacts(), beats_popular=True) == ["index_recall of the window: the job has none yet"]
    better = GateFacts(window={"click": {"index_recall": 0.45, "popular_recall": 0.45}})
    assert failures(better, beats_popular=True) == []


def test_the_first_export_has_nothing_to_differ_from():
    assert failures(GateFacts(model_rows=5), max_row_change=0.1) == []


def test_a_norm_that_is_no_number_does_not_pass():
    assert failures(GateFacts(norms={"t": math.nan}), max_norm=1.0)


def test_golden_predictions_are_asked_for_where_there_are_any():
    assert failures(GateFacts(golden=(False, "predictions differ by 1"))) == ["golden: predictions differ by 1"]
    assert failures(GateFacts(golden=(False, "predictions differ by 1")), golden=False) == []
    assert failures(GateFacts(golden=(True, ""))) == []


SCORE = Score(version=5, commit="t1-0000000005-g1", at="", metrics={"tasks": WINDOW})


@pytest.mark.parametrize(
    ("gate", "score", "words"),
    [
        ({"auc_min": 0.7}, SCORE, None),
        ({"auc_min": 0.72}, SCORE, "auc of the evaluator is below 0.72: 0.71 (click)"),
        ({"calibration": (0.8, 1.1), "auc_min": 0.5}, SCORE, None),
        ({"calibration": (0.95, 1.1), "auc_min": 0.72}, SCORE,
         "auc of the evaluator is below 0.72: 0.71 (click); "
         "calibration of the evaluator is not within 0.95 and 1.1: 0.9 (dwell)"),
        ({"logloss_max": 0.3}, SCORE, "logloss of the evaluator: no task has one yet"),
        ({"auc_min": 0.5, "wait": 2.5}, None, "the evaluator has not scored this version within 2.5 s"),
        ({"auc_min": 0.5}, replace(SCORE, error="no label"), "the evaluator cannot score this version: no label"),
    ],
)  # fmt: skip
def test_a_score_of_the_evaluator_must_be_there_and_within_its_limits(gate, score, words):
    facts = GateFacts(score=score)
    assert failures(facts, evaluator=gate) == ([] if words is None else [words])
    json.dumps([each.message() for each in check_gates(GatesSection(evaluator=gate), facts).values()], allow_nan=False)


def test_a_log_loss_above_its_limit_does_not_pass():
    high = replace(SCORE, metrics={"tasks": {"click": {"logloss": 0.5}}})
    why = "logloss of the evaluator is above 0.4: 0.5 (click)"
    assert failures(GateFacts(score=high), evaluator={"logloss_max": 0.4}) == [why]
    assert failures(GateFacts(score=high), evaluator={"logloss_max": 0.5}) == []
