"""Keys of `train` that are now in `dense`: their old names mean the same, in files, in logs and while a job runs."""

import json
import tomllib

import pytest

from headrace.config import validate
from headrace.errors import SpecError
from headrace.service.spec.job import job_of, load_job
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob
from headrace.trainer.dense_config import RENAMED_TO_DENSE
from headrace.trainer.spec.changes import after_set, changed_keys, hot_keys, remaining, significant_keys, with_overrides
from headrace.trainer.spec.defaults import FIRST, fill_defaults
from tests.unit.test_defaults import RAW
from tests.unit.test_spec import NEWS

OLD = {"train": {"dense_optimizer": {"kind": "adagrad", "lr": 0.1}, "accumulate": 3, "clip_norm": 2.0}}
NOW = {"dense": {"optimizer": {"kind": "adagrad", "lr": 0.1}, "accumulate": 3, "clip_norm": 2.0}}
LR, OLD_LR = "dense.optimizer.lr", "train.dense_optimizer.lr"


@pytest.mark.parametrize("number", [FIRST, NEWEST_DEFAULTS])
@pytest.mark.parametrize(
    ("old", "now"),
    [
        (OLD, NOW),
        (
            {"train": {"dense": "shards", "batch_size": 7}},
            {"dense": {"strategy": "shards"}, "train": {"batch_size": 7}},
        ),
        ({"train": {"dense": "allreduce"}}, {}),
        ({"train": {"accumulate": 3}, "dense": {"clip_norm": 1.0}}, {"dense": {"accumulate": 3, "clip_norm": 1.0}}),
    ],
)
def test_an_old_name_means_the_same_in_a_file_and_in_a_log(old, now, number):
    before, after = {**RAW, **old}, {**RAW, **now}
    assert fill_defaults(before, unset=number) == fill_defaults(after, unset=number)
    assert validate(TrainerJob, before, only_known=True) == validate(TrainerJob, after, only_known=True)
    assert changed_keys(before, after) == []
    assert "dense_optimizer" not in json.dumps(fill_defaults(before))


def test_the_first_set_of_defaults_is_that_of_the_old_names():
    """A spec that was logged with every default of the first set, under the names of its time."""
    logged = fill_defaults(RAW)
    dense = logged.pop("dense")
    assert dense.pop("strategy") == "all_reduce"
    assert dense["optimizer"]["lr"] == 0.001
    logged["train"] |= {"dense": "allreduce", "dense_optimizer": dense["optimizer"]}
    logged["train"] |= {key: dense[key] for key in ("accumulate", "clip_norm")}
    assert fill_defaults(logged) == fill_defaults(RAW)
    assert significant_keys(logged, fill_defaults(RAW)) == []


@pytest.mark.parametrize("old", RENAMED_TO_DENSE)
def test_both_names_of_a_key_are_refused_with_both_of_them(old):
    now = RENAMED_TO_DENSE[old].now
    value = {"kind": "sgd"} if now.endswith("optimizer") else "shards" if now.endswith("strategy") else 2
    (section, key), (new_section, new_key) = old.split("."), now.split(".")
    with pytest.raises(SpecError) as caught:
        job_of({**RAW, section: {key: value}, new_section: {new_key: value}}, NEWS.parent)
    assert str(caught.value) == f"{old}: is the old name of {now}, which is given, too: remove {old}"


def test_a_mistake_is_told_by_the_name_that_the_file_uses():
    with pytest.raises(SpecError) as caught:
        job_of({**RAW, "train": {"dense_optimizer": {"kind": "sgd", "lr": -1.0}, "dense": "all"}}, NEWS.parent)
    assert str(caught.value).splitlines() == [
        "train.dense: Input should be 'all_reduce', 'local_sgd', 'sharded', 'shards' or 'pipeline' (got 'all')",
        "train.dense_optimizer.lr: Input should be greater than 0 (got -1.0)",
    ]


def test_a_set_under_an_old_name_is_one_of_the_present_name():
    job = validate(TrainerJob, RAW, only_known=True)
    assert after_set(job, {}, {OLD_LR: 0.5}).dense.optimizer.lr == 0.5
    assert with_overrides(job, {OLD_LR: 0.5}) == with_overrides(job, {LR: 0.5})
    assert after_set(job, {OLD_LR: 0.5}, {LR: 0.25}).dense.optimizer.lr == 0.25
    assert after_set(job, {LR: 0.5}, {OLD_LR: 0.25}).dense.optimizer.lr == 0.25
    with pytest.raises(SpecError, match=r"dense.accumulate: cannot be set while the job runs"):
        after_set(job, {}, {"train.accumulate": 2})


def test_an_override_of_an_old_log_remains_until_the_file_changes_its_key_under_either_name():
    assert remaining({OLD_LR: 0.5}, RAW, RAW) == {LR: 0.5}
    changed = {"optimizer": {"kind": "adam", "lr": 0.2}}
    assert remaining({OLD_LR: 0.5}, RAW, {**RAW, "dense": changed}) == {}
    assert remaining({OLD_LR: 0.5}, RAW, {**RAW, "train": {"dense_optimizer": changed["optimizer"]}}) == {}
    torn = {"train": {"dense_optimizer": {"kind": "sgd"}}}  # not whole: without defaults
    assert remaining({OLD_LR: 0.5}, {}, torn) == {}


def test_the_page_offers_the_present_name():
    assert LR in hot_keys({**RAW, **OLD}) and OLD_LR not in hot_keys({**RAW, **OLD})


def test_a_job_file_with_old_names_is_loaded(tmp_path):
    text = NEWS.read_text()
    old = text.replace("\n[dense]\noptimizer", "dense_optimizer")
    assert old != text and "dense" not in tomllib.loads(old)
    (tmp_path / "job.toml").write_text(old)
    (tmp_path / "new.toml").write_text(text)
    assert load_job(tmp_path / "job.toml").spec == load_job(tmp_path / "new.toml").spec
