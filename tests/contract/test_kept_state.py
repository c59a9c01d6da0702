"""A prediction reads the histories and counters that the next pass of the training would give the sample."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.keys import key_of_reference
from headrace.pserver.config import ShardProcess, Wire
from headrace.pserver.protocol.histories import counters_table_of, table_of
from headrace.pserver.protocol.shards import Keys
from headrace.pserver.protocol.table_operations import ForgetRow
from headrace.pserver.protocol.wire import wires_of
from headrace.pserver.server.commands import DigestRows, Operate
from headrace.service.spec.job import load_job
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.kept_state import filled_as_of
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.spec.history_tables import history_tables, remembered_of
from tests.contract import shards_world as w
from tests.contract.feed_world import fed
from tests.fakes.ragged import ragged
from tests.integration.stream_job import LIVING
from tests.jobs import changed

FILLED = """
[[slots]]
name = "clicked"
history = { key = "a", of = "b", last = 3, when = "click" }

[[slots]]
name = "counts"
kind = "dense"
counters = { key = "a", windows = ["1m", "all"], half_lives = ["2m"], click = "click" }

[[slots]]
name = "pairs"
kind = "dense"
counters = { key = ["a", "b"], what = ["shows"], windows = ["all"] }
"""
SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 3),  # the number of the key; 3: none
        st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
        st.booleans(),
        st.sampled_from([float("nan"), 5.0, 70.5, 200.0, 9000.0]),
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(changed(LIVING, {}, slots=tomllib.loads(FILLED)["slots"]))
    return Schema.of(load_job(path).spec.slots)


def samples_of(schema, drawn):
    """Each drawn sample is an event of its own."""
    size = len(drawn)
    sparse = {slot.name: ragged([[]] * size) for slot in schema.emitted.sparse}
    sparse |= {"a": ragged([[] if a == 3 else [a, 9] for a, *_ in drawn]), "b": ragged([b for _, b, *_ in drawn])}
    return Samples(
        sparse,
        {slot.name: np.zeros((size, slot.entry.size), np.float32) for slot in schema.emitted.dense},
        {"click": np.array([click for _, _, click, _ in drawn], np.float32)},
        np.arange(size),
        np.array([time_s for *_, time_s in drawn], np.float64),
    )


def bits(samples):
    found = {name: (column.values_N.tolist(), column.offset_B1.tolist()) for name, column in samples.sparse.items()}
    return found, {name: values.tobytes() for name, values in samples.dense.items()}


class Blocks:
    """A PassReader of blocks that are there."""

    def __init__(self, blocks):
        self._blocks = blocks

    def read(self, pass_number, segments, tally):
        return iter(self._blocks)

    def close(self):
        pass


def trained(schema, shards, number, block):
    """The samples of one pass as training gets them."""
    shards.open_pass(number, w.soon())
    reader = HistoryReader(Blocks([block]), schema, shards, 20)
    reader.opened(number)
    (found,) = reader.read(number, [], PassTally())
    shards.close_pass(number, w.soon())
    return found


def rows_from(shards):
    def rows_of(table, group, keys_U):
        return shards.look({table: Keys(keys_U, np.full(len(keys_U), group, np.uint16))}, w.soon())[table]

    return rows_of


@pytest.mark.parametrize("num_shards", [0, 2, w.Narrow(2)])
@settings(max_examples=15)
@given(passes=st.lists(SAMPLES, min_size=1, max_size=3), asked=SAMPLES)
def test_a_prediction_reads_what_the_next_pass_would_give(schema, num_shards, passes, asked):
    wire = Wire.BFLOAT16 if isinstance(num_shards, w.Narrow) else Wire.FLOAT32
    more = {"histories": remembered_of(schema), "wire": wire}
    with w.job(num_shards, tables=history_tables(schema), **more) as world:
        for number, drawn in enumerate(passes, 1):
            trained(schema, world.one, number, samples_of(schema, drawn))
        before = world.one.call(DigestRows(), w.soon())
        predicted = filled_as_of(samples_of(schema, asked), schema, rows_from(world.one))
        assert world.one.call(DigestRows(), w.soon()) == before, "nothing is remembered"
        together = replace(samples_of(schema, asked), event_B=np.zeros(len(asked), np.int64))
        learnt = trained(schema, world.one, len(passes) + 1, together)  # samples of one event do not see each other
        assert bits(predicted) == bits(learnt)


@pytest.mark.parametrize("wire", list(Wire))
def test_histories_and_counters_travel_as_they_are(schema, wire):
    found = wires_of({**w.TABLES, **history_tables(schema)}, wire)
    assert {found[name].kind for name in (table_of("clicked"), counters_table_of("counts"))} == {Wire.FLOAT32}
    assert found["default"].kind is wire


def process_of(schema, live, generation):
    """The shard of a job with a live feed."""
    tables, memories = history_tables(schema), remembered_of(schema)
    return ShardProcess.alone(tables, w.SEED, live=live, generation=generation, histories=memories)


class Held:
    """The rows of a replica's tables, by key."""

    def __init__(self):
        self.tables = {}

    def apply(self, update):
        assert update.memories >= set(update.tables)
        for name, table in update.tables.items():
            rows = self.tables.setdefault(name, {})
            if update.whole:
                rows.clear()
            for key in table.gone.tolist():
                rows.pop(key, None)
            for part in table.rows:
                rows.update(zip(part.keys_U.tolist(), part.rows_UD.copy(), strict=True))
        return update.version

    def rows_of(self, schema):
        widths = {name: section.dim for name, section in history_tables(schema).items()}

        def rows_of(table, group, keys_U):
            none = np.zeros(widths[table], np.float32)
            found = [self.tables.get(table, {}).get(key, none) for key in keys_U.tolist()]
            return np.array(found, np.float32).reshape(len(keys_U), widths[table])

        return rows_of


def await_version(feed, rank0, held, version):
    """Follow the feed up to a version, which rank 0 tells as its loop does."""
    deadline, at = w.Deadline.after(20), 0
    while at < version:
        deadline.check(f"version {version}, at {at}")
        rank0.tick(version)
        if (update := feed.next(w.Deadline.after(0.2))) is not None:
            at = held.apply(update)


def test_a_replica_follows_histories_and_counters_also_after_a_crash(schema, tmp_path):
    draw = np.random.default_rng(5)
    times = (5.0, 70.5, float("nan"))
    drawn = [
        [(int(a), draw.integers(1, 1 << 62, 2).tolist(), bool(a % 2), times[a % 3]) for a in draw.integers(0, 3, 4)]
        for _ in range(4)
    ]
    asked, held = samples_of(schema, [each for of in drawn for each in of]), Held()
    group = schema.by_name["a"].group
    forget = ForgetRow(table="history-clicked", group=group, key=key_of_reference(1, group))

    def same(shards):
        now = bits(filled_as_of(asked, schema, rows_from(shards)))
        assert bits(filled_as_of(asked, schema, held.rows_of(schema))) == now
        return now

    with fed(process_of(schema, tmp_path / "live-1", 1), (tmp_path, [], 0)) as (shards, rank0, find):
        feed = FeedUpdates(find)
        trained(schema, shards, 1, samples_of(schema, drawn[0]))
        await_version(feed, rank0, held, 1)
        first = same(shards)
        parts = w.commit(shards, tmp_path / "commit", 1)
        trained(schema, shards, 2, samples_of(schema, drawn[1]))
        await_version(feed, rank0, held, 2)
        second = same(shards)
        feed.close()
    assert first != second
    with fed(process_of(schema, tmp_path / "live-2", 2), (tmp_path / "commit", parts, 1)) as (shards, rank0, find):
        feed = FeedUpdates(find, feed.held)  # it goes on with what it has
        trained(schema, shards, 2, samples_of(schema, drawn[1]))
        trained(schema, shards, 3, samples_of(schema, drawn[2]))
        shards.call(Operate(3, [forget]), w.soon())
        await_version(feed, rank0, held, 3)
        assert same(shards) != second and forget.key not in held.tables["history-clicked"]
        feed.close()
