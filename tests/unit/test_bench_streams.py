"""The streams and the learners that models are compared with."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Ragged, Samples
from tests.bench import worlds
from tests.bench.linear import FieldAware, Flat, Linear
from tests.bench.streams import WORLD_SAMPLES, Streams, spec_of


def flat_of(seed, num, num_slots=3, dense=1):
    """Random samples of few ids, some events with several; the first slot has up to two ids."""
    draw = np.random.default_rng(seed)
    sparse = {}
    for slot in range(num_slots):
        length_B = draw.integers(0, 3, num) if not slot else np.ones(num, np.int64)
        offset_B1 = np.concatenate([[0], np.cumsum(length_B)])
        sparse[f"slot{slot}"] = Ragged(draw.integers(0, 4, offset_B1[-1]).astype(np.uint64), offset_B1)
    values = {"dense": draw.normal(size=(num, dense)).astype(np.float32)} if dense else {}
    label = {"click": (draw.random(num) < 0.4).astype(np.float32)}
    event_B = np.cumsum(draw.integers(0, 2, num))
    return Flat.of(Samples(sparse, values, label, event_B, np.full(num, np.nan)), "click")


LEARNERS = [Linear(bits=16), Linear(crosses=True, bits=16), Linear(crosses=True, l1=0.1, l2=1.0), FieldAware(bits=8)]


@pytest.mark.parametrize("learner", LEARNERS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), num=st.integers(1, 30))
def test_a_learner_predicts_as_its_plain_twin(learner, seed, num):
    flat = flat_of(seed, num)
    np.testing.assert_allclose(learner.learn(flat).prediction_B, learner.learn_reference(flat), rtol=2e-5)


def test_a_prediction_knows_no_label_of_its_own_event():
    flat = flat_of(1, 40)
    alone = replace(flat, event_E1=np.array([0, 40]))
    other = replace(alone, label_B=1 - alone.label_B)
    for learner in LEARNERS:
        assert np.array_equal(learner.learn(alone).prediction_B, learner.learn(other).prediction_B)
        assert not np.array_equal(learner.learn(flat).prediction_B, learner.learn(alone).prediction_B)


def test_crosses_learn_what_no_single_id_tells():
    draw = np.random.default_rng(1)
    one_B, other_B = draw.integers(0, 2, (2, 4000)).astype(np.uint64)
    sparse = {name: Ragged(id_B, np.arange(4001)) for name, id_B in (("one", one_B), ("other", other_B))}
    label = {"click": (one_B == other_B).astype(np.float32)}
    flat = Flat.of(Samples(sparse, {}, label, np.arange(4000), np.full(4000, np.nan)), "click")

    def right(learner):
        return np.mean((learner.learn(flat).prediction_B[2000:] > 0.5) == (flat.label_B[2000:] > 0.5))

    assert right(Linear()) < 0.6
    assert right(Linear(crosses=True)) == right(FieldAware()) == 1.0


@pytest.mark.parametrize("name", worlds.WORLDS)
def test_a_world_is_the_same_for_the_same_seed_and_another_one_for_another(name):
    lines = [b"".join(worlds.events(worlds.make(name, 200, seed))) for seed in (1, 1, 2)]
    assert lines[0] == lines[1] != lines[2]
    assert len(lines[0].splitlines()) == 200


def test_worlds_are_what_they_are_said_to_be():
    few, many, rated, watched, rare = (
        worlds.make(name, 20_000) for name in ("few_ids", "many_ids", "ratings", "videos", "rare")
    )
    assert len(np.unique(few["campaign"])) == 200
    assert len(np.unique(many["request"])) == 20_000
    runs = np.flatnonzero(np.diff(rated["user"])).size + 1
    assert 20 < 20_000 / runs < 80
    slots = worlds.job_of("videos")["slots"]
    assert len(slots[0]["names"]) == 37
    assert (
        watched["watch_s"][watched["click"] == 1] > 0.79 * np.expm1(watched["length_s"][watched["click"] == 1])
    ).all()
    assert 0.003 < rare["click"].mean() < 0.007


def test_the_meaning_of_half_the_fields_changes_with_each_regime():
    columns = worlds.make("regimes", 60_000)
    clicked = columns["click"].reshape(worlds.REGIMES, -1)

    def rates(field):  # of the ids of a field, regime by regime
        id_RN = columns[field].reshape(worlds.REGIMES, -1)
        return [np.bincount(i, c) / np.bincount(i) for i, c in zip(id_RN, clicked, strict=True)]

    assert np.corrcoef(rates("field_8"))[0, 1:].min() > 0.8
    assert np.corrcoef(rates("field_9"))[0, 1:].min() < 0.5


def test_samples_of_a_stream_are_its_events(tmp_path, monkeypatch):
    monkeypatch.setitem(WORLD_SAMPLES, "videos", 300)
    samples = Streams(tmp_path).samples("videos")
    events = [json.loads(line) for line in (tmp_path / "videos.jsonl").read_bytes().splitlines()]
    assert samples.sparse["author"].values_N.tolist() == [event["author"] for event in events]
    assert samples.meta["click"].tolist() == [event["click"] for event in events]
    assert samples.time_s_B.tolist() == [event["ts"] for event in events]


def test_the_job_of_a_stream_sets_nothing_that_learning_depends_on(tmp_path, monkeypatch):
    monkeypatch.setitem(WORLD_SAMPLES, "rare", 10)
    for stream in ("clicks", "rare"):
        assert not {"train", "tables", "dense", "passes"} & set(spec_of(stream, tmp_path))
