"""A stream in which 30 % of the values are new each day ends with the rows that its rule says, on any shards."""

import time
from dataclasses import replace

import pytest

from headrace.dataset.spec.config import SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.table_operations import SetTables, ShrinkRows
from headrace.pserver.server.commands import CountRows, Operate
from headrace.trainer.journal.records import ShrinkOperation
from headrace.trainer.rank0 import shrinks
from headrace.trainer.rank0.operations import ClosingPass
from headrace.trainer.rank0.shrinks import Shrinks
from tests.contract import shards_world as w
from tests.contract.test_shards import SOME, SOME_IDS

ALIVE, NEW, DAYS, PASSES = 200, 60, 5, 3
"""Values seen each day, those of them that are new, and passes in which a day's are seen."""
SCHEMA = Schema.of([SparseSlot(name="item")])
GROUP = SCHEMA.by_name["item"].group


class Job:
    """The rows of one slot, trained and aged pass by pass."""

    def __init__(self, shards, table):
        self.shards, self.tables, self.version, self.ops = shards, {"default": table}, 0, []
        self.shrinking = Shrinks(lambda: self.tables, SCHEMA, shards)

    def run(self, days):
        for day in days:
            for part in range(PASSES):
                values = range(day * NEW + part, day * NEW + ALIVE, PASSES)
                w.train(self.shards, self.next, [{"default": w.keys(*values, group=GROUP)}], seed=1, steps=1, day=day)
                self.close(day)

    @property
    def next(self):
        return self.version + 1

    def close(self, day):
        self.version += 1
        closing = ClosingPass(
            version=self.version, day=day, event_time_s=None, pass_times_s=None, wall_s=0.0,
            stats=self.shards.call(CountRows(), w.soon()).tables, positions={}, metrics={}, num_samples=1, ended=False,
            days=[day], signals=["slot.item"],
        )  # fmt: skip
        self.shrinking.saw(closing)
        for operation in self.due(closing):
            self.ops.append(operation.op)
            if isinstance(operation, ShrinkOperation):
                shrink = ShrinkRows(table="default", at_once=operation.at_once)
                self.shards.call(Operate(self.version, [shrink]), w.soon())
            self.shrinking.acted(self.version, operation, False)

    def due(self, closing):
        """What is logged, once rows are counted: as where training went on until then."""
        deadline = w.soon()
        while not (found := self.shrinking.due(closing, ())) and self.shrinking.wants_pass(False):
            deadline.check("counting rows")
            time.sleep(0.001)
            closing = replace(closing, stats=self.shards.call(CountRows(), w.soon()).tables)
        return found

    @property
    def rows(self):
        """Rows, once those that shrinks took are removed."""
        deadline = w.soon()
        while (stats := self.shards.call(CountRows(), deadline).tables["default"]).sweeping:
            deadline.check("removing rows")
            time.sleep(0.001)
        return stats.num_rows


def expected(last_day, after_days):
    """Values seen within the rule's days, as of the day that began last."""
    return len({value for day in range(last_day - after_days, last_day + 1) for value in values_of(day)})


def values_of(day):
    return range(day * NEW, day * NEW + ALIVE)


@pytest.mark.parametrize("small", [True, False], ids=["at the close", "in the background"])
@pytest.mark.parametrize("kind", SOME, ids=SOME_IDS)
@pytest.mark.parametrize("after_days", [0, 1])
def test_five_days_of_turnover_end_with_the_rows_that_the_rule_says(kind, small, after_days, monkeypatch):
    if not small:
        monkeypatch.setattr(shrinks, "SMALL_ROWS", 0)
    table = TableSection(dim=4, delete_after_days=after_days)
    with w.job(kind, tables={"default": table}, groups={"item": GROUP}) as world:
        job = Job(world.one, table)
        job.run(range(DAYS))
        assert job.ops == ["shrink"] * (DAYS - 1 - after_days) and not job.shrinking.status().held
        assert job.rows == expected(DAYS - 1, after_days)


def test_the_same_stream_under_a_rule_that_was_just_made_stricter_waits_and_then_goes_on():
    loose, strict = (TableSection(dim=4, delete_after_days=days) for days in (3, 0))
    with w.job(0, tables={"default": loose}, groups={"item": GROUP}) as world:
        job = Job(world.one, loose)
        job.run(range(4))
        world.one.call(Operate(job.version, [SetTables(tables={"default": strict.model_dump(mode="json")})]), w.soon())
        job.tables["default"] = strict
        job.run([4])
        assert job.ops == ["hold"] and job.rows == ALIVE + 4 * NEW
        job.shrinking.acted(
            job.version, job.shrinking.asked({"op": "shrink", "id": "x", "table": "default", "allow": True}), False
        )
        world.one.call(Operate(job.version, [ShrinkRows(table="default", at_once=True)]), w.soon())
        job.run([5, 6])
        assert job.ops == ["hold", "shrink", "shrink"] and job.rows == expected(6, 0)
