"""From the samples of a pass to questions about rows, and from shows and clicks to the floats of a slot; what is
refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.features.served_events import describe_features
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import ColumnsPipe, DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.service.predict.hosts import check_statistics
from headrace.service.spec.job import load_job
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.model_document import describe
from headrace.trainer.features.deduplication import Deduplicator, tables_of
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.row_statistics import fill_values, value_reference
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.spec.history_tables import remembered_of
from headrace.trainer.spec.slot_changes import slot_changes
from tests.fakes.ragged import ragged
from tests.integration.stream_job import SPEC, write_job
from tests.integration.stream_job import SPEC as STREAM
from tests.jobs import changed

SCHEMA = Schema.of(
    (
        DenseSlot(name="known", kind="dense", statistics=StatisticsSection(of=("words", "user"))),
        SparseSlot(name="user", table="people"),
        SparseSlot(name="words"),
        DenseSlot(name="again", kind="dense", statistics=StatisticsSection(of="user")),
        MetaSlot(name="click", kind="meta"),
        MetaSlot(name="shown", kind="meta"),
    )
)
TABLES = {
    "default": TableSection(dim=1, optimizer=Sgd(kind="sgd"), decay=1.0),
    "people": TableSection(dim=1, optimizer=Sgd(kind="sgd"), decay=1.0, show="shown"),
}
SAMPLES = st.tuples(
    st.lists(st.integers(0, 2), max_size=1),
    st.lists(st.integers(0, 2), max_size=3),  # words, maybe one of them twice
    st.sampled_from([0.0, 1.0, float("nan")]),
    st.sampled_from([0.0, 2.0, 4.0]),
)

BLOCKS = st.lists(st.lists(st.lists(SAMPLES, min_size=1, max_size=3), min_size=1, max_size=3), max_size=2)
"""Blocks of events of samples: user, words, click, shown."""


def soon():
    return Deadline.after(20)


class Blocks:
    """A PassReader of made blocks of events."""

    def __init__(self, passes):
        self._passes = passes

    def read(self, pass_number, segments, tally):
        tally.slots = SlotCounters(SCHEMA.emitted)
        for events in self._passes[pass_number - 1]:
            users, words, clicks, shown = zip(*(each for event in events for each in event), strict=True)
            event_B = np.repeat(np.arange(len(events)), [len(event) for event in events])
            meta = {"click": np.array(clicks, np.float32), "shown": np.array(shown, np.float32)}
            sparse = {"user": ragged(users), "words": ragged(words)}
            yield Samples(sparse, {}, meta, event_B, np.full(len(event_B), np.nan))

    def close(self):
        pass


def plain(passes):
    """The floats of every sample: a dictionary that reads the events in order."""
    known, rows = {}, []
    for event in (event for blocks in passes for events in blocks for event in events):
        for users, words, _, _ in event:
            pairs = [[known.get((of, sign), (0.0, 0.0)) for sign in signs] for of, signs in ((1, words), (0, users))]
            sums = [tuple(np.sum([(0.0, 0.0), *each], axis=0).tolist()) for each in pairs]
            rows.append([*value_reference(*sums[0]), *value_reference(*sums[1]), *value_reference(*sums[1])])
        for users, words, click, shown in event:
            for of, signs, show in ((0, users, shown), (1, words, 1.0)):
                for sign in signs:
                    shows, clicks = known.get((of, sign), (0.0, 0.0))
                    known[of, sign] = shows + show, clicks + (click if click == click else 0.0)
    return rows


def learn(shards, samples, tables):
    """A step of all samples, with gradients of 0: what a trainer pushes of their shows and clicks."""
    looks = [Deduplicator(table).lookup(samples) for table in tables]
    batch = shards.prepare({look.table.name: look.keys for look in looks}, learn=True)
    rows = shards.pull(batch, soon())
    pushed = {k.table.name: Gradients(0 * rows[k.table.name], k.show_U, k.click_U) for k in looks}
    shards.exchange(0, batch, pushed, None, StepScale(len(samples)), soon())


@settings(max_examples=40, deadline=None)
@given(st.lists(BLOCKS, min_size=1, max_size=3))
def test_every_sample_has_what_the_rows_of_its_ids_had_before(passes):
    shards, found = EmbeddedShards(ShardProcess.alone(TABLES, 1, histories=remembered_of(SCHEMA))), []
    tables = tables_of(SCHEMA, TABLES, "click")
    reader = HistoryReader(Blocks(passes), SCHEMA, shards, 20.0, tables)
    for number in range(1, len(passes) + 1):
        shards.open_pass(number, soon())
        reader.opened(number)
        blocks = list(reader.read(number, (), PassTally()))
        for samples in blocks:
            assert list(samples.dense) == ["known", "again"], "in the order of the schema"
            found += np.concatenate([samples.dense["known"], samples.dense["again"]], 1).tolist()
        if blocks:
            learn(shards, Samples.concat(blocks), tables)
        shards.close_pass(0, soon())
    shards.close()
    assert np.array_equal(np.array(found).reshape(-1, 6), np.array(plain(passes), np.float32).reshape(-1, 6))


@given(st.lists(st.tuples(st.floats(-2, 1e12), st.floats(-2, 1e12)), min_size=1, max_size=4))
def test_the_kernel_gives_the_values_of_its_twin(pairs):
    value_BC = np.empty((1, 2 * len(pairs)), np.float32)
    fill_values(np.array([[n for pair in pairs for n in pair]]), value_BC)
    wanted = [value for pair in pairs for value in value_reference(*pair)]
    assert value_BC[0].tolist() == np.array(wanted, np.float32).tolist()


def test_the_floats_are_those_of_paddle():
    assert value_reference(7.0, 1.0) == (math.log(8), math.log1p(1.0) - math.log1p(7.0))
    assert value_reference(0.0, 0.0) == (0.0, 0.0)


# --- the job file ----------------------------------------------------------------------------------------------------

KNOWN = 'statistics = { of = ["a", "history"] }'
GOOD = SPEC.replace("[[tasks]]", f'[[slots]]\nname = "known"\nkind = "dense"\n{KNOWN}\n\n[[tasks]]', 1)


@pytest.fixture
def load(tmp_path):
    def loaded(spec=GOOD):
        (tmp_path / "job.toml").write_text(spec)
        return load_job(tmp_path / "job.toml", ()).spec

    return loaded


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('["a", "history"]', '["a", "click"]', "statistics.of: 'click' is not a sparse slot that the pipe emits"),
        ('["a", "history"]', '["a", "a"]', "statistics.of: a slot is there twice"),
        ('["a", "history"]', "[]", "statistics.of"),
        ('name = "known"', 'name = "known"\nsize = 3', "size = 3 is not the 4 numbers of statistics"),
        (KNOWN, f'{KNOWN}\ncounters = {{ key = "a", windows = ["all"], what = ["shows"] }}', "are two slots"),
    ],
)
def test_statistics_that_do_not_fit_are_refused_with_their_key(load, old, new, said):
    with pytest.raises(SpecError) as caught:
        load(GOOD.replace(old, new, 1))
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", ['mode = "async"', 'mode = "geo"\nk_steps = 3'])
def test_statistics_are_for_every_mode(load, mode):
    sgd = 'dense.strategy = "shards"\ndense.optimizer = { kind = "sgd" }\n'
    asked = GOOD.replace("[train]", f"[train]\n{mode}", 1).replace(
        "dim = 4", 'dim = 4\noptimizer = { kind = "sgd" }', 1
    )
    job = load(sgd + asked)
    assert Schema.of(job.slots).by_name["known"].entry.statistics is not None and job.train.mode != "sync"


def test_a_table_with_the_name_of_statistics_is_refused(load):
    own = GOOD.replace('names = ["a", "b"]', 'names = ["a", "b"]\ntable = "statistics-a"', 1)
    own = own.replace("[tables.default]", "[tables.statistics-a]\n\n[tables.default]", 1)
    with pytest.raises(SpecError, match="tables.statistics-a: is the name of the statistics of slot 'a'; rename it"):
        load(own)


def test_statistics_have_no_table_on_shards(load):
    job = load()
    schema = Schema.of(job.slots)
    assert remembered_of(schema) == {"statistics-a": "default", "statistics-history": "default"}
    assert schema.by_name["known"].entry.size == 4 and "known" not in schema.emitted.by_name
    described = describe(schema, job.tables, job.tasks, ExportSection())
    (told,) = (slot for slot in described["slots"] if "statistics" in slot)
    assert told["statistics"]["of"] == ["a", "history"] and told["size"] == 4
    assert "sends the floats in the slot" in described["rules"]["statistics"]


def test_events_have_no_field_for_a_slot_with_statistics():
    entries = [SparseSlot(name="user"), DenseSlot(name="known", kind="dense", statistics=StatisticsSection(of="user"))]
    described = describe_features(ColumnsPipe(kind="columns"), Schema.of(entries))
    assert [slot["name"] for slot in described["slots"]] == ["user"]


def test_a_slot_without_statistics_is_written_as_before():
    assert "statistics" not in DenseSlot(name="d", kind="dense").model_dump(mode="json")
    (known,) = SCHEMA.statistics[:1]
    assert DenseSlot.model_validate(known.entry.model_dump(mode="json")) == known.entry


def test_other_rows_make_another_slot(load):
    other = GOOD.replace('["a", "history"]', '["b", "history"]')
    (why,) = slot_changes(Schema.of(load().slots), Schema.of(load(other).slots)).altered.values()
    assert why.startswith("statistics was")


def test_predictors_without_the_files_of_a_commit_cannot_read_statistics(tmp_path):
    known = {"name": "known", "kind": "dense", "statistics": {"of": ["a"]}}
    path = write_job(tmp_path, num_parts=1, num_lines=1, spec=changed(STREAM, {"metrics.gauc_by": None}, slots=[known]))
    spread = ['cluster={launcher="external"}', 'store={path="store", parts="object", mirror="s3://bucket/m"}']
    job = load_job(path, spread)
    asked = PredictionRequest(input={"paths": ["part-*.txt"]}, output=str(tmp_path / "out"))
    check_statistics(asked, job)
    with pytest.raises(SpecError, match="'known' holds statistics of rows.*on = \"here\""):
        check_statistics(asked.model_copy(update={"on": "cluster"}), job)
    check_statistics(asked.model_copy(update={"on": "cluster"}), load_job(path))
