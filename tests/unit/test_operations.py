"""Operations: logged at once; each acts at one close, and exactly so in a replay."""

import threading
from itertools import count

import pytest

from headrace.codec import NotUnderstood, typed
from headrace.config import load_toml, validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import NotYet, SpecError
from headrace.keys import key_of_reference, sign_of
from headrace.pserver.config import LAST_DAY
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ClearSlot,
    ExportCut,
    ForgetRow,
    SetTables,
    ShrinkRows,
)
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.server.commands import CountRows, JobCounts
from headrace.trainer.config import TrainerJob
from headrace.trainer.job_status import OperationsStatus
from headrace.trainer.journal.job_history import JobHistory, ReplayedPass
from headrace.trainer.journal.log import Log, LogFull, RecordKind, read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import ForgetOperation, SlotOperation
from headrace.trainer.rank0 import operations
from headrace.trainer.rank0.job_in_force import JobInForce, cut_of
from headrace.trainer.rank0.operations import ClosingPass, OperationRunner, RankUpdate
from headrace.trainer.rank0.replay_log import LogPlanJournal, ReplayLog
from tests.fakes.records import close, operation
from tests.unit.test_spec import NEWS, NO_TIME

LR = "tables.default.optimizer.lr"
SET = {"op": "set", "id": "a", "keys": {LR: 0.5}}
FORGET = {"op": "forget", "id": "a", "slot": "user", "sign": 7}
ROW = {"table": "default", "group": 0, "keys": [1]}
EXPORT = {
    "op": "export", "id": None, "stream": "s", "type": "delta", "parent": {"name": "x", "version": 4, "timeline": "t1"},
    "all": False,
    "base_threshold": 0.1, "delta_threshold": 0.2, "delta_keep_days": 3, "clears": True, "tables": ["users"],
}  # fmt: skip


class Decider:
    """Logs the given operations, and records its calls."""

    name = "decider"

    def __init__(self):
        self.next, self.heard, self.wants = [], [], False

    def asked(self, body):
        if body.get("op") == "later":
            raise NotYet("counting")
        return operation(body) if body.get("op") == "export" else None

    def saw(self, close):
        self.heard.append(("saw", close.version))

    def due(self, close, ordered):
        self.heard.append(("due", [each.op for each in ordered]))
        due, self.next = self.next, []
        return due

    def acted(self, version, operation, replaying):
        self.heard.append(("acted", version, operation.op, replaying))

    def wants_pass(self, ended):
        return self.wants

    def state(self):
        return {"heard": len(self.heard)}

    def load_state(self, state):
        self.loaded = typed(dict[str, int], state, "its state")

    def status(self):
        return None


class Shards:
    def __init__(self):
        self.operated, self.counts = [], []

    def call(self, command, deadline):
        if isinstance(command, CountRows):
            return JobCounts(self.counts.pop(0), (), {})
        self.operated.append((command.version, list(command.operations)))


class World:
    """The operator of rank 0 over a log in `folder`, from generation to generation."""

    def __init__(self, folder, *overrides):
        self.folder, self.generations = folder, count(1)
        self.job = validate(TrainerJob, load_toml(NEWS, [NO_TIME, *overrides]), only_known=True)
        self.log, self.number = None, 0
        self.begin()

    def begin(self, state=None, replay=(), waiting=(), overrides=None, version=0):
        if self.log is not None:
            self.log.close()
        self.log = Log.claim(self.folder, next(self.generations), Deadline.after(5), timeline="t1")
        self.replay_log = ReplayLog(self.log, LogPlanJournal(self.log), replay, None, "fail", 0.0)
        self.shards, self.decider = Shards(), Decider()
        workers = {"cluster.trainers": 1, "cluster.shards": 2}
        self.operator = OperationRunner(JobInForce(self.job, workers), self.replay_log, self.shards, 5.0)
        self.operator.add(self.decider)
        return self.operator.begin(version, 0, state or {}, overrides or {}, waiting)

    def close(self, day=0, stats=None):
        self.number += 1
        self.replay_log.take(0)
        closing = ClosingPass(
            version=self.number, day=day, event_time_s=None, pass_times_s=None, wall_s=0.0, stats=stats or {},
            positions={}, metrics={}, num_samples=1, ended=False,
        )  # fmt: skip
        return self.operator.close(closing, close(self.number, day=day, events=1, samples=1))

    def logged(self):
        return [record for record in read(self.folder) if record.kind is not RecordKind.CLAIM]

    def restarted(self, state=None, version=0, overrides=None):
        """The next generation, from a commit of `version`."""
        history = JobHistory.of(read(self.folder))
        by_version = history.operations_by_version()
        replay = [
            ReplayedPass(
                PassPlan(number, ()),
                1,
                record.content,
                record.number,
                [each.content for each in by_version.get(number, ())],
            )  # fmt: skip
            for number, record in sorted(history.closes.items())
            if number > version
        ]
        self.number = version
        waiting = [record.content for record in history.waiting()]
        return self.begin(state, replay, waiting, overrides, version)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "log")
    yield made
    made.log.close()


def test_a_request_is_logged_at_once_and_acts_at_the_next_close(world):
    assert world.operator.ask(SET) == {"id": "a", "version": None}
    assert [record.body for record in world.logged()] == [SET]
    assert world.shards.operated == [] and world.operator.job.overrides == {}
    word = world.close()
    [(version, [operation])] = world.shards.operated
    assert version == 1 and isinstance(operation, SetTables)
    assert operation.tables["default"]["optimizer"]["lr"] == 0.5 and word == RankUpdate(None, True)
    assert world.operator.job.tables["default"].optimizer.lr == 0.5
    assert [record.kind for record in world.logged()] == [RecordKind.OPERATION, RecordKind.CLOSE]
    assert world.operator.ask(SET) == {"id": "a", "version": 1}, "asked for again"
    assert world.close() == RankUpdate(None, False) and len(world.shards.operated) == 1


def test_an_export_of_a_pass_that_is_withdrawn_before_its_close_acts_at_no_other(world):
    world.operator.note(operation({**EXPORT, "version": 1}))
    for _ in range(2):
        world.restarted()
        world.number = 1  # pass 1 is withdrawn, and its number not given again
        world.close()
        assert world.shards.operated == [] and "acted" not in [heard[0] for heard in world.decider.heard]


def test_a_replayed_export_is_cut_once_its_tables_are_swept_as_it_was(world, monkeypatch):
    monkeypatch.setattr(operations, "SWEEP_LOOK_S", 0.0)
    world.operator.note(operation({**EXPORT, "version": 1, "tables": ["a"]}))
    world.close()
    world.restarted()
    swept, sweeping = TableStats(0, 0, 0, {}), TableStats(0, 0, 0, {}, sweeping=True)
    looks = [{"a": sweeping, "b": sweeping}, {"a": swept, "b": sweeping}]
    world.shards.counts = looks
    world.close(stats={"a": sweeping, "b": sweeping})
    assert looks == [] and ("acted", 1, "export", True) in world.decider.heard


def test_operations_act_in_the_order_of_the_log_those_of_deciders_last(world):
    world.decider.next = [operation({"op": "shrink", "delete_after_days": 3, "at_once": True})]
    world.operator.ask({"op": "forget", "id": "f", "slot": "user", "sign": 7})
    world.operator.ask({"op": "day_tick", "id": "d", "to": 2})
    world.close()
    group = Schema.of(world.job.slots).by_name["user"].group
    [(_, operations)] = world.shards.operated
    assert operations == [
        ForgetRow(table="default", group=group, key=key_of_reference(7, group)),
        AdvanceDay(to=2),
        ShrinkRows(table="default", delete_after_days=3, at_once=True),
    ]
    assert world.operator.job.day == 2
    acted = [("acted", 1, op, False) for op in ("forget", "day_tick", "shrink")]
    assert world.decider.heard == [("saw", 1), ("due", ["forget", "day_tick"]), *acted]


def test_other_rows_are_forgotten_with_a_value_and_not_remembered_in_commits(world):
    also = [{"table": "default", "group": 3, "keys": [5, 1 << 63]}, {"table": "default", "group": 0, "keys": [2]}]
    world.operator.ask({"op": "forget", "id": "f", "slot": "user", "sign": 7, "also": also})
    assert world.logged()[0].body["also"] == also
    update = world.close()
    [(_, operations)] = world.shards.operated
    group = Schema.of(world.job.slots).by_name["user"].group
    rows = (group, key_of_reference(7, group)), (3, 5), (3, 1 << 63), (0, 2)
    assert operations == [ForgetRow(table="default", group=group, key=key) for group, key in rows]
    slots = {slot.name: slot.group for slot in Schema.of(world.job.slots).sparse}
    signs = {name: [sign_of(key, of) for of, key in rows if of == own] for name, own in slots.items()}
    assert update.forgotten == {name: found for name, found in signs.items() if found} and signs["user"][0] == 7
    histories = [{"table": "histories", "group": group, "keys": [8]}]
    forgotten = ForgetOperation(id="f", slot="user", table="default", group=group, key=2, also=histories)
    assert world.operator.job.forgotten([forgotten]) == {"user": [sign_of(2, group)]}, "no row of another table"
    assert "also" not in world.operator.state()["acted"][0]
    world.restarted()
    world.number = 0
    assert world.close() == update, "a replay repeats it"
    assert world.shards.operated[-1] == (1, operations)


def test_a_change_of_a_slot_is_logged_with_its_table_and_acts_on_it(world):
    assert world.operator.ask({"op": "clear", "id": "c", "slot": "user"}) == {"id": "c", "version": None}
    change = ClearSlot(slot="user", table="default", group=Schema.of(world.job.slots).by_name["user"].group)
    assert world.logged()[0].content == SlotOperation(id="c", change=change)
    world.restarted()
    world.close()
    assert world.shards.operated == [(1, [change])]
    assert world.operator.ask({"op": "clear", "id": "c", "slot": "user"}) == {"id": "c", "version": 1}


def test_the_status_shows_waiting_operations_and_those_that_acted(world):
    world.operator.ask(SET)
    assert world.operator.status() == OperationsStatus(logged=[SET])
    world.close()
    assert world.operator.status() == OperationsStatus(acted=[{**SET, "version": 1}])


def test_a_learning_rate_of_the_dense_part_is_sent_to_every_rank(world):
    world.operator.ask({"op": "set", "id": "a", "keys": {"dense.optimizer.lr": 0.25}})
    assert world.close() == RankUpdate(0.25, True) and world.shards.operated == []


def test_a_schedule_is_sent_to_every_rank_and_again_after_a_restart(world):
    schedule = {"kind": "exponential", "counts": "samples", "factor": 0.5, "every": 100}
    world.operator.ask({"op": "set", "id": "a", "keys": {"dense.schedule": schedule}})
    assert world.close() == RankUpdate(None, True, schedule)
    assert world.close() == RankUpdate(None, False)
    with pytest.raises(SpecError, match="dense.schedule.factor: Input should be less than or equal to 1"):
        world.operator.ask({"op": "set", "id": "b", "keys": {"dense.schedule": {**schedule, "factor": 2}}})


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"op": "set", "keys": {LR: 0.5}}, 'a requested operation needs an "id"'),
        ({"op": "set", "id": "a", "keys": {}}, "nothing is set: give KEY=VALUE"),
        ({"op": "set", "id": "a", "keys": {LR: float("inf")}}, f"{LR}: Input should be a finite number (got inf)"),
        ({"op": "set", "id": "a", "keys": {"seed": 3}}, "seed: cannot be set while the job runs"),
        ({"op": "forget", "id": "a", "slot": "usr", "sign": 3}, "there is no sparse slot 'usr'; did you mean 'user'?"),
        ({"op": "forget", "id": "a", "slot": "user", "sign": 1 << 64}, "18446744073709551616 is not a sign"),
        ({**FORGET, "also": {"table": "default"}}, "also: is not a list of rows: {table, group, keys} each"),
        ({**FORGET, "also": [{"table": "defualt"}]}, "also: there is no table 'defualt'; did you mean 'default'?"),
        ({**FORGET, "also": [{**ROW, "group": True}]}, "also: rows of table 'default' need a slot group"),
        ({**FORGET, "also": [{**ROW, "keys": [1 << 64]}]}, "also: rows of table 'default' need a slot group"),
        ({**FORGET, "also": [{**ROW, "keys": [1] * 4097}]}, "also: 4,097 rows are too many for one request"),
        ({"op": "clear", "id": "a", "slot": "usr"}, "there is no sparse slot 'usr'; did you mean 'user'?"),
        ({"op": "day_tick", "id": "a", "to": "1"}, "'1' is not a day"),
        ({"op": "day_tick", "id": "a", "to": 8}, "passes.max_day_jump: is day 0 and would be 8; at most 7 at once"),
        ({"op": "spec", "id": "a"}, "'spec' is not an operation that a client may request"),
        ({"op": "exported", "id": "a"}, "'exported' is not an operation that a client may request"),
    ],
)
def test_an_invalid_request_is_refused_and_nothing_is_logged(world, wish, why):
    with pytest.raises(SpecError) as caught:
        world.operator.ask(wish)
    assert str(caught.value).startswith(why) and world.logged() == []


def test_days_of_a_job_with_event_time_are_its_events(tmp_path):
    world = World(tmp_path / "log", 'sources.impressions.event_time={field="ts"}')
    with pytest.raises(SpecError, match="the job's days follow its event time"):
        world.operator.ask({"op": "day_tick", "id": "a", "to": 1})
    world.log.close()


def test_a_day_that_rows_cannot_store_is_refused(world):
    world.close(day=LAST_DAY - 1)
    with pytest.raises(SpecError, match="32768 is not a day: days are numbers from 0 to 32,767"):
        world.operator.ask({"op": "day_tick", "id": "a", "to": LAST_DAY + 1})
    world.operator.ask({"op": "day_tick", "id": "b", "to": LAST_DAY})


def test_a_job_that_does_not_learn_has_no_day_ticks_but_forgets(tmp_path):
    world = World(tmp_path / "log", "train.learn=false")
    with pytest.raises(SpecError, match="train.learn: is false: the job only predicts"):
        world.operator.ask({"op": "day_tick", "id": "a", "to": 1})
    assert world.operator.ask({"op": "forget", "id": "f", "slot": "user", "sign": 7}) == {"id": "f", "version": None}
    world.log.close()


def test_a_set_is_checked_with_those_that_wait(world):
    shared = {"tables.default.slots.user.extend_at": 3}
    world.operator.ask(SET)
    with pytest.raises(SpecError, match="from a number to a number only"):
        world.operator.ask({"op": "set", "id": "b", "keys": shared})
    world.operator.ask({"op": "set", "id": "c", "keys": {LR: 0.75}})
    world.close()
    assert world.operator.job.overrides == {LR: 0.75}
    [(_, operations)] = world.shards.operated
    assert [operation.tables["default"]["optimizer"]["lr"] for operation in operations] == [0.5, 0.75]


def test_a_decider_takes_its_own_requests_and_may_ask_to_repeat_one(world):
    assert world.operator.ask({"op": "export", "id": "e"}) == {"id": "e", "version": None}
    with pytest.raises(NotYet):
        world.operator.ask({"op": "later", "id": "l"})
    assert [record.body["op"] for record in world.logged()] == ["export"]


def test_an_id_requested_by_many_threads_is_logged_once(world):
    asking = [threading.Thread(target=world.operator.ask, args=(SET,)) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(world.logged()) == 1


def test_after_a_crash_waiting_operations_act_at_the_first_new_close(world):
    world.operator.ask(SET)
    assert world.restarted() == RankUpdate(world.job.dense.optimizer.lr, False, {"kind": "constant"})
    assert world.operator.ask(SET) == {"id": "a", "version": None} and world.operator.wants_pass()
    world.close()
    assert world.shards.operated[0][0] == 1 and len(world.logged()) == 2


def test_a_replay_repeats_exactly_what_was_logged_and_asks_no_decider(world):
    world.close()
    world.operator.ask(SET)
    world.decider.next = [operation({"op": "export", "version": 2})]
    world.close()
    world.operator.ask({"op": "day_tick", "id": "d", "to": 1})  # waits beyond the replay
    records, operated = len(world.logged()), world.shards.operated
    world.restarted()
    with pytest.raises(NotYet, match="replays its log"):
        world.operator.ask({**SET, "id": "z"})
    world.close()
    assert world.shards.operated == []
    world.close()
    assert [(version, len(each)) for version, each in world.shards.operated] == [(2, 1)]
    assert world.shards.operated == operated
    assert [heard for heard in world.decider.heard if heard[0] != "saw"] == [
        ("acted", 2, "set", True), ("acted", 2, "export", True)
    ]  # fmt: skip
    assert len(world.logged()) == records and world.operator.ask(SET)["version"] == 2
    world.close()
    assert world.operator.job.day == 1 and ("due", ["day_tick"]) in world.decider.heard


def test_a_commit_restores_overrides_and_known_ids(world):
    world.operator.ask(SET)
    world.close()
    state = world.operator.state()
    world.restarted(state, version=1, overrides=state["overrides"])
    [(version, [operation])] = world.shards.operated
    assert version == 1 and operation.tables["default"]["optimizer"]["lr"] == 0.5
    assert world.operator.job.overrides == {LR: 0.5} and world.operator.ask(SET) == {"id": "a", "version": 1}
    assert world.decider.loaded == {"heard": 3}


def test_a_damaged_state_is_told_with_its_commit(world):
    world.close()
    state = world.operator.state() | {"deciders": {"decider": {"heard": "3"}}}
    with pytest.raises(NotUnderstood, match="the commit of version 1: its state: Expected `int`, got `str`"):
        world.restarted(state, version=1)


def test_without_overrides_a_restart_asks_nothing_of_the_tables(world):
    world.close()
    world.restarted(world.operator.state(), version=1)
    assert world.shards.operated == []


def test_inert_operations_do_not_act_at_a_close(world):
    world.log.append(operation({"op": "gap", "partition": "t/0", "position": 0, "go_on": 5}))
    world.restarted()
    assert not world.operator.wants_pass()
    assert world.close() == RankUpdate(None, False) and world.operator.status().acted == []


def test_an_empty_pass_is_wanted_for_a_waiting_operation_or_by_a_decider(world):
    assert not world.operator.wants_pass()
    world.operator.note(operation({"op": "exported"}))
    assert not world.operator.wants_pass(), "nobody waits for it"
    world.operator.ask(SET)
    assert world.operator.wants_pass()
    world.close()
    world.decider.wants = True
    assert world.operator.wants_pass(ended=True)


def test_a_log_without_room_refuses_and_forgets_the_request(world, monkeypatch):
    def full(content):
        raise LogFull(world.folder, "full")

    with monkeypatch.context() as patched:
        patched.setattr(world.log, "append", full)
        with pytest.raises(LogFull):
            world.operator.ask(SET)
    assert world.operator.ask(SET) == {"id": "a", "version": None} and len(world.logged()) == 1


def test_an_export_clears_what_it_selects():
    delta = cut_of(operation(EXPORT))
    assert delta == ExportCut(tables=("users",), since=4, base_threshold=0.1, delta_threshold=0.2, delta_keep_days=3)
    assert cut_of(operation({**EXPORT, "all": True})).delta_threshold == 0
    base = cut_of(operation({**EXPORT, "type": "base", "parent": None}))
    assert base == ExportCut(tables=("users",), since=0, base_threshold=0.1)


# -- numbers of workers


def resize(world, **numbers):
    return world.operator.ask({"op": "resize", "id": f"{numbers}", **numbers})


def test_a_resize_acts_at_a_close_and_only_then_ends_the_generation(world):
    assert resize(world, shards=3)["version"] is None and not world.operator.resizes
    world.close()
    assert world.operator.resizes and world.shards.operated == []
    assert world.operator.job.overrides == {"cluster.shards": 3, "cluster.trainers": 1}
    assert resize(world, shards=3)["version"] == 1


def test_what_is_not_given_stays_and_several_trainers_have_a_shard(world):
    resize(world, trainers=3)
    world.close()
    assert world.operator.job.overrides == {"cluster.shards": 2, "cluster.trainers": 3}


def test_once_a_resize_has_acted_the_next_one_is_for_the_next_workers(world):
    resize(world, shards=3)
    world.close()
    logged = len(world.logged())
    with pytest.raises(NotYet, match="another resize"):
        resize(world, shards=2)
    assert len(world.logged()) == logged


def test_resizes_of_one_close_that_cancel_each_other_change_nothing(world):
    """Otherwise the generation would end, and the launcher find that no other one is needed."""
    resize(world, shards=3)
    resize(world, shards=2)
    world.close()
    assert not world.operator.resizes and world.operator.job.overrides["cluster.shards"] == 2


def test_a_resize_that_is_replayed_ends_no_generation(world):
    resize(world, shards=3)
    world.close()
    world.restarted()
    world.number = 0
    world.close()
    assert not world.operator.resizes and world.operator.job.overrides["cluster.shards"] == 3


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "nothing is resized"),
        ({"trainers": 0}, "cluster.trainers: 0 is not a number from 1 to 64"),
        ({"trainers": 65}, "65 is not a number from 1 to 64"),
        ({"shards": -1}, "cluster.shards: -1 is not a number from 0 to 64"),
        ({"shards": True}, "True is not a number"),
        ({"shards": "2"}, "'2' is not a number"),
        ({"shards": 0, "trainers": 2}, "the rows live in the trainer only where there is one"),
    ],
)
def test_numbers_of_workers_that_cannot_be_are_refused(world, numbers, words):
    with pytest.raises(SpecError, match=words):
        resize(world, **numbers)
    assert world.logged() == []


def test_numbers_of_workers_are_not_set(world):
    with pytest.raises(SpecError, match="`headrace resize` changes it"):
        world.operator.ask({"op": "set", "id": "a", "keys": {"cluster.shards": 3}})
