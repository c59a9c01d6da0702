"""Every key of the job file has a class: what its change means for a job that has rows."""

import pytest

from headrace.service.spec.job import JobFile
from headrace.trainer.spec.change_classes import AT_ONCE, HOT, TABLE, ChangeClass, class_of, is_hot
from tests.unit.test_docs import keys_of


@pytest.fixture(scope="module")
def leaves():
    schema = JobFile.model_json_schema()
    keys = set(keys_of(schema, schema["$defs"]))
    return sorted(key for key in keys if not any(other.startswith(f"{key}.") for other in keys))


def test_every_key_of_the_job_file_has_a_class(leaves):
    assert len(leaves) > 150
    assert [key for key in leaves if class_of(key) is None] == []
    assert class_of("colour") is None
    assert class_of("trains.mode") is None


def test_every_line_of_the_table_is_reached_by_a_key(leaves):
    settings = [f"model.settings.{key}" for key in ("hidden", "towers", "cross_layers", "low_rank", "structure",
                                                    "bottom", "classes", "mode")]  # fmt: skip
    entries = [f"tables.*.admission.0.{key}" for key in ("n", "p", "score")]
    reached = {class_of(key).pattern for key in (*leaves, *settings, *entries)}
    assert [each.pattern for each in TABLE if each.pattern not in reached] == []


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("slots", ChangeClass.CARRIED),
        ("tables.default.dim", ChangeClass.NEW),
        ("tables.default.optimizer.lr", ChangeClass.HOT),
        ("tables.default.optimizer.kind", ChangeClass.NEW),
        ("tables.default.optimizer.beta1", ChangeClass.BETWEEN),
        ("tables.default.slots.user.decay", ChangeClass.HOT),
        ("tables.default.admission", ChangeClass.BETWEEN),
        ("dense.schedule.kind", ChangeClass.HOT),
        ("tables.default.schedule.kind", ChangeClass.HOT),
        ("cluster.wire", ChangeClass.BETWEEN),
        ("cluster.trainers", ChangeClass.AT_ONCE),
        ("model.settings.dropout", ChangeClass.BETWEEN),
        ("model.settings.hidden", ChangeClass.NEW),
        ("train.prefetch_batches", ChangeClass.AT_ONCE),
        ("train.batch_size", ChangeClass.BETWEEN),
        ("pipe.command", ChangeClass.BETWEEN),
        ("exports.serving.keep", ChangeClass.AT_ONCE),
    ],
)
def test_the_narrower_line_counts(key, change):
    assert class_of(key).change is change


def test_what_may_be_set_is_hot_in_the_table(leaves):
    assert all(class_of(key).change is ChangeClass.HOT for key in leaves if is_hot(key))
    assert {each.pattern for each in TABLE if each.change is ChangeClass.HOT} == set(HOT)
    assert not is_hot("tables.default.admission.x.n") and is_hot("tables.default.admission.2.n")
    assert not set(AT_ONCE) & set(HOT)
