"""Slots with histories or counters in a job file: what is refused, and the tables that shards hold for them."""

import pytest

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.service.spec.job import load_job
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.model_document import describe
from headrace.trainer.spec.history_tables import keyed_like, remembered_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from tests.integration.stream_job import SPEC

HISTORY = 'history = { key = "a", of = "b", last = 7, when = "click" }'
SLOT = f'[[slots]]\nname = "clicked"\n{HISTORY}\n\n[[tasks]]'
GOOD = SPEC.replace("[[tasks]]", SLOT, 1)


COUNTERS = 'counters = { key = "a", windows = ["all"], click = "click" }'
COUNTED = SPEC.replace("[[tasks]]", f'[[slots]]\nname = "counts"\nkind = "dense"\n{COUNTERS}\n\n[[tasks]]', 1)


@pytest.fixture
def load(tmp_path):
    def loaded(spec=GOOD, *overrides):
        (tmp_path / "job.toml").write_text(spec)
        return load_job(tmp_path / "job.toml", overrides).spec

    return loaded


def test_a_history_has_a_table_of_its_own_on_the_shards(load):
    job = load()
    schema, tables = Schema.of(job.slots), tables_on_shards(job.tables, job.dense, job.slots)
    assert list(tables) == ["default", "history-clicked"] and tables["history-clicked"].dim == 15
    assert remembered_of(schema) == {"history-clicked": 7}
    groups = {slot.name: slot.group for slot in schema.sparse}
    assert list(keyed_like(schema, "default", groups["a"])) == ["history-clicked"]
    assert not list(keyed_like(schema, "default", groups["b"]))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('key = "a"', 'key = "click"', "history.key: 'click' is not a sparse slot that the pipe emits"),
        ('of = "b"', 'of = "clicked"', "history.of: 'clicked' is not a sparse slot that the pipe emits"),
        ('when = "click"', 'when = "d"', "history.when: 'd' is not a meta slot with a number"),
        ("last = 7", "last = 1001", "history.last"),
        ('name = "clicked"', 'name = "clic.ked"', "names a table: give it at most 56 letters"),
        ('name = "clicked"', 'name = "clicked"\nvalues = "string"', "values: is 'string'; slot 'b' has 'uint64'"),
        ('name = "clicked"', 'name = "clicked"\ntable = "other"', "a history has the rows of slot 'b'"),
        ("[tables.default]", "[tables.history-clicked]\n[tables.default]", "tables.history-clicked"),
    ],
)
def test_a_history_that_does_not_fit_is_refused_with_its_key(load, old, new, said):
    with pytest.raises(SpecError) as caught:
        load(GOOD.replace(old, new, 1))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('key = "a"', 'key = "click"', "counters.key: 'click' is not a sparse slot that the pipe emits"),
        ('key = "a"', 'key = ["a", "d"]', "counters.key: 'd' is not a sparse slot that the pipe emits"),
        ('click = "click"', 'click = "d"', "counters.click: 'd' is not a meta slot with a number"),
        ('["all"]', '["1h"]', "counters.windows: source 'lines' has no event_time, which windows need"),
        ('name = "counts"', 'name = "cou.nts"', "names a table: give it at most 56 letters"),
        ("[tables.default]", "[tables.counters-counts]\n[tables.default]", "tables.counters-counts"),
    ],
)
def test_counters_that_do_not_fit_are_refused_with_their_key(load, old, new, said):
    with pytest.raises(SpecError) as caught:
        load(COUNTED.replace(old, new, 1))
    assert said in str(caught.value)


def test_counters_have_a_table_of_their_own_and_the_model_tells_of_them(load):
    job = load(COUNTED)
    schema, tables = Schema.of(job.slots), tables_on_shards(job.tables, job.dense, job.slots)
    assert list(tables) == ["default", "counters-counts"] and tables["counters-counts"].dim == 2
    assert list(keyed_like(schema, "default", schema.by_name["a"].group)) == ["counters-counts"]
    pair = Schema.of(load(COUNTED.replace('key = "a"', 'key = ["a", "b"]')).slots)
    assert not list(keyed_like(pair, "default", pair.by_name["b"].group))
    described = describe(schema, job.tables, job.tasks, ExportSection())
    (told,) = (slot for slot in described["slots"] if "counters" in slot)
    assert told["size"] == 3 and told["counters"]["windows"] == ["all"] and told["counters"]["prior"] == 0.05
    assert "sends the floats in the slot" in described["rules"]["counters"]


def test_the_model_tells_of_histories(load):
    job = load(f'{GOOD}\n[predict]\noutput = "out"\ninput = {{ paths = ["part-*.txt"] }}\n')
    described = describe(Schema.of(job.slots), job.tables, job.tasks, ExportSection())
    (told,) = (slot["history"] for slot in described["slots"] if "history" in slot)
    assert (told["key"], told["of"], told["last"], told["when"]) == ("a", "b", 7, "click")
    assert "sends the signs in the slot" in described["rules"]["histories"]
    assert "histories" not in describe(Schema.of(load(SPEC).slots), job.tables, job.tasks, ExportSection())["rules"]
