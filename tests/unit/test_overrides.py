"""Overrides: keys that may be set while a job runs, their effect, and a changed job file."""

import json
import re
from typing import get_type_hints

import pytest

from headrace.config import load_toml, validate
from headrace.errors import SpecError
from headrace.pserver.row_optimizers import Adagrad
from headrace.service.cli.table_commands import set_
from headrace.service.spec.job import job_of, load_job
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense_optimizers import DenseAdam
from headrace.trainer.spec.changes import after_set, changed_keys, is_hot, remaining, with_overrides
from tests.unit.test_spec import NEWS

LR = "tables.default.optimizer.lr"


def job(*overrides):
    return validate(TrainerJob, load_toml(NEWS, overrides), only_known=True)


SMALL = """
name = "small"
sources.lines = {kind = "files", paths = ["x"]}
pipe = {kind = "columns"}
slots = [{name = "user"}, {name = "click", kind = "meta"}]
tasks = [{name = "ctr", label = "click"}]
model = {name = "lr"}
store = {path = "store"}
"""


def trainer_job(path):
    return validate(TrainerJob, load_job(path).full, only_known=True)


LONE = ("tables.default.optimizer.lr=0.02", "dense.optimizer.lr=0.1")


def test_a_rate_alone_is_that_of_the_default_optimizer_wherever_it_is_given(tmp_path):
    (plain := tmp_path / "plain.toml").write_text(SMALL)
    (file := tmp_path / "file.toml").write_text(SMALL + "\n".join(LONE))
    running = after_set(trainer_job(plain), {}, {LR: 0.02, "dense.optimizer.lr": 0.1})
    for spec in (load_job(file).spec, load_job(plain, LONE).spec, job_of(load_toml(file), tmp_path).spec):
        assert spec.tables["default"].optimizer == Adagrad(lr=0.02)
        assert spec.dense.optimizer == DenseAdam(lr=0.1)
    assert running.tables["default"].optimizer == Adagrad(lr=0.02, initial=0.1), "a running job keeps the other keys"
    assert running.dense.optimizer == DenseAdam(lr=0.1)
    assert changed_keys(load_toml(plain), load_toml(file)) == ["dense.optimizer.lr", LR]
    assert load_job(file).full["dense"]["optimizer"]["kind"] == "adam", "as workers and the log have it"


def test_a_first_order_optimizer_without_a_kind_begins_with_the_settings_of_the_optimizer(tmp_path):
    (file := tmp_path / "job.toml").write_text(SMALL + 'tables.default.optimizer = {initial = 0.5, per = "element"}')
    key, value = "tables.default.first_order_optimizer.lr", 0.02
    given = load_job(file, [f"{key}={value}"]).spec.tables["default"].first_order_optimizer
    assert given == Adagrad(lr=0.02, initial=0.5, per="element")
    assert after_set(trainer_job(file), {}, {key: value}).tables["default"].first_order_optimizer == given


SCHEDULE = {"kind": "warmup_cosine", "counts": "samples", "warmup": 5, "total": 50, "final": 0.1}


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        (LR, 0.2, lambda job: job.tables["default"].optimizer.lr),
        ("tables.default.first_order_optimizer.lr", 0.3, lambda job: job.tables["default"].first_order_optimizer.lr),
        ("tables.default.decay", 0.5, lambda job: job.tables["default"].decay),
        ("tables.default.delete_below", 1, lambda job: job.tables["default"].delete_below),
        ("tables.default.delete_after_days", 30, lambda job: job.tables["default"].delete_after_days),
        ("tables.default.max_shrink_fraction", 0.5, lambda job: job.tables["default"].max_shrink_fraction),
        ("tables.default.slots.user.lr", 0.4, lambda job: job.tables["default"].slots["user"].lr),
        ("tables.default.slots.user.decay", 0.9, lambda job: job.tables["default"].slots["user"].decay),
        ("dense.optimizer.lr", 0.01, lambda job: job.dense.optimizer.lr),
        ("dense.schedule", SCHEDULE, lambda job: job.dense.schedule.model_dump(mode="json")),
    ],
)
def test_an_override_is_in_force_and_all_else_is_unchanged(key, value, read):
    before = job()
    changed = after_set(before, {}, {key: value})
    assert read(changed) == value and is_hot(key)
    assert with_overrides(before, {key: value}) == changed
    assert changed.model_copy(update={"tables": before.tables, "dense": before.dense}) == before


def test_nothing_set_is_the_job_itself():
    before = job()
    assert with_overrides(before, {}) is before
    assert with_overrides(before, {LR: before.tables["default"].optimizer.lr}) == before, "it is written out and read"


def test_an_entry_of_admission_is_set_by_its_number():
    counted = job('tables.default.admission=[{kind="count",n=3},{kind="probability",p=0.5}]')
    keys = {"tables.default.admission.0.n": 5, "tables.default.admission.1.p": 0.25}
    first, second = after_set(counted, {}, keys).tables["default"].admission
    assert (first.n, second.p) == (5, 0.25)
    with pytest.raises(SpecError, match=r"tables.default.admission.2: there are 2 entries, numbered from 0"):
        after_set(counted, {}, {"tables.default.admission.2.n": 1})
    for number in ("00", "01", "\u0661", "9" * 5000):  # another key than its own, which a job file would not take away
        with pytest.raises(SpecError, match="cannot be set while the job runs"):
            after_set(counted, {}, {f"tables.default.admission.{number}.n": 1})


def test_a_threshold_is_removed_by_null():
    ruled = job("tables.default.delete_below=0.5")
    assert after_set(ruled, {}, {"tables.default.delete_below": None}).tables["default"].delete_below is None


REFUSED = {
    "tables.default.dim": (
        8,
        "tables.default.dim: cannot be set while the job runs; these can: tables.*.optimizer.lr, tables.*.first_order",
    ),
    "seed": (8, "seed: cannot be set while the job runs; "),
    "tables.default.optimizer": ({"kind": "sgd"}, "tables.default.optimizer: cannot be set while the job runs"),
    "tables..decay": (0.5, "tables..decay: cannot be set while the job runs"),
    "tables.default.optimzer.lr": (
        0.5,
        f"tables.default.optimzer.lr: cannot be set while the job runs; did you mean {LR!r}? these can: tables.*.optim",
    ),
    "tables.defualt.decay": (0.5, "tables.defualt: there is no table 'defualt'; did you mean 'default'?"),
    LR: (-1, f"{LR}: Input should be greater than 0 (got -1)"),
    "tables.default.first_order_optimizer.lr": (
        1e39,
        "tables.default.first_order_optimizer.lr: is beyond float32, in which it is used; the greatest is 3.4",
    ),
    "tables.default.slots.user.decay": (1e-50, "tables.default.slots.user.decay: is so small that float32"),
    "tables.default.decay": ("fast", "tables.default.decay: Input should be a valid number (got 'fast')"),
    "tables.other.decay": (0.5, "tables.other: there is no table 'other'"),
    "tables.default.slots.usr.lr": (
        0.5,
        "tables.default.slots.usr: no slot 'usr' uses this table; did you mean 'user'?",
    ),
    "tables.default.extend_at": (
        3,
        "tables.default.extend_at: can be set from a number to a number only: the layout of rows depends on it",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_an_invalid_override_is_refused_like_an_invalid_job_file(key):
    value, why = REFUSED[key]
    with pytest.raises(SpecError) as caught:
        after_set(job(), {}, {key: value})
    assert str(caught.value).startswith(why)


def test_vectors_that_join_later_can_join_at_another_score_but_not_all_at_once():
    later = job("tables.default.extend_at=2")
    assert after_set(later, {}, {"tables.default.extend_at": 3}).tables["default"].extend_at == 3
    assert after_set(later, {}, {"tables.default.slots.user.extend_at": 5}).tables["default"].slots["user"].extend_at
    with pytest.raises(SpecError, match="from a number to a number only"):
        after_set(later, {}, {"tables.default.extend_at": None})


def test_ftrl_keeps_its_schedule_and_other_optimizers_may_lose_it():
    key, falling = "tables.default.schedule", 'tables.default.schedule={kind="exponential",factor=0.5,every=9}'
    ftrl = job(falling, 'tables.default.optimizer={kind="ftrl"}')
    why = (
        r'tables.default.schedule: cannot be removed with an optimizer .*; schedule = \{kind = "constant"\} keeps them'
    )
    with pytest.raises(SpecError, match=why):
        after_set(ftrl, {}, {key: None})
    assert after_set(ftrl, {}, {key: {"kind": "constant"}}).tables["default"].schedule.kind == "constant"
    assert after_set(job(falling), {}, {key: None}).tables["default"].schedule is None
    alone = job('tables.default.optimizer={kind="ftrl"}')
    with pytest.raises(SpecError, match="cannot be removed"):
        after_set(alone, {key: {"kind": "constant"}}, {key: None})
    after_set(alone, {}, {key: None})


def test_what_a_mode_refuses_cannot_be_set_either():
    optimizers = 'tables.default.optimizer={kind="sgd"}', 'dense.optimizer={kind="sgd"}'
    copies = job('train.mode="geo"', "train.k_steps=4", *optimizers)
    with pytest.raises(SpecError, match=r'tables\.default\.l2: does not work with train\.mode = "geo"'):
        after_set(copies, {}, {"tables.default.l2": 0.5})
    assert after_set(copies, {}, {"tables.default.weight_decay": 0.5}).tables["default"].weight_decay == 0.5


def test_slots_that_share_rows_are_set_together():
    shared = job('slots.0={name="user",share="who"}', 'slots.1={name="owner",share="who"}', "metrics.slices=[]")
    alone, both = {"tables.default.slots.user.lr": 0.5}, {"tables.default.slots.owner.lr": 0.5}
    with pytest.raises(SpecError, match="slots 'user' and 'owner' share rows"):
        after_set(shared, {}, alone)
    assert set(after_set(shared, {}, {**alone, **both}).tables["default"].slots) == {"user", "owner"}


SPEC = {"tables": {"default": {"optimizer": {"lr": 0.1}, "decay": 0.9, "admission": [{"kind": "count", "n": 2}]}}}
SET = {LR: 0.2, "tables.default.decay": 0.8, "tables.default.admission.0.n": 5, "dense.optimizer.lr": 0.3}


def changed_file(**tables):
    spec = json.loads(json.dumps(SPEC))
    spec["tables"]["default"] |= tables
    return spec


def test_a_changed_key_of_the_job_file_wins_and_other_overrides_remain():
    assert remaining(SET, SPEC, SPEC) == SET
    assert remaining(SET, SPEC, changed_file(optimizer={"lr": 0.3})) == {k: v for k, v in SET.items() if k != LR}
    new = changed_file(admission=[{"kind": "probability", "p": 0.5}])
    assert "tables.default.admission.0.n" not in remaining(SET, SPEC, new)
    assert remaining(SET, SPEC, {**SPEC, "commit": {"keep": 5}}) == SET


def test_an_override_of_a_schedule_ends_where_the_job_file_changes_a_number_of_it():
    before, overrides = {**SPEC, "dense": {"schedule": SCHEDULE}}, {"dense.schedule": {**SCHEDULE, "total": 90}}
    after = {**SPEC, "dense": {"schedule": {**SCHEDULE, "warmup": 6}}}
    assert remaining(overrides, before, {**before, "commit": {"keep": 5}}) == overrides
    assert remaining(overrides, before, after) == {} == remaining(overrides, before, SPEC)


def test_an_override_of_a_learning_rate_ends_with_its_optimizer():
    other = {**SPEC, "dense": {"optimizer": {"kind": "sgd"}}}
    assert "dense.optimizer.lr" not in remaining(SET, SPEC, other) and LR in remaining(SET, SPEC, other)


def test_the_example_key_in_the_help_of_set_may_be_set():
    (values,) = (each for each in get_type_hints(set_, include_extras=True)["values"].__metadata__)
    assert is_hot(re.fullmatch(r"As in ([\w.]+)=[\d.]+\.", values.help)[1])
