"""Metrics that a job names: registered ones by name, and classes of users."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.trainer.own_metrics import check_metric, metrics_of

OWN = """
import numpy as np


class Good:
    name, size = "good", 2

    def add(self, prediction_B, label_B, weight_B, state_W):
        state_W += np.array([len(label_B), int(np.rint(label_B * 1024).sum())])

    def value(self, state_W):
        return state_W[1] / 1024 / state_W[0] if state_W[0] else None


class Loud(Good):
    name = "LOUD"


class Known(Good):
    name = "auc"


class Wide(Good):
    name, size = "wide", 65_537


class Mute:
    name, size = "mute", 1

    def value(self, state_W):
        return None
"""


def test_metrics_of_ones_own_are_built_from_the_folder_of_the_spec_or_refused_with_their_key(tmp_path):
    (tmp_path / "own_measures.py").write_text(OWN)
    (good,) = metrics_of(["own_measures:Good"], tmp_path)
    assert (good.name, good.size) == ("good", 2)
    for name, why in (
        ("Loud", "its `name` is 'LOUD'; use small letters"),
        ("Known", "there is a measure 'auc' already"),
        ("Wide", "its `size` is 65537; a whole number from 1 to 65,536"),
        ("Mute", "has no method 'add'"),
        ("God", "has no class 'God'; did you mean 'Good'"),
    ):
        with pytest.raises(SpecError, match=rf"^metrics.own.1: .*{why}"):
            metrics_of(["own_measures:Good", f"own_measures:{name}"], tmp_path)
    with pytest.raises(SpecError, match=r"^metrics.own.0: no module 'no_measures'"):
        metrics_of(["no_measures:Good"], tmp_path)


def test_a_name_that_no_package_has_registered_is_refused_by_the_check_and_by_the_trainer(tmp_path):
    for refused in (lambda: check_metric("good", tmp_path, "metrics.own.0"), lambda: metrics_of(["good"], tmp_path)):
        with pytest.raises(SpecError, match=r"^metrics.own.0: no metric 'good'; .*package.module:Class"):
            refused()


def calibration_error_reference(samples, num_bins):
    """The plain twin of ExpectedCalibrationError: a dictionary of intervals, in floats."""
    errors, weights = {}, 0.0
    for prediction, label, weight in samples:
        number = min(int(prediction * num_bins), num_bins - 1)
        errors[number] = errors.get(number, 0.0) + weight * (prediction - label)
        weights += weight
    return sum(map(abs, errors.values())) / weights if weights else None


SAMPLES = st.lists(
    st.tuples(st.integers(0, 64).map(lambda n: n / 64), st.sampled_from([0.0, 1.0, 0.25]), st.integers(0, 3))
)


def state_of(metric, samples):
    state_W = np.zeros(metric.size, np.int64)
    metric.add(*(np.array([each[n] for each in samples], np.float32) for n in range(3)), state_W)
    return state_W


@given(SAMPLES, SAMPLES)
def test_the_expected_calibration_error_is_that_of_its_definition_however_samples_are_divided(some, others):
    (metric,) = metrics_of(["expected_calibration_error"], None)
    both = state_of(metric, some + others)
    assert (both == state_of(metric, some) + state_of(metric, others)).all()
    assert metric.value(both) == pytest.approx(calibration_error_reference(some + others, metric.NUM_BINS))


def test_samples_without_weight_or_without_a_number_are_not_calibrated():
    (metric,) = metrics_of(["expected_calibration_error"], None)
    nan, inf = float("nan"), float("inf")
    sound, broken = [(0.75, 1.0, 2.0), (0.5, 0.0, 0.0)], [(nan, 1.0, 1.0), (inf, 0.0, 1.0), (0.5, nan, 1.0)]
    assert metric.value(state_of(metric, sound + broken)) == 0.25
    assert metric.value(state_of(metric, broken)) is None
    assert metric.value(state_of(metric, [(7.0, 3.0, 1e30)])) == 0, "as the nearer end"
