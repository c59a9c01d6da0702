"""The zoo: all models with their defaults, and others' learners, measured alike on the same samples."""

import numpy as np
import pytest

from headrace.config import load_toml, validate
from headrace.exact_auc import exact_auc_reference
from headrace.trainer.config import TrainerJob
from headrace.trainer.models.registry import MODELS
from tests.bench.linear import Linear
from tests.bench.model_figures import PAGE
from tests.bench.peers import PEERS
from tests.bench.streams import EXAMPLES, WORLD_SAMPLES, spec_of
from tests.bench.zoo import BEGIN, END, ITEMS, LEARNERS, Zoo, last_half, line, models_of, tables_of
from tests.integration.trainer_here import torch_as_before
from tests.unit.test_bench_streams import flat_of

OTHER_TASKS = {"skip_gram", "next_item", "esmm"}
"""Models for labels that no stream of the zoo has."""


def test_every_model_has_a_line_but_those_for_other_tasks(tmp_path):
    raw = spec_of("clicks", tmp_path)
    named = set()
    for changes in models_of("clicks").values():
        job = validate(TrainerJob, {**raw, **changes, "slots": [*raw["slots"], *changes.get("slots", [])]})
        named.add(job.model.name)
    assert named == set(MODELS.names()) - OTHER_TASKS


@pytest.mark.parametrize("stream", ITEMS)
def test_the_items_of_a_stream_are_slots_of_its_example(stream):
    names = {name for slot in load_toml(EXAMPLES / stream / "job.toml")["slots"] for name in slot.get("names", [])}
    item, others = ITEMS[stream]
    assert {item, *others, "user"} <= names


def test_a_learner_is_measured_over_the_last_half(tmp_path):
    flat = flat_of(1, 101)
    predicted = Linear().learn(flat).prediction_B.astype(np.float32)
    group_B = np.arange(101) // 4
    found = last_half(predicted, flat.label_B, group_B, tmp_path)
    own = slice(50, None)  # an odd sample belongs to the last half
    assert found["auc"] == pytest.approx(exact_auc_reference(predicted[own], flat.label_B[own], np.ones(51)))
    right = np.where(flat.label_B[own] > 0.5, predicted[own], 1 - predicted[own])
    assert found["logloss"] == pytest.approx(-np.log(right).mean(), rel=1e-4)
    assert 0 < found["gauc"] < 1


def test_a_model_and_a_learner_are_measured_on_the_same_samples(tmp_path, monkeypatch):
    monkeypatch.setitem(WORLD_SAMPLES, "few_ids", 300)
    zoo = Zoo(tmp_path)
    with torch_as_before():
        model = zoo.model("few_ids", models_of("few_ids")["lr"])
    learner = zoo.learner("few_ids", Linear())
    assert model.keys() - {"wall_s"} == learner.keys()
    assert model["samples"] == learner["samples"] == 300
    assert learner["rows"] == model["rows"] + 2  # the constant, and the dense value


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_predicts_before_it_learns_an_event(name):
    predicted = PEERS[name].learn(flat_of(1, 200)).prediction_B
    assert predicted.shape == (200,)
    assert predicted[0] == pytest.approx(0.5)
    assert ((0 < predicted) & (predicted < 1)).all() and len(np.unique(predicted)) > 50


def test_the_tables_have_a_line_for_each_figure():
    found = {"auc": 0.5, "logloss": 0.25, "gauc": None, "samples": 100, "rows": 7, "bytes": 2e6, "core_s": 2.0}
    unknown = found | {"gauc": 0.625, "rows": None, "bytes": None}
    text = tables_of({"criteo": {"lr": found}, "news": {}, "clicks": {"Vowpal Wabbit": unknown}})
    assert line("lr", found) == "| lr | 0.5000 | 0.2500 | - | 50 | 7 | 2.0 MB |"
    assert line("lr", found) in text and line("Vowpal Wabbit", unknown) in text
    assert "*criteo*, 100 samples" in text and "*news*" not in text


def test_the_page_has_the_tables_of_the_zoo():
    named = {
        text.removeprefix("| ").split(" | ")[0] for text in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    }
    assert {"deepfm", "logistic regression", "logistic regression, all crosses", "field-aware FM"} <= named
    assert named - {"|---|---|---|---|---|---|---|", ""} - LEARNERS.keys() - models_of("clicks").keys() <= {
        text for text in named if text.startswith("*")
    }
