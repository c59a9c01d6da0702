"""The deaths that a fault run plans, the jobs that it refuses, and its table of results."""

import itertools
from itertools import islice

import pytest

from headrace.config import validate
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.failpoints import Failpoint
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.cluster.worker_plan import plan_job
from headrace.service.faults import rounds
from headrace.service.faults.deaths import (
    EVERYBODY,
    EXPORTER,
    OF_EXPORTS,
    OF_OPERATIONS,
    OF_RESIZES,
    OFTEN,
    AtFailpoint,
    AtInstant,
    JobFeatures,
    deaths,
    failpoint_places,
    workers_of,
)
from headrace.service.faults.injection import DeathRecord
from headrace.service.faults.rounds import (
    COMPARED,
    COUNTED,
    FaultRuns,
    Round,
    counts_of,
    differences,
    place_of,
    total_line,
)
from headrace.trainer.config import WorkerConfig
from headrace.trainer.journal.log import Log
from headrace.trainer.journal.records import MatmulOperation
from tests.integration.stream_job import write_job

MIRRORED = JobFeatures(mirrored=True)
ALL = JobFeatures(mirrored=True, operated=True, exporting=True, uploaded=True)


def test_every_point_has_a_worker_in_every_topology():
    for sizes in ((1, 0), (1, 2), (3, 2)):
        assert {point for point, _ in failpoint_places(*sizes, ALL)} == set(Failpoint) - OF_RESIZES
        assert {worker for _, worker in failpoint_places(*sizes, MIRRORED)} == set(workers_of(*sizes))
        assert {worker for _, worker in failpoint_places(*sizes, ALL)} == {*workers_of(*sizes), EXPORTER}


def test_uploads_are_died_at_only_where_there_is_a_mirror():
    everywhere = {point for point, _ in failpoint_places(1, 0, MIRRORED)}
    assert {point for point, _ in failpoint_places(1, 0, JobFeatures())} == everywhere - {Failpoint.UPLOADED}
    objects = {point for point, _ in failpoint_places(1, 0, JobFeatures(mirrored=True, uploaded=True))}
    assert objects - everywhere == {Failpoint.FENCED, Failpoint.PART_UPLOADED}


def test_operations_are_died_at_only_where_there_are_any():
    none = set(failpoint_places(1, 0, JobFeatures()))
    assert {point for point, _ in set(failpoint_places(1, 0, JobFeatures(operated=True))) - none} == OF_OPERATIONS
    assert {
        point for point, _ in set(failpoint_places(1, 0, JobFeatures(exporting=True))) - none
    } == OF_OPERATIONS | OF_EXPORTS


def test_an_embedded_shard_dies_with_its_trainer_and_others_in_turn():
    assert (Failpoint.SNAPSHOT_TAKEN, "trainer-0") in failpoint_places(1, 0, JobFeatures())
    found = failpoint_places(3, 2, JobFeatures())
    assert [worker for point, worker in found if point is Failpoint.SNAPSHOT_TAKEN] == ["shard-0", "shard-1"]
    assert [worker for point, worker in found if point is Failpoint.BEFORE_CLOSE] == [
        "trainer-0",
        "trainer-1",
        "trainer-2",
    ]


def test_a_seed_repeats_its_deaths_and_another_gives_others():
    first, again, other = (list(islice(deaths(seed, 3, 2, ALL), 100)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_place_has_its_turn_before_one_comes_again():
    everywhere = failpoint_places(3, 2, MIRRORED)
    found = list(islice(deaths(5, 3, 2, MIRRORED), 2 * len(everywhere)))
    at_points = [death for death in found if isinstance(death, AtFailpoint)]
    assert sorted((death.point, death.worker) for death in at_points) == sorted(everywhere)
    assert all(death.hit == 1 for death in at_points if death.point not in OFTEN)
    at_random = [death for death in found if isinstance(death, AtInstant)]
    assert {death.worker for death in at_random} <= {*workers_of(3, 2), EVERYBODY}
    assert {death.stopped for death in at_random} == {True, False}


def test_what_follows_a_death_of_the_exporter_needs_nobody_to_be_told_beforehand():
    found = list(islice(deaths(5, 3, 2, ALL), 500))
    after = [later for death, later in itertools.pairwise(found) if death.worker == EXPORTER]
    assert len(after) > 50 and all(isinstance(death, AtInstant) and death.worker != EXPORTER for death in after)
    exporting = {death.worker for death in found if isinstance(death, AtInstant) and death.exports}
    assert exporting == {*workers_of(3, 2), EVERYBODY, EXPORTER}
    assert not any(death.worker == EXPORTER for death in islice(deaths(5, 3, 2, MIRRORED), 500))


def test_a_run_that_differs_is_told_in_what():
    report = dict.fromkeys(COMPARED, 1)
    calm = ({1: "a", 2: "b"}, report, {"x": 1})
    assert differences(calm, calm) == []
    assert differences(calm, ({1: "a", 2: "c"}, report | {"digest": 2}, {"x": 1})) == ["pass 2", "digest"]
    assert differences(calm, ({1: "a"}, report, {"x": 1, "y": 2})) == ["pass 2", "y"]
    assert differences(calm, (calm[0], report, {})) == ["x"]
    many = ({n: "x" for n in range(1, 10)}, report, {"x": 1})
    assert differences(calm, many) == ["pass 1", "pass 2", "pass 3", "6 more passes"]


def test_a_mode_whose_weights_differ_is_compared_by_its_events_and_counts():
    def run(auc, events=7, export="serving t1/8-base", digest="aa"):
        close = {"events": events, "samples": 7, "rejected": {}, "day": 0, "digests": {}, "window": {"auc": auc}}
        report = dict.fromkeys(COMPARED, 1) | {"metrics": auc, "digest": digest, "events": events}
        exported = {f"{export} as it was cut": {}, f"{export}/_DONE": "d", f"{export}/rows-default-0.parquet": digest}
        return counts_of(({1: close}, report, exported))

    calm = run(0.7)
    assert differences(calm, run(0.8, digest="bb")) == []
    assert differences(calm, run(0.7, events=8)) == ["pass 1", "events"]
    assert len(differences(calm, run(0.7, export="serving t1/9-base"))) == 4
    assert set(calm[1]) == set(COUNTED)


def test_kills_count_as_identical_only_where_their_whole_run_is(tmp_path):
    kill = DeathRecord(AtFailpoint("trainer-0", Failpoint.CLOSED), 1, Failpoint.CLOSED)
    good = Round(tmp_path, [kill, kill], ended=True)
    wrong = Round(tmp_path, [kill], wrong=["pass 2"], ended=True)
    unasked = Round(tmp_path, [kill], unasked={3: "exit code 70"}, ended=True)
    failed = Round(tmp_path, [kill], wrong=["it ended with 1"])
    assert total_line([good, wrong, unasked, failed]) == "5 kills, 4 recovered, 2 identical"


def test_a_death_elsewhere_than_planned_is_counted_where_it_was():
    assert place_of(DeathRecord(AtFailpoint("shard-1", Failpoint.ROWS_WRITTEN), 1, Failpoint.CLOSED)) == (
        "closed",
        "trainer-0",
    )
    assert place_of(DeathRecord(AtInstant("shard-1", 0, 0.0, stopped=True), 1)) == ("stopped and back", "shard-1")
    assert place_of(DeathRecord(AtInstant("shard-1", 0, 0.0), 1, Failpoint.CLOSED)) == ("closed", "trainer-0")
    assert place_of(DeathRecord(AtInstant(EXPORTER, 0, 0.0, exports=1), 1)) == ("at random, exporting", EXPORTER)
    assert place_of(DeathRecord(AtFailpoint(EXPORTER, Failpoint.EXPORT_ROWS), 1, Failpoint.EXPORT_ROWS)) == (
        "export-rows",
        EXPORTER,
    )


@pytest.mark.parametrize(
    ("setting", "events", "key"),
    [
        ("sources.lines.follow=true", None, "sources.lines.follow"),
        ("seed=1", 100, "sources.lines"),
        ('sources={made={kind="simulated", rate=10.0}}', None, "sources.made"),
    ],
)
def test_a_stream_that_never_ends_is_refused(tmp_path, setting, events, key):
    job = write_job(tmp_path, num_parts=1, num_lines=1)
    with pytest.raises(SpecError, match=f"^{key}: "):
        FaultRuns(job, [setting], events, 1, lambda *_: None)
    assert not (tmp_path / "store-faults-1").exists()


def test_what_an_earlier_fault_run_left_is_not_touched(tmp_path):
    job = write_job(tmp_path, num_parts=1, num_lines=1)
    (tmp_path / "store-faults-7").mkdir()
    with pytest.raises(SpecError, match="another --seed"):
        FaultRuns(job, [], None, 7, lambda *_: None)


def test_every_disturbed_run_has_the_kernels_of_the_undisturbed_one(tmp_path, monkeypatch):
    """Two jobs that measure may choose otherwise, and would then differ for no fault."""
    kernels = {"416x64": {"forward": "onednn", "input_gradient": "mkl", "weight_gradient": "mkl"}}
    given = []

    def run(job, seen, on_line):
        given.append(validate(WorkerConfig, plan_job(job, tmp_path, generation=1).rank0.config).matmul)
        log = Log.claim(make_folder(seen.log), 1, Deadline.after(5), timeline="t1")
        log.append(MatmulOperation(setting="measured", kernels=kernels, fingerprint={}))
        log.close()
        return RunOutcome(0, "")

    monkeypatch.setattr(rounds, "run", run)
    runs = FaultRuns(write_job(tmp_path), [], None, 7, lambda *_: None)
    runs.undisturbed()
    runs.disturbed(1, None)
    runs.disturbed(2, None)
    assert given == [None, kernels, kernels]


def make_folder(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
