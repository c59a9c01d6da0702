"""Which crosses a new job chooses: those that say something, by chance none; and the job with them.

The learner's kernel is compared with its twin in test_feature_worth.
"""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.schema import Schema
from headrace.service.planning import stream_facts
from headrace.service.planning.cross_choice import choice_of, first_samples
from headrace.service.spec.chosen_crosses import chooses, under_crosses
from headrace.service.spec.job import job_of, load_job
from headrace.trainer.spec.defaults import rows_learn
from tests.integration.stream_job import SPEC, write_job
from tests.jobs import changed

NUM = 12_000
SIZES = {"shelf": 30, "region": 20, "device": 5, "theme": 12}
JOB = {
    "name": "planted",
    "sources": {"events": {"kind": "files", "paths": ["events"]}},
    "pipe": {"kind": "columns"},
    "slots": [{"names": list(SIZES)}, {"name": "click", "kind": "meta"}],
    "tasks": [{"name": "ctr", "label": "click"}],
    "model": {"name": "deepfm"},
    "store": {"path": "store"},
}


def samples(planted: float, seed: int = 1, per_event: int = 1) -> Samples:
    """Clicks by what each id says, and by what a shelf says in a region."""
    random = np.random.default_rng(seed)
    ids = {name: random.integers(0, size, NUM) for name, size in SIZES.items()}
    logit = -1 + sum(0.4 * random.normal(size=SIZES[name])[id_N] for name, id_N in ids.items())
    logit += planted * random.normal(size=(30, 20))[ids["shelf"], ids["region"]]
    click = (random.random(NUM) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    sparse = {name: Ragged(id_N.astype(np.uint64), np.arange(NUM + 1)) for name, id_N in ids.items()}
    return Samples(sparse, {}, {"click": click}, np.arange(NUM) // per_event, np.full(NUM, np.nan))


@pytest.mark.parametrize("per_event", [1, 5])
def test_a_planted_interaction_is_chosen_and_nothing_else(per_event):
    choice = choice_of(job_of(JOB, Path("/")), samples(1.0, per_event=per_event))
    assert [set(each.of) for each in choice.pairs] == [{"shelf", "region"}]
    assert choice.auc_with > choice.auc + 0.01
    assert choice == choice_of(job_of(JOB, Path("/")), samples(1.0, per_event=per_event)), "no clock decides"


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_without_interactions_has_none(seed):
    choice = choice_of(job_of(JOB, Path("/")), samples(0.0, seed))
    assert not choice.pairs
    assert choice.samples == NUM


@pytest.mark.parametrize(("strength", "expected"), [(0.5, 1.0), (3.0, 4.0)])
def test_first_order_weights_learn_faster_where_ids_say_much(strength, expected):
    random = np.random.default_rng(2)
    ids = {name: random.integers(0, 400, NUM) for name in SIZES}
    logit = sum(strength * random.normal(size=400)[id_N] for id_N in ids.values())
    click = (random.random(NUM) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    sparse = {name: Ragged(id_N.astype(np.uint64), np.arange(NUM + 1)) for name, id_N in ids.items()}
    stream = Samples(sparse, {}, {"click": click}, np.arange(NUM), np.full(NUM, np.nan))
    assert choice_of(job_of(JOB, Path("/")), stream).first_order_rate == expected
    for said in ({"tables": {"default": {"grad_scale": "mean"}}}, {"defaults": 4}):
        assert choice_of(job_of(JOB | said, Path("/")), stream).first_order_rate == 1.0, "no table would take it"


def test_a_choice_takes_what_is_there_and_waits_for_no_event(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_facts, "await_events", lambda *_: pytest.fail("it waits"))
    job = load_job(write_job(tmp_path, num_lines=30))
    assert 0 < len(first_samples(job)) < job.spec.crosses.events


def test_labels_that_say_nothing_choose_none():
    without_clicks = samples(1.0)
    without_clicks.meta["click"][:] = 0
    assert not choice_of(job_of(JOB, Path("/")), without_clicks).pairs


CHOSEN = {"pairs": [{"of": ["a", "b"], "gain": 0.01}], "samples": 9, "auc": 0.6, "auc_with": 0.7}


def small(**keys):
    return job_of(tomllib.loads(changed(SPEC, keys)), Path("/"))


def test_chosen_pairs_are_first_order_weights_of_one_more_slot():
    before, job = small(), under_crosses(small(), CHOSEN)
    schema = Schema.of(job.spec.slots)
    assert schema.by_name["crosses"].sparse.pairs == (("a", "b"),)
    assert [slot.name for slot in schema.uncrossed.slots] == [slot.name for slot in Schema.of(before.spec.slots).slots]
    table = job.full["tables"]["crosses"]
    assert table["dim"] == 0
    assert table["first_order_optimizer"] == rows_learn(3)["first_order_optimizer"] | {"lr": 0.24}
    assert job.full["tables"]["default"] == before.full["tables"]["default"]
    assert job.spec.tables["default"] == before.spec.tables["default"], "shards get the table as trainers do"
    assert job.full["crosses"]["chosen"] == CHOSEN
    assert "crosses" not in before.full, "specs are written as before there were any"


def test_a_chosen_rate_is_that_of_the_first_order_weights_of_tables_that_say_nothing_of_it():
    chosen = CHOSEN | {"first_order_rate": 2.0}
    rule = rows_learn(3)

    def learn(**keys):
        table = under_crosses(small(**keys), chosen).full["tables"]["default"]
        return table["optimizer"]["lr"], table["first_order_optimizer"] and table["first_order_optimizer"]["lr"]

    assert learn() == (rule["optimizer"]["lr"], 2 * rule["first_order_optimizer"]["lr"])
    assert learn(crosses={"choose": "off"}) == (rule["optimizer"]["lr"], rule["first_order_optimizer"]["lr"])
    assert learn(defaults=4) == (0.05, None)
    assert learn(**{"tables.default.optimizer": {"kind": "adagrad"}}) == (0.05, None)
    job = under_crosses(small(), chosen)
    assert job.full["crosses"]["chosen"] == chosen
    assert job.full["tables"]["crosses"] == under_crosses(small(), CHOSEN).full["tables"]["crosses"]


def test_a_pair_is_left_out_with_a_slot_of_its_own_and_all_are_with_the_key():
    gone = under_crosses(small(), CHOSEN | {"pairs": [{"of": ["a", "gone"], "gain": 0.01}]})
    off = under_crosses(small(crosses={"choose": "off"}), CHOSEN)
    for job in (gone, off):
        assert not Schema.of(job.spec.slots).crossed
        assert job.full["crosses"]["chosen"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"defaults": 4}, False),
        ({"defaults": 4, "crosses": {"choose": "auto"}}, True),
        ({"crosses": {"choose": "off"}}, False),
        ({"tables.default.optimizer": {"kind": "adagrad"}}, False),
        ({"tables.default.optimizer": {"kind": "adagrad"}, "crosses": {"choose": "auto"}}, True),
        ({"tables.default.first_order": False}, False),
        ({"tasks": [{"name": "ctr", "label": "click", "loss": "mse"}]}, False),
        ({"model": {"name": "two_tower", "settings": {"item": ["a"]}}}, False),
    ],
)
def test_which_new_jobs_choose(keys, expected):
    assert chooses(small(**keys)) == expected
