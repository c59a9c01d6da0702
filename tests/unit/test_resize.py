"""Other numbers of workers are a fact of the log: the next start goes on with them, until the job file changes them."""

import pytest
from msgspec.structs import replace

from headrace.dataset.stream.source import Segment
from headrace.errors import HeadraceError
from headrace.service.cluster.generation_plans import GenerationPlans, numbers_of
from headrace.service.cluster.resizing import _new_workers
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits, write_manifest
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import ResizeOperation, SpecOperation
from headrace.trainer.rank0.logged_specs import overrides_of, replay_first, resized
from headrace.trainer.rank0.recovery import Recovery
from headrace.trainer.spec.changes import SHARDS, TRAINERS
from tests.fakes.past import SPEC, Past
from tests.fakes.records import close, operation
from tests.integration.stream_job import write_job

FILE = {**SPEC, "cluster": {"trainers": 1, "shards": 2}}
CHANGED = {**SPEC, "cluster": {"trainers": 1, "shards": 4}}
RESIZE = {"op": "resize", "id": "a", "keys": {SHARDS: 3, TRAINERS: 2}}


@pytest.fixture
def past(tmp_path):
    """A commit of 1, and a close of 2, both trained by one trainer."""
    made = Past(tmp_path / "store").begin()
    made.log.append(SpecOperation(spec=FILE))
    made.close(1, a=(0, 100))
    hold(made, made.commit(1), FILE)
    made.close(2, a=(100, 200))
    yield made
    made.end()


def of_two(number, *, begin):
    """A plan for two trainers."""
    return PassPlan(number, tuple((Segment("a", 0, at, at + 50),) for at in (begin, begin + 50)))


def test_without_a_resize_the_file_has_the_numbers(past):
    past.end()
    assert resized(past.store, FILE) == {}


def test_a_resize_holds_from_its_record_on(past):
    past.log.append(operation(RESIZE))
    assert resized(past.store, FILE) == RESIZE["keys"], "it waits for a close"
    past.close(3, a=(200, 300))
    assert resized(past.store, FILE) == RESIZE["keys"]
    past.log.append(operation({**RESIZE, "id": "b", "keys": {SHARDS: 1, TRAINERS: 2}}))
    past.end()
    assert resized(past.store, FILE) == {SHARDS: 1, TRAINERS: 2}, "the newest counts"


def test_a_number_that_the_job_file_changes_is_that_of_the_file(past):
    past.log.append(operation(RESIZE))
    past.close(3, a=(200, 300))
    past.end()
    assert resized(past.store, CHANGED) == {TRAINERS: 2}
    Recovery(past.store, 2, CHANGED).begin().joblog.close()
    past.generation = 2
    past.begin().close(4, a=(300, 400))
    past.end()
    assert resized(past.store, CHANGED) == {TRAINERS: 2}, "after the new file is logged, too"


def test_a_replayed_resize_has_lost_the_keys_that_the_job_file_has_changed_since(past):
    """Otherwise the next commit would bring the old number back."""
    past.log.append(operation(RESIZE))
    past.close(3, a=(200, 300))
    past.end()
    found = Recovery(past.store, 2, CHANGED).begin()
    found.joblog.close()
    acts = [each for replayed in found.replay for each in replayed.operations]
    assert acts == [ResizeOperation(id="a", keys={TRAINERS: 2})]


def test_a_file_that_is_changed_and_changed_back_has_ended_the_resize(past):
    """Also where no pass was closed and no commit made in between."""
    past.log.append(operation(RESIZE))
    past.close(3, a=(200, 300))
    past.end()
    for generation, file in enumerate((CHANGED, FILE), start=2):
        found = Recovery(past.store, generation, file).begin()
        found.joblog.close()
        acts = [each for replayed in found.replay for each in replayed.operations]
        assert acts == [ResizeOperation(id="a", keys={TRAINERS: 2})]
        assert resized(past.store, file) == {TRAINERS: 2}


def test_a_file_that_is_changed_and_changed_back_has_ended_what_a_commit_holds(past):
    past.end()
    commit(past, 2, FILE, RESIZE["keys"])
    assert resized(past.store, FILE) == RESIZE["keys"]
    for file in (CHANGED, FILE):
        past.generation += 1
        found = Recovery(past.store, past.generation, file).begin()
        found.joblog.close()
        assert found.overrides == {TRAINERS: 2} == resized(past.store, file)


def test_a_commit_keeps_the_numbers_when_the_log_no_longer_has_them():
    class Of:
        state = {"spec": FILE, "operations": {"overrides": RESIZE["keys"]}}

    assert overrides_of(Of, FILE) == RESIZE["keys"] and overrides_of(Of, CHANGED) == {TRAINERS: 2}


def test_what_one_trainer_closed_is_trained_again_by_one_before_two_go_on(past):
    past.log.append(operation(RESIZE))
    past.end()
    assert replay_first(past.store, FILE, 2) == (FILE, 1)
    with pytest.raises(HeadraceError, match=r"passes must be replayed .*cluster\.trainers may change"):
        Recovery(past.store, 2, FILE, world=2).begin()
    past.generation = 1
    commit(past, 2, FILE)
    assert replay_first(past.store, FILE, 2) is None


def test_plans_for_another_number_of_trainers_are_withdrawn(past):
    hold(past, past.commit(2), FILE)
    past.plan(3, a=(200, 300))
    past.plan(4, a=(300, 400))
    past.end()
    Recovery(past.store, 2, FILE, world=1).begin().joblog.close()
    assert [each.content.number for each in JobHistory.of(read(past.store / "log")).unclosed()] == [3, 4]
    found = Recovery(past.store, 3, FILE, world=2).begin()
    found.joblog.close()
    assert found.replay == [] and found.last_number == 4
    voids = JobHistory.of(read(past.store / "log")).voids
    assert {number: void.content.reason for number, void in voids.items()} == dict.fromkeys(
        (3, 4), "changed: cluster.trainers"
    )


def test_logged_passes_are_replayed_up_to_the_first_of_another_number_of_trainers(past):
    past.log.append(of_two(3, begin=200))
    past.log.append(close(3, events=100))
    past.end()
    assert replay_first(past.store, FILE, 2) == (FILE, 1)
    found = Recovery(past.store, 2, FILE, world=1, logged_only=True).begin()
    found.joblog.close()
    assert [each.plan.number for each in found.replay] == [2]


# -- the launcher


@pytest.mark.parametrize(
    ("file", "numbers", "found"),
    [
        ({}, {}, (1, 0)),
        ({}, {SHARDS: 2, TRAINERS: 1}, (1, 2)),
        ({"shards": 2}, {SHARDS: 0, TRAINERS: 1}, (1, 0)),
        ({"shards": 2}, {TRAINERS: 3}, (3, 2)),
        ({"trainers": 2}, {SHARDS: 0}, (2, 1)),  # the file has changed the number of trainers since
        ({"shards": 0}, {TRAINERS: 2}, (2, 1)),
    ],
)
def test_the_numbers_of_a_resize_replace_those_of_the_file(file, numbers, found):
    cluster = ClusterSection(**file).resized(numbers)
    assert (cluster.trainers, cluster.num_shards) == found


def test_generations_follow_until_nothing_is_left_to_change(tmp_path):
    """Logged passes of one trainer first, then two trainers, then what was asked for meanwhile, then the end."""
    job = load_job(write_job(tmp_path, num_lines=4), ["store.path=store", "cluster.shards=2"])
    past = Past(job.store).begin()
    past.log.append(SpecOperation(spec=job.full))
    past.close(1, a=(0, 100))
    past.log.append(operation(RESIZE))
    past.end()
    plans = GenerationPlans(job, tmp_path / "workers")
    phases = plans.phases()

    def planned():
        plan = next(phases)(0)
        return len(plan.trainers), len(plan.shards), plan.trainers[0].config["until"], plan.generation

    assert planned() == (1, 3, "logged", 2)
    commit(past, 1, job.full)
    assert planned() == (2, 3, None, 4)
    past.begin().log.append(operation({**RESIZE, "id": "b", "keys": {SHARDS: 1, TRAINERS: 2}}))
    past.end()
    assert planned() == (2, 1, None, 5)
    assert next(phases, "over") == "over"


def test_logged_passes_are_trained_by_the_machines_of_the_present_file(tmp_path):
    file = write_job(tmp_path, num_lines=4)
    job = load_job(file, ["store.path=store", "cluster.node_timeout=20s", "cluster.wire=bfloat16", "cluster.shards=1"])
    past = Past(job.store).begin()
    past.log.append(SpecOperation(spec=job.full))
    past.close(1, a=(0, 100))
    past.end()
    changed = ["store.path=store", "cluster.node_timeout=40s", "cluster.trainers=2", "cluster.readers=3"]
    plan = GenerationPlans(load_job(file, changed), tmp_path / "workers").next(0)
    (trainer,) = plan.trainers
    assert (trainer.config["until"], len(plan.readers), len(plan.shards)) == ("logged", 3, 1)
    assert trainer.config["node_timeout"] == 40 and trainer.config["wire"] == "bfloat16"
    assert trainer.config["job"]["cluster"]["trainers"] == 1, "it tells what the file has changed since"


ROWS = "train.rows=device"


@pytest.mark.parametrize(
    ("logged", "world", "present", "shards"),
    [
        ((ROWS, "cluster={trainers=2,shards=2}"), 2, (ROWS, "cluster={trainers=3,shards=3}"), 2),
        ((ROWS, "cluster={trainers=2,shards=2}"), 2, (ROWS,), 2),
        ((ROWS, "cluster={trainers=2,shards=2}"), 2, ("cluster.shards=3",), 2),
        ((ROWS,), 1, (ROWS, "cluster={trainers=2,shards=2}"), 0),
        (("cluster.shards=1",), 1, (ROWS, "cluster={trainers=2,shards=2}"), 2),  # they were processes of their own
    ],
)
def test_logged_passes_with_rows_on_devices_have_a_shard_in_each_trainer(tmp_path, logged, world, present, shards):
    file, store = write_job(tmp_path, num_lines=4), "store.path=store"
    job, now = load_job(file, [store, *logged]), load_job(file, [store, *present])
    past = Past(job.store).begin()
    past.log.append(SpecOperation(spec=job.full))
    past.log.append(PassPlan(1, ((),) * world))
    past.log.append(close(1))
    past.end()
    plans = GenerationPlans(now, tmp_path / "workers")
    plan = plans.next(0)
    inside = sum("shard" in trainer.config for trainer in plan.trainers)
    assert (len(plan.trainers), len(plan.shards) or inside) == (world, shards)
    assert bool(plan.shards) == (ROWS not in logged) and plan.trainers[0].config["until"] == "logged"
    commit(past, 1, job.full)
    assert len(plans.next(plan.generation).trainers) == now.cluster.num_trainers


def commit(past, version, spec, overrides=()):
    """A commit that has this spec and these overrides, of the generation after the next."""
    past.generation += 1
    past.begin()
    hold(past, past.commit(version), spec, overrides)
    past.end()


def hold(past, name, spec, overrides=()):
    """Put a spec and overrides into a commit."""
    commit = Commits(past.store).read(name)
    state = {**commit.state, "spec": spec, "operations": {"overrides": dict(overrides)}}
    write_manifest(commit.folder, replace(commit.manifest, state=state))


def test_a_job_without_a_resize_has_one_phase(tmp_path):
    job = load_job(write_job(tmp_path, num_lines=4), ["store.path=store"])
    phases = GenerationPlans(job, tmp_path / "workers").phases()
    assert len(next(phases)(0).trainers) == 1 and next(phases, "over") == "over"
    assert numbers_of(job) == (1, 0)


# -- waiting


class Rank0:
    def __init__(self, **status):
        self._status = status

    def status(self, deadline):
        return self._status


@pytest.mark.parametrize(
    ("state", "trainers", "there"),
    [
        ("training", 1, False),
        ("training", 2, True),
        ("replaying", 2, False),
        ("starting", 2, True),
        ("paused", 2, True),
    ],
)
def test_new_workers_are_there_once_they_train(state, trainers, there):
    workers = {"trainers": trainers, "shards": 3}
    found = _new_workers(Rank0(state=state, workers=workers, overrides=RESIZE["keys"]))
    assert found == (workers if there else None)
