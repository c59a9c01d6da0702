"""Which settings a new job tries, by what the best one is found, and where its values hold."""

import json
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain
from headrace.config import validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.errors import SpecError
from headrace.service.api.job_figures import figures_of
from headrace.service.cli.service_output import status_lines
from headrace.service.cli.tune_command import file_lines
from headrace.service.cluster.tuning import choice_of, tune_first
from headrace.service.monitor.lines import progress_line, summary_lines, tried_lines
from headrace.service.spec.chosen_crosses import under_crosses
from headrace.service.spec.job import job_of
from headrace.service.spec.tuned_settings import AS_IT_IS, settings_to_try, under_choice
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob, WorkerConfig
from headrace.trainer.job_status import Status, read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.train import tuning
from headrace.trainer.train.tuning import (
    PASSES,
    KeptPass,
    KeptReader,
    Trial,
    TrialsConfig,
    best,
    chosen_first,
    combined,
    going_on,
    kept_passes,
    plans_of,
    rounds,
    try_settings,
)
from headrace.trainer.tuning_status import TriedStatus, TuningStatus
from tests.integration.epoch_job import write_epoch_job
from tests.integration.stream_job import SPEC
from tests.integration.trainer_here import config_of
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
    tables = under_choice(free_job(), chosen).spec.tables
    assert tables["default"].optimizer == free_job().spec.tables["default"].optimizer, "shards get it as trainers do"
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
    "changes",
    [
        {"tables.default.grad_scale": "mean"},
        {"tables.default.optimizer": {"kind": "sgd"}},
        {"tables.default.extend_at": 3},
        {"tables.default.first_order": False},
        {"dense.strategy": "pipeline"},
    ],
)
def test_rows_of_a_tuned_job_follow_events_no_more_once_its_file_rules_it_out(changes):
    chosen = {"tried": [{"name": "best", "keys": settings_to_try(free_job())["row rates x 2.5"]}]}
    after = under_choice(job(**changes), chosen).spec.tables["default"]
    assert not after.in_batch
    assert after.first_order_optimizer is None or after.first_order_optimizer.kind == after.optimizer.kind
    rate = job(**{"tables.default.optimizer": {"kind": "adagrad", "lr": 0.2}})
    assert under_choice(rate, chosen).spec.tables["default"].in_batch


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


@given(st.integers(2, 64), st.integers(2, PASSES))
def test_each_round_leaves_some_out_and_two_learn_all(settings, num_passes):
    found = rounds(settings, num_passes)
    passes, most = zip(*found, strict=True)
    assert most[0] == settings
    assert (passes[-1], most[-1] >= 2) == (num_passes, True)
    assert list(most) == sorted(set(most), reverse=True)
    assert list(passes) == sorted(passes)


def trial(name: str, *losses: float, keys: str = "", failure: str = "") -> Trial:
    """Of passes with ten samples each."""
    measures = [(10, loss, 0.5) for loss in losses]
    return Trial(name, {each: 1 for each in keys}, measures, events=10 * len(losses), failure=failure)


def test_the_best_has_learnt_most_then_loses_least_then_comes_first():
    trials = [
        trial("failed", 0.1, 0.1, failure="a loss is not finite"),
        trial("early", 0.1),
        trial("worse", 0.1, 0.5),
        trial("first", 0.9, 0.4),
        trial("equal", 0.8, 0.4),
    ]
    assert [each.name for each in best(trials)] == ["first", "equal", "worse", "early", "failed"]


def test_the_loss_is_that_of_the_second_half_weighted_by_samples():
    found = Trial("any", {}, [(10, 9.0, 0.1), (10, 9.0, 0.1), (10, 0.4, 0.7), (30, 0.6, 0.9)])
    assert found.measured(4) == pytest.approx((0.55, 0.85))
    assert found.measured(2) == pytest.approx((9.0, 0.1))
    unlabelled = Trial("any", {}, [(10, 0.4, 0.7), (0, math.nan, None)])
    assert unlabelled.measured(2) == (None, None)


def test_the_job_as_it_is_goes_on_beside_those_that_are_better():
    trials = [trial("as it is", 0.9), trial("a", 0.1), trial("b", 0.2), trial("c", 0.95)]
    assert [each.name for each in going_on(trials, 2)] == ["a", "as it is"]
    assert [each.name for each in going_on(trials, 4)] == ["a", "b", "as it is"]
    assert [each.name for each in going_on([trials[0], trials[3]], 2)] == ["as it is"], "nothing more to compare"


def test_a_setting_that_was_left_out_does_not_come_back():
    trials = [trial("as it is", 0.9, 0.9), trial("left out", 0.1), trial("a", 0.8, 0.8)]
    assert [each.name for each in going_on(trials, 3)] == ["a", "as it is"]


def test_all_go_on_where_no_sample_had_a_label_yet():
    empty = [trial(name) for name in ("as it is", "a", "b")]
    for each in empty:
        each.losses = [(0, math.nan, None)] * 2
    assert [each.name for each in going_on(empty, 3)] == ["a", "b", "as it is"]


def test_all_that_can_be_trained_go_on_where_the_job_as_it_is_cannot():
    trials = [trial("as it is", failure="a loss is not finite"), trial("a", 0.9), trial("b", failure="likewise")]
    assert [each.name for each in going_on(trials, 4)] == ["a", "as it is"]


def test_the_best_change_of_each_kind_is_tried_together_with_the_others():
    plain = trial("as it is", 0.5, 0.5, 0.5, 0.5)
    trials = [
        plain,
        trial("x up", 0.4, 0.4, keys="x"),
        trial("x down", 0.45, 0.45, 0.45, 0.45, keys="x"),
        trial("y", 0.49, 0.49, keys="y"),
        trial("worse", 0.6, 0.6, keys="z"),
        trial("failed", 0.1, keys="w", failure="a loss is not finite"),
    ]
    together = combined(trials)
    assert together is not None
    assert together.keys == {"x": 1, "y": 1}
    assert combined([plain, *trials[1:3]]) is None, "one kind alone has been tried"
    scant = [trial(name, 0.4995, 0.4995, keys=name) for name in "xy"]
    assert combined([plain, *scant]) is None, "together they would not be chosen either"


def test_another_setting_is_chosen_only_if_it_is_clearly_better_all_along():
    plain = trial("as it is", 0.9, 0.9, 0.5, 0.5)
    clear, scant = trial("clear", 0.9, 0.9, 0.49, 0.49), trial("scant", 0.9, 0.9, 0.4995, 0.4995)
    once, early = trial("once", 0.9, 0.9, 0.4, 0.51), trial("early", 0.1, 0.1)
    assert [each.name for each in chosen_first([plain, scant, clear, early])] == ["clear", "scant", "as it is", "early"]
    assert [each.name for each in chosen_first([plain, once, scant])] == ["as it is", "once", "scant"]
    failed = trial("as it is", 0.9, failure="a loss is not finite")
    assert chosen_first([failed, scant])[0] is scant


def test_samples_in_memory_are_read_any_number_of_times():
    plan = PassPlan(1, ((),))
    counted = PassTally(num_events=3, rejected={"unparsable": 1})
    reader = KeptReader([KeptPass(plan, ["block"], counted)])
    for _ in range(2):
        tally = PassTally()
        assert list(reader.read(1, (), tally)) == ["block"]
        assert tally == counted
        tally.reject("too long")
    assert counted.rejected == {"unparsable": 1}


def test_trials_learn_a_pass_in_the_order_in_which_the_job_learns_it(tmp_path):
    path = write_epoch_job(tmp_path)
    orders = []
    for shuffle in (False, True):
        worker = config_of(path, tmp_path / "store", f"passes.shuffle={str(shuffle).lower()}")
        spec = validate(TrainerJob, fill_defaults(worker.job, unset=NEWEST_DEFAULTS), only_known=True)
        (kept, *_) = kept_passes(worker, spec, plans_of(worker, spec, 240, newest=False))
        orders.append([tuple(each) for block in kept.blocks for each in block.dense["x"].tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


class EndlessPipe:
    """In place of source and pipe: each pass gives blocks of 1 KiB for as long as somebody asks."""

    def __init__(self, *args, **settings):
        self.asked = 0

    def read(self, number, segments, tally):
        while True:
            self.asked += 1
            assert self.asked < 100, "it reads on"
            yield SimpleNamespace(num_bytes=1 << 10)

    def close(self):
        pass


def test_samples_that_do_not_fit_into_memory_are_not_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SegmentReader", EndlessPipe)
    monkeypatch.setattr(tuning, "MAX_KEPT_BYTES", 10 << 10)
    (tmp_path / "part-0.txt").write_text("1 1\n" * 100)
    worker = WorkerConfig(
        job=tomllib.loads(SPEC), rank=0, world=1, folder=tmp_path, store=tmp_path, live=tmp_path, socket=tmp_path
    )
    with pytest.raises(SpecError, match=r"tuning\.events: the samples of two of 8 passes exceed"):
        try_settings(TrialsConfig(trainer=worker, settings={AS_IT_IS: {}}, events=96))


def test_the_status_of_a_job_says_how_far_its_tuning_is_and_then_what_was_tried():
    running = Status(state="tuning", tuning=TuningStatus(trial=3, of=14, name="batch / 4"))
    assert progress_line(running) == "tuning: trial 3 of 14: batch / 4"
    assert figures_of(running).model_dump()["tuning"]["trial"] == 3
    tried = [TriedStatus(name="batch / 4", keys={"train.batch_size": 16}, events=320, logloss=0.5, auc=0.75)]
    chosen = Status(tuning=TuningStatus(tried=tried))
    assert progress_line(chosen).startswith("starting")
    assert list(tried_lines(tried)) == ["  batch / 4  log loss 0.5000  AUC 0.7500  320 events"]
    assert figures_of(chosen).model_dump()["tuning"]["tried"][0]["keys"] == {"train.batch_size": 16}
    assert read(Status, plain(chosen)) == chosen


def test_the_crosses_that_a_job_chose_are_in_its_status_its_report_and_rest():
    choice = {"pairs": [{"of": ["a", "b"], "gain": 0.25}], "samples": 3000, "auc": 0.5, "auc_with": 0.75}
    choice |= {"first_order_rate": 2.0}
    plans, runner = SimpleNamespace(), SimpleNamespace(tuning=None)
    tune_first(under_crosses(job(), choice), plans, runner, None, Path("unused"), print)
    status = Status(tuning=runner.tuning)
    assert figures_of(status).model_dump()["tuning"]["crosses"] == choice
    lines = status_lines({"name": "one", "phase": "training", "desired": "running", **plain(status)})
    assert lines[-2].startswith("crosses   a x b are chosen by 3,000 samples")
    assert lines[-2].endswith("; first-order weights learn at 2 times their rate")
    assert lines[-1] == "  a x b  log loss -0.2500"
    assert set(lines[-2:]) <= set(summary_lines({"tuning": plain(runner.tuning)}))
    off = under_crosses(job(**{"crosses.choose": "off"}), choice)
    tune_first(off, plans, runner, None, Path("unused"), print)
    assert runner.tuning is None, "a job that is kept without crosses shows none"


def test_all_values_that_are_tried_reach_the_job():
    settings = settings_to_try(free_job())
    assert any(isinstance(value, bool) for keys in settings.values() for value in keys.values())
    tried = [Trial(name, keys).tried() for name, keys in settings.items()]
    told = read(TuningStatus, json.loads(json.dumps(plain(TuningStatus(tried=tried)))))
    assert [each.keys for each in told.tried] == [dict(keys) for keys in settings.values()]
    chosen = choice_of(told.tried[::-1])
    assert [each.keys for each in chosen.tried] == [each.keys for each in told.tried[::-1]]


def test_a_job_with_many_tables_keeps_its_choice():
    names = [f"t{number}" for number in range(65)]
    slots = [{"names": [f"of_{name}"], "table": name} for name in names]
    many = job(
        metrics=None, tables={name: {} for name in names}, slots=[*slots, {"names": ["click", "group"], "kind": "meta"}]
    )
    keys = settings_to_try(many)["row rates x 2.5"]
    assert choice_of([Trial("row rates x 2.5", keys).tried()]).keys == keys


def test_the_chosen_keys_are_printed_as_a_part_of_a_job_file():
    keys = {"train.batch_size": 16, "dense.optimizer.kind": "adam", "dense.optimizer.lr": 0.009}
    text = "\n".join(file_lines(keys))
    assert text == '[dense.optimizer]\nkind = "adam"\nlr = 0.009\n[train]\nbatch_size = 16'
    assert tomllib.loads(text) == {"dense": {"optimizer": {"kind": "adam", "lr": 0.009}}, "train": {"batch_size": 16}}
