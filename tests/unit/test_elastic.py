"""An elastic number of trainers: what is decided from what is known, which workers count, and what rank 0 logs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import validate
from headrace.errors import SpecError
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.elastic import Attendance, Elasticity, ElasticRules, GoOn, GoOnWith, decide
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.places import MAX_SPARES, Places
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.monitor.lines import progress_line
from headrace.service.predict.hosts import elastic_range, with_numbers_of
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import load_job
from headrace.service.spec.launchers import check_launcher
from headrace.trainer.job_status import Status
from headrace.trainer.journal.records import ResizeOperation, SpecOperation
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.logged_specs import resized
from headrace.trainer.rank0.recovery import Recovery
from headrace.trainer.rank0.requests import resize_requested
from headrace.trainer.spec.changes import MOST_TRAINERS, SHARDS, TRAINERS
from tests.fakes.past import SPEC, Past
from tests.integration.stream_job import write_job

RULES = ElasticRules(least=2, most=8, node_timeout_s=30.0, settle_s=10.0)
NODE_TIMEOUT_S = 10.0

# -- the decision


def decided(now, runs=False, **known):
    return decide(now, Attendance(**known), RULES, runs=runs)


def test_a_lost_trainer_is_waited_for_until_nothing_was_heard_for_long():
    waits = decided(4, able=3, may_come=True)
    assert isinstance(waits, GoOn) and "3 of 4 trainers can run; goes on with fewer once" in waits.reason
    fewer = decided(4, able=3)
    assert isinstance(fewer, GoOnWith) and fewer.trainers == 3 and "in place of 4" in fewer.reason


def test_fewer_than_the_least_wait_and_say_so():
    waits = decided(4, able=1)
    assert waits == GoOn("1 of 4 trainers can run, fewer than cluster.trainers.min = 2")
    assert decided(4, able=3, leads=False) == GoOn(), "without rank 0 no other number helps"


def test_joined_workers_are_taken_together_after_a_while():
    assert decided(4, runs=True) == GoOn()
    waits = decided(4, runs=True, spares=2, spare_s=4.0)
    assert waits == GoOn("goes on with 6 trainers in 6 s, as 2 workers have joined")
    one = decided(4, runs=True, spares=1, spare_s=10.0)
    assert one.reason == "goes on with 5 trainers in place of 4: 1 worker has joined"
    assert decided(4, runs=True, spares=2, spare_s=10.0).trainers == 6
    assert decided(7, runs=True, spares=9, spare_s=10.0).trainers == 8
    assert decided(8, runs=True, spares=9, spare_s=10.0) == GoOn(), "they stand by"
    assert decided(4, able=6) == GoOn(), "what can start starts"


@given(
    now=st.integers(2, 8),
    runs=st.booleans(),
    able=st.integers(0, 12),
    spares=st.integers(0, 12),
    spare_s=st.floats(0, 60),
    may_come=st.booleans(),
    leads=st.booleans(),
)
def test_no_decision_leaves_the_bounds_or_repeats_the_number(now, runs, **known):
    found = decided(now, runs=runs, **known)
    if isinstance(found, GoOnWith):
        assert RULES.least <= found.trainers <= RULES.most and found.trainers != now
        assert (found.trainers > now) == runs


# -- the workers that are known


def agent(id, **more):
    return AgentFacts(**{"id": id, "machine": "head", **more})


@pytest.fixture
def places():
    """Of a generation of three trainers and a shard; agents a, b, c and d have them, since second 100."""
    places = Places("head", NODE_TIMEOUT_S, elastic_since_s=0.0)
    open_at(places, 100, "abcd")
    return places


def open_at(places, now_s, ids, trainers=3):
    places.open(["shard-0", *(f"trainer-{rank}" for rank in range(trainers))], 1)
    for id in ids:
        places.ask(agent(id), now_s)


def test_all_may_still_come_while_the_launcher_is_young():
    places = Places("head", NODE_TIMEOUT_S, elastic_since_s=100.0)
    open_at(places, 105, "ab")
    assert (places.attendance(109).able, places.attendance(109).may_come) == (1, True)
    assert not places.attendance(110).may_come


def test_a_silent_agent_may_come_back_until_it_is_given_up(places):
    open_at(places, 104, "abc")
    assert (places.attendance(104).able, places.attendance(104).may_come) == (2, True)
    assert places.silent(110.5) == {"d": None}
    assert (places.attendance(110.5).able, places.attendance(110.5).may_come) == (2, False)


def test_an_agent_that_leaves_is_waited_for_as_long_as_a_silent_one(places):
    places.heard("d", 103)
    places.leave("d")
    open_at(places, 104, "abc")
    assert places.attendance(112.9).may_come and not places.attendance(113).may_come


def test_further_agents_stand_by_as_spares(places):
    assert [places.ask(agent(id), 100 + wait) for wait, id in enumerate("ef")] == [None, None]
    found = places.attendance(104)
    assert (found.spares, found.spare_s) == (2, 4.0)
    for number in range(MAX_SPARES - 2):
        places.ask(agent(f"s{number}"), 104)
    with pytest.raises(Exception, match="one too many"):
        places.ask(agent("more"), 104)


def test_a_spare_that_comes_and_goes_begins_its_wait_anew(places):
    places.ask(agent("e"), 100)
    places.leave("e")
    places.ask(agent("e"), 104)
    assert places.attendance(105).spare_s == 1.0


def test_shards_come_first_and_stand_ins_do_not_count(places):
    places.open(["shard-0", "trainer-0", "trainer-1"], 2)
    places.ask(agent("a", role="trainer"), 101)
    assert places.attendance(101).able == 0, "there is nobody for the shard"
    places.ask(agent("s", role="trainer"), 101)
    places.ask(agent("b"), 101)
    assert places.attendance(101).able == 2
    assert places.attendance(101, {"s"}).able == 1
    places.ask(agent("c", role="shard"), 101)
    assert places.attendance(101, {"s"}).able == 2


def test_readers_are_no_trainers_and_take_agents_as_shards_do(places):
    places.open(["shard-0", "reader-0", "reader-1", "trainer-0", "trainer-1"], 2)
    for id, role in (("s", "shard"), ("r", "reader"), ("a", "trainer"), ("b", None)):
        places.ask(agent(id, role=role), 101)
    assert places.attendance(101).able == 1, "b is for the other reader"
    places.ask(agent("c"), 101)
    assert places.attendance(101).able == 2
    places.ask(agent("q", role="reader"), 101)
    assert (places.attendance(105).spares, places.attendance(105).spare_s) == (0, 0.0), "a reader more trains nothing"
    places.ask(agent("e"), 103)
    assert places.attendance(105).spares == 1


def test_a_worker_that_stands_by_replaces_a_lost_reader_before_it_trains(places):
    places.open(["reader-0", "trainer-0", "trainer-1"], 2)
    for id in "abc":
        places.ask(agent(id), 101)
    places.free("reader-0", "c")  # it died, and the others go on
    places.leave("c")
    places.ask(agent("t", role="trainer"), 101)
    assert places.attendance(105).spares == 0, "with more trainers, the job would wait for the reader"
    places.ask(agent("d"), 102)
    assert places.attendance(105).spares == 1
    places.ask(agent("r", role="reader"), 103)
    assert places.attendance(105).spares == 1, "d is the reader now"


def test_rank_0_goes_to_the_head_although_its_agent_ran_another_worker(places):
    places.open(["shard-0", "trainer-0", "trainer-1"], 2)
    assert places.ask(agent("b", machine="node", last="trainer-2"), 101) == "trainer-1"
    assert not places.attendance(101).leads
    assert places.ask(agent("c", last="trainer-1"), 101) == "trainer-0"
    assert places.attendance(101).leads


def test_a_torchrun_of_another_size_is_no_error_and_is_whole_at_once(places):
    places.open(["shard-0", *(f"trainer-{rank}" for rank in range(4))], 2)
    for rank in range(3):
        places.ask(agent(f"r{rank}", rank=rank, world=3), 101)
    for id in "abcd":
        places.leave(id)
    assert places.attendance(101) == Attendance(able=2, leads=True)


def test_a_prediction_has_no_rank_0_and_takes_the_trainers_that_are_there(places):
    places.open(["shard-0", "predictor-0", "predictor-1", "predictor-2"], 2)
    for id, role in (("s", "shard"), ("a", "trainer"), ("b", "trainer")):
        places.ask(agent(id, role=role), 101)
    for id in "abcd":
        places.leave(id)
    for id in "ab":
        places.ask(agent(id, role="trainer"), 112)
    known = places.attendance(112)
    assert (known.able, known.leads) == (2, True)
    assert decide(3, known, ElasticRules(least=1, most=3, node_timeout_s=10, settle_s=0), runs=False).trainers == 2


@pytest.mark.parametrize(
    ("asked", "numbers", "trainers"),
    [({}, {}, 4), ({}, {TRAINERS: 2, SHARDS: 1, MOST_TRAINERS: 3}, 3), ({"trainers": 2}, {TRAINERS: 3, SHARDS: 1}, 2)],
)
def test_a_prediction_asks_for_the_most_trainers_or_for_those_of_its_request(tmp_path, asked, numbers, trainers):
    job = load_job(write_job(tmp_path, num_lines=10), ["cluster.trainers={min=1, max=4}", "cluster.launcher=external"])
    raw = {"input": {"paths": ["*.txt"]}, "output": "out", "on": "cluster", **asked}
    request = validate(PredictionRequest, raw)
    assert (elastic_range(request, job.spec.cluster) is None) == bool(asked)
    assert with_numbers_of(request, replace(job, resized=numbers)).trainers == trainers


# -- what is told of it


class Workers:
    """A launcher of which only the attendance is known."""

    known = Attendance()

    def attendance(self):
        return self.known

    def stand_in(self, number):
        raise AssertionError("nothing is replayed")


class Plans:
    """Plans for ever other numbers of trainers."""

    replays, most, aim = False, 3, 3

    def aim_at(self, trainers):
        self.aim = trainers


def test_an_alarm_tells_that_a_job_trains_with_fewer_until_it_has_grown():
    section = validate(ClusterSection, {"trainers": {"min": 2, "max": 3}, "launcher": "external"})
    workers, plans, asked = Workers(), Plans(), []
    elastic = Elasticity(section, workers, plans, lambda *_: None)

    def told(now, runs, **known):
        """The alarm and the line of progress after a step; whether the generation ends."""
        workers.known = Attendance(**known)
        rank0 = SimpleNamespace(status=Status(), ask=asked.append)
        plan = SimpleNamespace(trainers=[None] * now, generation=1)
        ends = elastic.step(SimpleNamespace(plan=plan, rank0=rank0, begun=runs))
        status = Status(elastic=elastic.status())
        return alarms(status).get(Alarm.TRAINERS), progress_line(status).rpartition("  ")[2], ends

    assert told(3, True) == (None, "3 trainers (of 2 to 3)", False)
    assert told(3, False, able=2, may_come=True) == (None, "0 trainers (of 2 to 3)", False), "it may come back"
    alarm, _, ends = told(3, False, able=2)
    assert ends and plans.aim == 2 and asked == []
    assert alarm == (
        "fewer than cluster.trainers.max = 3: goes on with 2 trainers in place of 3: nothing was heard of the others "
        "for 30 s (cluster.node_timeout)"
    )
    assert told(2, True) == (alarm, "2 trainers (of 2 to 3)", False)
    assert told(2, True, spares=1, spare_s=29.0) == (alarm, "2 trainers (of 2 to 3, 1 more stand by)", False)
    assert told(2, True, spares=1, spare_s=30.0)[0] is None and asked[0]["trainers"] == 3
    assert told(3, True) == (None, "3 trainers (of 2 to 3)", False)

    elastic = Elasticity(section, workers, plans, lambda *_: None)  # of a launcher that is started again
    assert told(2, False, able=1, may_come=True)[0] is None
    alarm, *_ = told(2, True)
    assert alarm == "fewer than cluster.trainers.max = 3: the job had 2 trainers when its launcher was started"
    assert told(3, True)[0] is None


# -- the job file


def test_a_range_needs_workers_that_come_and_go_and_a_model_that_is_not_divided(tmp_path):
    file = write_job(tmp_path, num_lines=10)
    elastic = "cluster.trainers={min=2, max=4}"
    assert load_job(file, [elastic]).cluster.num_shards == 1
    check_launcher(load_job(file, [elastic, "cluster.launcher=external"]).spec.cluster)
    with pytest.raises(SpecError, match=r"cluster\.trainers: a number from 2 to 4 is for workers that come and go"):
        check_launcher(load_job(file, [elastic]).spec.cluster)
    with pytest.raises(SpecError, match=r"cluster\.trainers: min = 4 is not below max = 4"):
        load_job(file, ["cluster.trainers={min=4, max=4}"])
    with pytest.raises(SpecError, match=r"shards = 0 keeps the rows inside the one trainer; 4 trainers"):
        load_job(file, [elastic, "cluster.shards=0"])


def test_a_job_file_with_a_number_is_written_as_ever():
    assert "elastic_wait" not in ClusterSection(trainers=2).model_dump(mode="json")
    section = validate(ClusterSection, {"trainers": {"min": 1, "max": 2}, "elastic_wait": "5s"})
    assert validate(ClusterSection, section.model_dump(mode="json")) == section
    assert section.resized({}).num_trainers == 2 and section.resized({MOST_TRAINERS: 1}).num_trainers == 1


# -- the log


@pytest.fixture
def asked(tmp_path):
    """Takes the present number and a request; whether it ends the generation, and the keys that it logs."""
    spec = load_job(write_job(tmp_path, num_lines=10)).spec

    def ask(now, **request):
        job = JobInForce(spec, {TRAINERS: now, SHARDS: 1}, (2, 8))
        found = resize_requested({"id": "a", **request}, job)
        return job.is_resized_by([found]), found.keys

    return ask


def test_a_person_lowers_the_number_or_lifts_its_bound(asked):
    assert asked(5, trainers=3) == (True, {SHARDS: 1, TRAINERS: 3, MOST_TRAINERS: 3})
    assert asked(3, trainers=8) == (False, {SHARDS: 1, TRAINERS: 3, MOST_TRAINERS: 8}), "workers that join make it grow"
    assert asked(3, trainers=4, joined=True) == (True, {SHARDS: 1, TRAINERS: 4})
    assert asked(3, shards=2) == (True, {SHARDS: 2, TRAINERS: 3})
    with pytest.raises(SpecError, match="9 is not in the range of the job file, 2 to 8"):
        asked(3, trainers=9)


def test_rank_0_logs_a_number_that_its_launcher_has_chosen_once(tmp_path):
    file = {**SPEC, "cluster": {"trainers": {"min": 1, "max": 3}, "shards": 1}}
    made = Past(tmp_path / "store").begin()
    made.log.append(SpecOperation(spec=file))
    made.end()

    def begun(generation, trainers):
        chosen = {SHARDS: 1, TRAINERS: trainers}
        found = Recovery(made.store, generation, file, world=trainers, chosen=chosen).begin()
        found.joblog.close()
        return [each.id for each in found.waiting if isinstance(each, ResizeOperation)]

    assert begun(2, 3) == [] and resized(made.store, file) == {}, "it is that of the job file"
    assert begun(3, 2) == ["elastic-3"] and resized(made.store, file) == {SHARDS: 1, TRAINERS: 2}
    assert begun(4, 2) == ["elastic-3"], "it is logged"
    assert begun(5, 3) == ["elastic-3", "elastic-5"]
    assert resized(made.store, file) == {SHARDS: 1, TRAINERS: 3}


def test_the_most_trainers_are_read_from_the_log_once_for_each_plan(tmp_path, monkeypatch):
    file = write_job(tmp_path, num_lines=10)
    job = load_job(file, ["cluster.trainers={min=1, max=4}", "cluster.launcher=external"])
    made = Past(job.store).begin()
    made.log.append(SpecOperation(spec=job.full))
    made.log.append(ResizeOperation(id="a", keys={SHARDS: 1, TRAINERS: 2, MOST_TRAINERS: 3}))
    made.end()
    plans = GenerationPlans(job, tmp_path / "workers")
    assert len(plans.next(0).trainers) == 2
    monkeypatch.setattr("headrace.service.cluster.generation_plans.resized", None)
    assert plans.most == 3
    plans.aim_at(4)
    assert plans.most == 3
