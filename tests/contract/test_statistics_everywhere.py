"""Statistics of rows outside training: a prediction by a commit, and a replica of the live feed, read the very floats
that the next pass would give a sample."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.dataset.spec.schema import Schema
from headrace.keys import key_of_reference
from headrace.pserver.config import ShardProcess, SlotLife, TableSection
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.protocol.table_operations import ForgetRow, ShrinkRows
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.server.commands import Operate, RestoreCommit
from headrace.trainer.checkpoint.commits import Commit, name_of
from headrace.trainer.features.deduplication import Deduplicator, tables_of
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.kept_state import filled_as_of
from headrace.trainer.predict.commit_statistics import CommitStatistics
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.replica.replica_state import NOTHING
from headrace.trainer.spec.history_tables import remembered_of
from tests.contract import shards_world as w
from tests.contract.feed_world import fed
from tests.fakes.manifests import manifest_of
from tests.fakes.ragged import ragged

SCHEMA = Schema.of(
    (
        SparseSlot(name="user", table="people"),
        SparseSlot(name="words", max_len=3),
        DenseSlot(name="known", kind="dense", statistics=StatisticsSection(of=("words", "user"))),
        DenseSlot(name="again", kind="dense", statistics=StatisticsSection(of="user")),
        MetaSlot(name="click", kind="meta"),
    )
)
TABLES = {
    "default": TableSection(dim=1, optimizer=Sgd(kind="sgd"), decay=0.83),
    "people": TableSection(dim=2, optimizer=Sgd(kind="sgd"), decay=0.9, slots={"user": SlotLife(decay=0.97)}),
}
"""Decayed numbers are no whole numbers of any power of 2: a product in another order has other bits."""
GROUPS = {slot.name: slot.group for slot in SCHEMA.sparse}
DAYS = (0, 1, 1, 4, 5)
"""The day at the end of each pass."""


def drawn(number, size=40):
    """The samples of a pass: each an event of its own."""
    draw = np.random.default_rng(number)
    sparse = {
        "user": ragged([[int(each)] for each in draw.integers(0, 9, size)]),
        "words": ragged([draw.integers(0, 30, draw.integers(0, 4)).tolist() for _ in range(size)]),
    }
    meta = {"click": draw.integers(0, 2, size).astype(np.float32)}
    return Samples(sparse, {}, meta, np.arange(size), np.full(size, np.nan))


ASKED = replace(drawn(77), event_B=np.zeros(40, np.int64))
"""Samples of one event: they do not see each other."""


class Blocks:
    """A PassReader of one block."""

    def __init__(self, block):
        self._block = block

    def read(self, pass_number, segments, tally):
        tally.slots = SlotCounters(SCHEMA.emitted)
        yield self._block

    def close(self):
        pass


def floats(shards, number, samples, *, learn, day=0):
    """The dense slots of a pass as training gives them; with `learn`, a step of its samples."""
    tables = tables_of(SCHEMA, TABLES, "click")
    shards.open_pass(number, w.soon())
    reader = HistoryReader(Blocks(samples), SCHEMA, shards, 20.0, tables)
    reader.opened(number)
    (found,) = reader.read(number, (), PassTally())
    if learn:
        looks = [Deduplicator(table).lookup(found) for table in tables]
        batch = shards.prepare({look.table.name: look.keys for look in looks}, learn=True)
        rows = shards.pull(batch, w.soon())
        pushed = {k.table.name: Gradients(0 * rows[k.table.name] + 1, k.show_U, k.click_U) for k in looks}
        shards.exchange(0, batch, pushed, None, StepScale(len(found)), w.soon())
    shards.close_pass(day, w.soon())
    return bits(found)


def bits(samples):
    return {name: values.tobytes() for name, values in samples.dense.items()}


def committed(shards, folder, version):
    """A commit of the shards, as rank 0 makes it."""
    parts = w.commit(shards, folder, version)
    files = {path: file for part in parts for path, file in part.files.items()}
    return Commit(folder, manifest_of(name_of("t1", version, 1), files=files, shards=parts))


def of_commit(commit, scratch):
    with CommitStatistics(commit, SCHEMA, TABLES, scratch) as known:
        return bits(filled_as_of(ASKED, SCHEMA, lambda table, _group, keys_U: known.of(table, keys_U)))


@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_prediction_by_a_commit_has_the_floats_of_the_next_pass(tmp_path, num_shards):
    more = {"histories": remembered_of(SCHEMA), "groups": GROUPS}
    with w.job(num_shards, tables=TABLES, live=tmp_path / "live", **more) as world:
        shards = world.one
        shards.call(RestoreCommit(tmp_path, [], 0), w.soon())
        for number, day in enumerate(DAYS, 1):
            floats(shards, number, drawn(number), learn=True, day=day)
        last = len(DAYS)
        shards.call(Operate(last, [ShrinkRows(table="default", delete_below=1.0)]), w.soon())
        commit = committed(shards, tmp_path / "commit", last)
        wanted = floats(shards, last + 1, ASKED, learn=False)
    assert of_commit(commit, tmp_path / "scratch") == wanted
    assert len(set(np.frombuffer(wanted["known"], np.float32).tolist())) > 20


def process_of(live, generation):
    """The shard of a job with a live feed."""
    memories = remembered_of(SCHEMA)
    return ShardProcess.alone(TABLES, w.SEED, live=live, generation=generation, histories=memories, groups=GROUPS)


class Held:
    """The statistics of rows of a replica, by table and key."""

    def __init__(self):
        self.rows, self.decays = {}, {}

    def apply(self, update):
        self.decays = update.decays
        assert sorted(self.decays) == sorted(remembered_of(SCHEMA))
        for name in self.decays:
            rows = self.rows.setdefault(name, {})
            if update.whole:
                rows.clear()
            table = update.tables.get(name, NOTHING)
            for key in table.gone.tolist():
                rows.pop(key, None)
            for part in table.rows:
                rows.update(zip(part.keys_U.tolist(), part.rows_UD.copy(), strict=True))
        return update.version

    def floats(self):
        def rows_of(table, _group, keys_U):
            found = [self.rows[table].get(key, np.zeros(3, np.float32)) for key in keys_U.tolist()]
            return self.decays[table].present(np.array(found, np.float32).reshape(-1, 3))

        return bits(filled_as_of(ASKED, SCHEMA, rows_of))


def await_version(feed, rank0, held, version):
    """Follow the feed up to a version, which rank 0 tells as its loop does."""
    deadline, at = w.Deadline.after(20), 0
    while at < version:
        deadline.check(f"version {version}, at {at}")
        rank0.tick(version)
        if (update := feed.next(w.Deadline.after(0.2))) is not None:
            at = held.apply(update)


def test_a_replica_of_the_feed_has_the_floats_of_training_also_after_a_crash(tmp_path):
    held = Held()
    with fed(process_of(tmp_path / "live-1", 1), (tmp_path, [], 0), TABLES) as (shards, rank0, find):
        feed = FeedUpdates(find)
        for number, day in enumerate(DAYS[:3], 1):
            floats(shards, number, drawn(number), learn=True, day=day)
            await_version(feed, rank0, held, number)
            if number == 2:
                commit = committed(shards, tmp_path / "commit", number)
                assert held.floats() == of_commit(commit, tmp_path / "scratch")
        feed.close()
    restore = commit.folder, commit.manifest.shards, 2
    with fed(process_of(tmp_path / "live-2", 2), restore, TABLES) as (shards, rank0, find):
        feed = FeedUpdates(find, feed.held)  # it goes on with what it has
        for number, day in enumerate(DAYS[2:], 3):
            floats(shards, number, drawn(number), learn=True, day=day)
        user = SCHEMA.by_name["user"]
        shards.call(
            Operate(5, [ForgetRow(table="people", group=user.group, key=key_of_reference(1, user.group))]), w.soon()
        )
        await_version(feed, rank0, held, 5)
        assert held.floats() == floats(shards, 6, ASKED, learn=False, day=DAYS[-1])
        floats(shards, 7, drawn(7, 0), learn=False, day=DAYS[-1] + 2)  # two days go by, and no row is touched
        await_version(feed, rank0, held, 7)
        assert held.floats() == floats(shards, 8, ASKED, learn=False, day=DAYS[-1] + 2)
        feed.close()
