"""Metrics that a job names: registered ones by name, and classes of users."""

import pytest

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
