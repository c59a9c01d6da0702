"""Which settings a new job tries, by what the best one is found, and where its values hold."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.service.cluster.tuning import PASSES, Trial, _best, num_passes, rounds
from headrace.service.spec.job import job_of
from headrace.service.spec.tuned_settings import AS_IT_IS, settings_to_try, under_choice
from tests.integration.stream_job import SPEC
from tests.jobs import changed

FREE = {"tables.default.dim": None, "train.batch_size": None}


def job(**changes):
    return job_of(
        tomllib.loads(changed(SPEC, {key.replace("__", "."): value for key, value in changes.items()})), Path("/")
    )


def free_job():
    return job_of(tomllib.loads(changed(SPEC, FREE)), Path("/"))


def test_a_key_that_the_file_sets_is_never_tried():
    tried = {key for keys in settings_to_try(free_job()).values() for key in keys}
    assert {"train.batch_size", "tables.default.dim", "tables.default.optimizer.lr", "dense.optimizer.lr"} <= tried
    held = job(**{"tables.default.optimizer": {"kind": "adagrad", "lr": 0.03}})
    kept = {key for keys in settings_to_try(held).values() for key in keys}
    assert kept == {"dense.optimizer.lr", "dense.optimizer.kind"}
    everything = job(
        **{"tables.default.optimizer": {"kind": "adagrad", "lr": 0.03}, "dense.optimizer": {"kind": "adam", "lr": 0.01}}
    )
    assert settings_to_try(everything) == {AS_IT_IS: {}}


def test_a_rate_is_a_multiple_of_the_one_in_force_for_the_optimizer_that_the_file_names():
    found = settings_to_try(job(**{"tables.default.optimizer": {"kind": "adam"}}))
    assert found["row rates x 2.5"] == {"tables.default.optimizer.lr": 0.0025}


@pytest.mark.parametrize("first_order", [True, False])
def test_other_rates_of_rows_leave_all_else_of_their_defaults(first_order):
    loaded = job(tables__default={"first_order": first_order})
    before = loaded.full["tables"]["default"]
    assert before["grad_scale"] == "sum"
    for name, factor in (("row rates x 2.5", 2.5), ("row rates / 2.5", 0.4)):
        keys = settings_to_try(loaded)[name]
        after = under_choice(loaded, {"tried": [{"name": name, "keys": keys}]}).full["tables"]["default"]
        for part in ("optimizer", "first_order_optimizer") if first_order else ("optimizer",):
            assert after[part].pop("lr") == float(f"{before[part]['lr'] * factor:.3g}")
        assert after == {
            key: {each: of for each, of in value.items() if each != "lr"} if "optimizer" in key and value else value
            for key, value in before.items()
        }


def test_every_setting_is_a_job():
    loaded = free_job()
    for keys in settings_to_try(loaded).values():
        assert under_choice(loaded, {"tried": [{"name": "any", "keys": keys}]}).spec.tuning.chosen is not None


def test_a_choice_holds_where_the_file_sets_nothing():
    chosen = {"tried": [{"name": "best", "keys": {"train.batch_size": 128, "tables.default.dim": 9}}]}
    assert under_choice(free_job(), chosen).spec.train.batch_size == 128
    assert under_choice(free_job(), chosen).full["tables"]["default"]["dim"] == 9
    assert under_choice(job(), chosen).spec.train.batch_size == 64
    assert under_choice(job(), None).spec == job().spec
    again = under_choice(under_choice(free_job(), chosen), chosen)
    assert again.full == under_choice(free_job(), chosen).full


def test_a_chosen_rate_is_of_no_other_kind_of_optimizer_and_of_no_table_that_is_gone():
    slots = [{"names": ["a"]}, {"names": ["b"], "table": "other"}, {"names": ["click", "group"], "kind": "meta"}]
    two = job(tables={"default": {}, "other": {}}, slots=slots)
    keys = {key: value for setting in settings_to_try(two).values() for key, value in setting.items()}
    assert "tables.other.optimizer.lr" in keys
    chosen = {"tried": [{"name": "best", "keys": keys}]}
    assert under_choice(two, chosen).spec.dense.optimizer.lr == keys["dense.optimizer.lr"]
    assert under_choice(free_job(), chosen).spec.tables.keys() == {"default"}
    sgd = job(dense={"optimizer": {"kind": "sgd"}})
    assert under_choice(sgd, chosen).spec.dense.optimizer == sgd.spec.dense.optimizer
    named = job(dense={"optimizer": {"kind": "sgd"}}, tables__default={})
    of_sgd = {"tried": [{"name": "best", "keys": settings_to_try(named)["dense rate x 3"]}]}
    assert under_choice(named, of_sgd).spec.dense.optimizer.lr == 3 * named.spec.dense.optimizer.lr


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pipe.command": "rm"}, "which tuning does not choose"),
        ({"dense.optimizer.kind": "a b"}, "is no name"),
    ],
)
def test_a_choice_sets_nothing_but_what_is_tuned(keys, message):
    with pytest.raises(SpecError, match=message):
        job(tuning={"chosen": {"tried": [{"name": "bad", "keys": keys}]}})


@given(st.integers(2, 64))
def test_each_round_leaves_some_out_and_two_learn_all(settings):
    found = rounds(settings)
    passes, most = zip(*found, strict=True)
    assert most[0] == settings
    assert (passes[-1], most[-1] >= 2) == (PASSES, True)
    assert list(most) == sorted(set(most), reverse=True)
    assert list(passes) == sorted(set(passes))


def test_eight_settings_learn_four_times_the_events():
    assert num_passes(8) == 4 * PASSES
    assert num_passes(2) == 2 * PASSES


def test_the_best_has_learnt_most_then_loses_least_then_comes_first():
    trials = [
        Trial("failed", {}, 320),
        Trial("early", {}, 80, 0.1, 0.9),
        Trial("worse", {}, 320, 0.5, 0.9),
        Trial("first", {}, 320, 0.4, 0.6),
        Trial("equal", {}, 320, 0.4, 0.7),
    ]
    assert [each.name for each in _best(trials)] == ["first", "equal", "worse", "early", "failed"]
