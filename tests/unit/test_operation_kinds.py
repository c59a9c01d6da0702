"""Every kind of operation is whole: a check of its request, an effect, a line of the log page, a route and a command.

A new one fails here until it has an example, and says where it acts.
"""

import inspect
from typing import get_args

import pytest
import typer

from headrace.config import load_toml, validate
from headrace.pserver.protocol.table_operations import SLOT_CHANGES
from headrace.service.api import exports, jobs, tables
from headrace.service.cli import main
from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.guard_config import RollbackSection
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ExportedOperation,
    ExportOperation,
    ForgetOperation,
    HoldOperation,
    RequestedOperation,
    ResizeOperation,
    RollbackOperation,
    SetOperation,
    ShrinkOperation,
    SlotOperation,
)
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.requests import CHECKS
from tests.fakes.records import operation
from tests.unit import test_exporting, test_shrinking
from tests.unit.test_spec import NEWS, NO_TIME

ON_SLOTS = [SlotOperation(id="x", change=each(slot="user", table="default", group=0)) for each in SLOT_CHANGES]
EXAMPLES = [
    SetOperation(id="x", keys={"tables.default.optimizer.lr": 0.75}),
    ResizeOperation(id="x", keys={"cluster.shards": 3, "cluster.trainers": 2}),
    DayTickOperation(id="x", to=1),
    operation({"op": "shrink"}),
    ForgetOperation(id="x", slot="user", table="default", group=0, key=3),
    operation({"op": "export", "clears": True}),
    HoldOperation(table="default", rows=4, going=2, fraction=0.5, why="w"),
    operation({"op": "exported", "stream": "main", "type": "base"}),
    RollbackOperation(stream="main", version=1, timeline="t1", paths=["t1/x"], level=0.7, value=0.5, why="w"),
    *ON_SLOTS,
]
IN_FORCE = SetOperation, ResizeOperation, DayTickOperation, ShrinkOperation, ForgetOperation, ExportOperation
"""These change the job in force, or tables: JobInForce.act."""
DECIDED = {
    HoldOperation: lambda folder: test_shrinking.World().shrinking,
    ExportedOperation: lambda folder: exporting(folder),
    RollbackOperation: lambda folder: exporting(folder),
}
"""These change the state of a decider."""
ASKED = {
    SetOperation: ("setKeys", "set"),
    ResizeOperation: ("resizeJob", "resize"),
    DayTickOperation: ("tickDay", "day-tick"),
    ShrinkOperation: ("shrinkTable", "shrink"),
    ForgetOperation: ("forgetValue", "forget"),
    ExportOperation: ("makeExport", "export"),
}
"""By operation, its action in the OpenAPI document, and its command."""
BY_DECIDERS = {ShrinkOperation, ExportOperation}
"""Requests for these are checked by a decider."""


def exporting(folder):
    rollback = RollbackSection(falls=0.02)
    world = test_exporting.World(folder, streams={"main": ExportSection(base="1h", rollback=rollback)})
    world.close(time_s=10.0)
    return world.exporting


def test_every_kind_has_an_example():
    assert {type(each) for each in EXAMPLES} == {*get_args(ActingOperation)}
    assert {*IN_FORCE, *DECIDED, SlotOperation} == {*get_args(ActingOperation)}
    assert {*ASKED, SlotOperation} == {*get_args(RequestedOperation)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.op)
def test_every_kind_has_a_line_in_the_log_page(example):
    assert "__str__" in vars(type(example)), "not that of a dataclass"
    line = str(example)
    assert line and "\n" not in line and not line.startswith(type(example).__name__)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.op)
def test_every_kind_acts_on_the_job_on_tables_or_on_a_decider(example, tmp_path):
    if (make := DECIDED.get(type(example))) is not None:
        decider = make(tmp_path)
        before = decider.state()
        decider.acted(1, example, replaying=False)
        assert decider.state() != before
        return
    job = JobInForce(validate(TrainerJob, load_toml(NEWS, [NO_TIME]), only_known=True))
    before = job.overrides
    assert job.act(example) or job.overrides != before


def test_every_kind_that_clients_ask_for_has_a_check_a_route_and_a_command():
    routes = {each.operation_id for module in (exports, jobs, tables) for each in module.router.routes}
    commands = typer.main.get_command(main.cli).commands
    asked = [*ASKED.values(), *((f"{each.name}Slot", each.name) for each in SLOT_CHANGES)]
    assert {route for route, _ in asked} <= routes and {command for _, command in asked} <= {*commands}
    checked = {each.op for each in ASKED if each not in BY_DECIDERS} | {each.name for each in SLOT_CHANGES}
    assert {*CHECKS} == checked


@pytest.mark.parametrize("change", SLOT_CHANGES, ids=lambda each: each.name)
def test_a_change_of_a_slot_says_what_its_command_and_its_button_show(change):
    summary, _, effect = inspect.cleandoc(change.__doc__).partition("\n\n")
    assert change.__struct_config__.tag == change.name and "__str__" in vars(change)
    assert summary.endswith(".") and "\n" not in summary and effect.endswith(".")
