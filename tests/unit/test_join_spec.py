"""The section `join` in a job file: what is refused, and the table that shards hold for it."""

import pytest

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.service.spec.job import load_job
from headrace.trainer.spec.changes import significant_keys
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from tests.faults.test_joins_killed import SPEC

HISTORY = '[[slots]]\nname = "past"\nhistory = { key = "user", of = "item", last = 2 }\n\n[join]'


@pytest.fixture
def load(tmp_path):
    def loaded(spec=SPEC, *overrides):
        (tmp_path / "job.toml").write_text(spec)
        return load_job(tmp_path / "job.toml", overrides).spec

    return loaded


def test_a_join_has_a_table_of_its_own_on_the_shards(load):
    job = load()
    tables = tables_on_shards(job.tables, job.dense, job.slots, job.join)
    assert list(tables) == ["default", JOIN_TABLE] and tables[JOIN_TABLE].dim == 7 + 64 // 4
    assert windows_of(job.join) == {JOIN_TABLE: 60.0}
    assert windows_of(None) == {} and list(tables_on_shards(job.tables, job.dense, job.slots)) == ["default"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('label = "click"\nkey', 'label = "key"\nkey', "join.label: 'key' is not the label of a task"),
        ('key = "key"', 'key = "user"', "join.key: 'user' is not a meta slot of type"),
        ('key = "key"', 'key = "click"', "join.key: 'click' is not a meta slot of type"),
        ('event_time = { slot = "ts" }', "", "join.window: a join needs the time of each event"),
        ('window = "60s"', 'window = "60s"\nkeep_negatives = 0.1', "join.keep_negatives: below 1 the weights"),
        (
            "max_sample_bytes = 64",
            'keep_negatives = 0.1\n\n[sample]\nweight = "ts"',
            "sample.weight: 'ts' is not a meta slot",
        ),
        ('window = "60s"', 'window = "0s"', "join.window"),
        ('window = "60s"', 'window = "60s"\nlearn = "never"', "join.learn"),
        ("max_sample_bytes = 64", "max_sample_bytes = 63", "join.max_sample_bytes"),
        ("max_sample_bytes = 64", "max_sample_bytes = 16001", "join.max_sample_bytes"),
        ("[join]", HISTORY, "join: slot 'past' is filled from earlier samples, and a job with a join"),
        ('max_ahead = "1h"', 'max_ahead = "0s"', "join.max_ahead"),
        ('max_ahead = "1h"', 'max_ahead = "59m"', "join.max_ahead: is 3540 s, less than passes.max_skew = 3600 s"),
        ("[tables.default]", f"[tables.{JOIN_TABLE}]\n[tables.default]", f"tables.{JOIN_TABLE}"),
    ],
)  # fmt: skip
def test_a_join_that_does_not_fit_is_refused_with_its_key(load, old, new, said):
    with pytest.raises(SpecError) as caught:
        load(SPEC.replace(old, new, 1))
    assert said in str(caught.value)


def test_negatives_at_once_need_probabilities(load):
    at_once = SPEC.replace('key = "key"', 'key = "key"\nlearn = "at_once"')
    assert load(at_once).join.learn == "at_once"
    with pytest.raises(SpecError, match=r'tasks\.0\.loss: is .mse.; join\.learn = "at_once"'):
        load(at_once.replace('name = "ctr"', 'name = "ctr"\nloss = "mse"'))


def test_samples_that_wait_keep_their_slots(load):
    was = load().model_dump(mode="json", by_alias=True)
    longer = load(SPEC.replace('window = "60s"', 'window = "90s"')).model_dump(mode="json", by_alias=True)
    assert significant_keys(was, longer) == ["join.window"]
    more = SPEC.replace('name = "item"', 'name = "item"\n\n[[slots]]\nname = "hour"')
    other = {**was, "join": None}
    for changed, key in ((load(more).model_dump(mode="json", by_alias=True), "slots"), (other, "join")):
        with pytest.raises(SpecError, match=key):
            significant_keys(was, changed)
    assert Schema.of(load(more).slots).by_name["hour"]
