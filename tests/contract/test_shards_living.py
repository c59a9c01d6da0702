"""Tables that admit, extend, age, shrink, freeze and clear give the same bits on any number of shards and ranks."""

import pytest

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ClearSlot,
    ForgetRow,
    FreezeSlot,
    SetTables,
    ShrinkRows,
    UnfreezeSlot,
)
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.server.commands import CountRows, DigestRows, Operate, RestoreCommit
from tests.contract import shards_world as w
from tests.contract.test_shards import SOME, SOME_IDS, some_batches

LIVING = TableSection(
    dim=4,
    optimizer=Adagrad(per="element"),
    admission=(CountEntry(kind="count", n=3, exact=True),),
    extend_at=2.0,
    decay=0.5,
)
TABLES = {
    "default": LIVING,
    "other": TableSection(dim=3, decay=0.7, delete_below=0.5, extend_at=1.5, slots={"rare": SlotLife(decay=0.1)}),
}

CHANGES = {2: [FreezeSlot], 4: [UnfreezeSlot, ClearSlot]}
"""By pass, changes of the slot that all keys are of."""


def live(world, num_passes, steps=3, changes=CHANGES, settings=None, after=0):
    """Passes with operations between them; what every close and digest said. `settings`: set in pass 3."""
    said = []
    for number in range(after + 1, num_passes + 1):

        def train(rank, shards, number=number):
            batches = some_batches(rank, steps, seed=number)
            rows, closes = w.train(shards, number, batches, seed=number + rank, steps=steps, day=number // 2)
            return [{name: table.tolist() for name, table in each.items()} for each in rows], sorted(closes)

        read = world.each(train)
        operations = [ShrinkRows(table="other", at_once=number % 2 == 0), AdvanceDay(to=number)]
        key = some_batches(0, 1, seed=number)[0]["default"]
        operations.append(ForgetRow(table="default", group=1, key=int(key.keys_U[0])))
        operations += [change(slot="a", table="default", group=1) for change in changes.get(number, ())]
        operations += [settings] if settings is not None and number == 3 else []
        world.one.call(Operate(number, operations), w.soon())
        said.append(([each for each, _ in read], world.one.call(DigestRows(), w.soon())))
    return said


def tables_of(memory):
    return {name: table.model_copy(update={"memory": memory, "slots": {}}) for name, table in TABLES.items()}


@pytest.mark.parametrize("kind", SOME[1:], ids=SOME_IDS[1:])
@pytest.mark.parametrize("memory", [None, 8 << 20])
def test_one_rank_reads_and_ends_with_the_same_on_any_number_of_shards(kind, memory):
    with w.job(0, tables=tables_of(None)) as world:
        expected = live(world, 6)
    with w.job(kind, tables=tables_of(memory)) as world:
        assert live(world, 6) == expected
    assert all(expected[-1][1].values())


def test_three_ranks_end_with_the_same_on_any_number_of_shards():
    said = []
    for kind in (1, 3):
        with w.job(kind, num_ranks=3, tables=TABLES, groups={"rare": 2}) as world:
            said.append(live(world, 5))
            assert 0 < world.one.call(CountRows(), w.soon()).tables["default"].num_rows < 60
    assert said[0] == said[1] and len({digest["default"] for _, digest in said[0]}) == 5


@pytest.mark.parametrize("kind", SOME, ids=SOME_IDS)
def test_a_commit_of_living_tables_is_restored_onto_another_number_of_shards(kind, tmp_path):
    with w.job(0, tables=tables_of(None)) as world:
        expected = live(world, 6)
    parts = []
    with w.job(2, tables=tables_of(None), live=tmp_path / "first") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        live(world, 3)
        parts = w.commit(world.one, tmp_path / "commit", 3)
    with w.job(kind, tables=tables_of(8 << 20), live=tmp_path / "second") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 3), w.soon())
        assert world.one.call(DigestRows(), w.soon()) == expected[2][1]
        counted = world.one.call(CountRows(), w.soon()).tables
        assert {name: stats.frozen_groups for name, stats in counted.items()} == {"default": (1,), "other": ()}


@pytest.mark.parametrize("kind", SOME[1:], ids=SOME_IDS[1:])
def test_weight_decay_that_is_set_goes_on_alike_on_another_number_of_shards(kind, tmp_path):
    weak, strong = (
        {name: each.model_copy(update={"weight_decay": decay}) for name, each in tables_of(None).items()}
        for decay in (0.25, 0.5)
    )
    settings = SetTables(tables={name: each.model_dump(mode="json") for name, each in strong.items()})
    with w.job(0, tables=weak) as world:
        expected = live(world, 6, settings=settings)
    with w.job(2, tables=weak, live=tmp_path / "first") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        assert live(world, 4, settings=settings) == expected[:4]
        parts = w.commit(world.one, tmp_path / "commit", 4)
    with w.job(kind, tables=weak, live=tmp_path / "second") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 4), w.soon())
        world.one.call(Operate(4, [settings]), w.soon())
        assert live(world, 6, after=4) == expected[4:]
