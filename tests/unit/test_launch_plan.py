"""The processes of jobs and predictions; each worker can read its configuration."""

from pathlib import Path

import pytest

from headrace.config import validate
from headrace.identity.authority import open_authority
from headrace.pserver.config import DENSE_SLICES, ShardProcess
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_run import workers_of
from headrace.service.cluster.worker_plan import GenerationRole, PredictionFolders, plan_job, plan_prediction
from headrace.service.spec.job import load_job
from headrace.shared_folder import SharedFolder
from headrace.trainer.config import WorkerConfig
from headrace.trainer.predict.config import PredictionRequest, PredictWorker
from tests.fakes.past import Past

NEWS = Path(__file__).parents[1] / "golden" / "news.toml"


@pytest.fixture
def plan(tmp_path):
    def plan(cluster, cores=8, **more):
        job = load_job(NEWS, [f"cluster={cluster}", f"store.path={tmp_path}/store"])
        return plan_job(job, tmp_path / "run", cores, **{"generation": 3, **more})

    return plan


def test_one_trainer_has_its_shard_within(plan, tmp_path):
    planned = plan("{}")
    assert planned.shards == ()
    worker = validate(WorkerConfig, planned.rank0.config)
    assert (worker.rank, worker.world, worker.shards) == (0, 1, ())
    assert (worker.folder, worker.store) == (NEWS.parent, tmp_path / "store")
    assert worker.job["name"] == "news"
    assert (worker.generation, worker.live, worker.until) == (3, tmp_path / "store/live/g3-shard-0", None)


def test_trainers_and_shards_can_read_what_they_are_told(plan, tmp_path):
    planned = plan('{trainers=3,shards=2,max_message="64MiB"}')
    shards = [validate(ShardProcess, shard.config) for shard in planned.shards]
    assert [(s.shard, s.num_shards, s.num_ranks, s.seed) for s in shards] == [(0, 2, 3, 1), (1, 2, 3, 1)]
    assert shards[0].tables["default"].optimizer.lr == 0.05
    assert shards[0].end_with_stdin
    trainers = [validate(WorkerConfig, {**t.config, "shards": ["a", "b"]}) for t in planned.trainers]
    assert [(t.rank, t.world, t.shards) for t in trainers] == [(rank, 3, ("a", "b")) for rank in range(3)]
    assert len({worker.name for worker in (*planned.shards, *planned.trainers)}) == 5
    assert {worker.max_message for worker in (*shards, *trainers)} == {64 << 20}
    assert [s.live for s in shards] == [tmp_path / "store/live/g3-shard-0", tmp_path / "store/live/g3-shard-1"]
    assert {t.live for t in trainers} == {None}
    assert {worker.generation for worker in (*shards, *trainers)} == {planned.generation} == {3}
    assert {worker.secret for worker in (*shards, *trainers)} == {planned.secret}


def test_with_rows_on_devices_each_trainer_has_a_shard_within_and_is_told_where_all_are(tmp_path):
    settings = ["train.rows=device", "cluster={trainers=2,shards=2}", f"store.path={tmp_path}/store"]
    planned = plan_job(job := load_job(NEWS, settings), tmp_path / "run", 8, generation=3)
    assert planned.shards == planned.servers == ()
    assert workers_of(job) == [each.name for each in planned.trainers], "no trace waits for the shards"
    trainers = [validate(WorkerConfig, each.config) for each in planned.trainers]
    sockets = [tmp_path / "run" / f"shard-{number}.socket" for number in range(2)]
    assert [(each.shard.shard, each.shard.num_ranks, each.shard.socket) for each in trainers] == [
        (number, 2, socket) for number, socket in enumerate(sockets)
    ]
    assert {each.shards for each in trainers} == {tuple(f"unix:{socket}" for socket in sockets)}


def test_workers_off_loopback_get_certificates_of_their_generation_and_the_launcher_one(plan, tmp_path):
    authority = open_authority(tmp_path / "identity", "news")
    planned = plan('{trainers=2,shards=1,interface="eth0",trust_interface=true}', authority=authority)
    (shard,) = [validate(ShardProcess, shard.config) for shard in planned.shards]
    trainers = [validate(WorkerConfig, {**each.config, "shards": ["a"]}) for each in planned.trainers]
    names = [str(worker.credentials.name) for worker in (shard, *trainers)]
    whose = "of generation 3 of job 'news'"
    assert names == [f"shard-0 {whose}", f"trainer-0 {whose}", f"trainer-1 {whose}"]
    assert {worker.interface for worker in (shard, *trainers)} == {"eth0"}
    assert str(planned.head.current.name) == f"head-0 {whose}" and str(planned.to_rank0.name) == f"trainer-0 {whose}"
    assert "PRIVATE" not in repr(planned)


def test_workers_that_join_get_their_certificates_then_and_the_launcher_has_one(plan, tmp_path):
    authority = open_authority(tmp_path / "identity", "news")
    planned = plan('{trainers=2,launcher="external",interface="eth0",trust_interface=true}', authority=authority)
    assert str(planned.head.current.name) == "head-0 of generation 3 of job 'news'"
    assert not any("credentials" in worker.config for worker in (*planned.shards, *planned.trainers))


def test_workers_of_one_machine_have_no_certificates(plan):
    planned = plan("{trainers=2}")
    assert planned.head is None and planned.to_rank0 is None
    assert not any("credentials" in worker.config for worker in (*planned.shards, *planned.trainers))


def test_workers_of_other_machines_learn_the_store_that_they_must_see(plan, tmp_path):
    sees = SharedFolder(path=tmp_path / "store", proof="shared/1")
    planned = plan('{trainers=2,launcher="external"}', sees=sees)
    told = [validate(ShardProcess, shard.config).sees for shard in planned.shards]
    told += [validate(WorkerConfig, trainer.config).sees for trainer in planned.trainers]
    assert told == [sees] * 3
    assert not any(worker.config["sees"] for worker in (*plan("{}").shards, *plan("{}").trainers))


def test_trainers_can_be_told_to_end_with_the_log(plan):
    planned = plan("{trainers=2}", role=GenerationRole(until="logged"))
    assert [validate(WorkerConfig, trainer.config).until for trainer in planned.trainers] == ["logged"] * 2


def test_a_plan_is_of_a_generation_above_all_others_and_live_rows_of_those_go(tmp_path):
    job = load_job(NEWS, [f"store.path={tmp_path}/store"])
    plans = GenerationPlans(job, tmp_path / "workers")
    assert plans.next(0).generation == 1
    past = Past(tmp_path / "store").begin()
    past.generation = 6
    past.begin().end()
    (tmp_path / "store/live/g7-shard-0/default").mkdir(parents=True)
    planned = plans.next(3)
    assert (planned.generation, planned.run_folder) == (8, tmp_path / "workers" / "g8")
    assert not (tmp_path / "store/live").exists()
    assert plans.next(11).generation == 12
    assert GenerationPlans(job, tmp_path / "workers", 20).next(11).generation == 21


def test_every_start_has_a_secret_of_its_own_that_is_not_shown(plan):
    first, second = plan("{}"), plan("{}")
    assert first.secret != second.secret
    assert len(first.secret) == 64
    assert first.secret not in repr(first)


@pytest.mark.parametrize(("trainers", "cores", "each"), [(1, 8, 8), (3, 8, 2), (3, 2, 1)])
def test_trainers_share_the_machines_cores(plan, trainers, cores, each):
    planned = plan(f"{{trainers={trainers}}}", cores)
    assert [t.config["cores"] for t in planned.trainers] == [each] * trainers


def test_workers_do_not_import_from_the_users_folder(plan):
    planned = plan("{trainers=2}")
    assert {worker.command[1:3] for worker in (*planned.shards, *planned.trainers)} == {("-P", "-m")}
    assert [worker.command[3] for worker in (*planned.shards, *planned.trainers)] == [
        "headrace.pserver",
        "headrace.trainer.train",
        "headrace.trainer.train",
    ]


def test_shards_hold_dense_slices_where_they_train_them_and_not_where_they_predict(tmp_path):
    job = load_job(NEWS, [f"store.path={tmp_path}/store", "cluster={shards=1}", 'dense.strategy="shards"'])
    request = validate(PredictionRequest, {"input": {"paths": ["holdout.txt"]}, "output": "out", "shards": 1})
    folders = PredictionFolders(output="s3://bucket/out", commit=tmp_path, live=tmp_path, private=tmp_path)
    trained = plan_job(job, tmp_path / "run", 1, generation=1).shards
    predicted = plan_prediction(job, request, folders, 1.0, beside=False).shards
    held = [set(validate(ShardProcess, shard.config).tables) for shard in (*trained, *predicted)]
    assert held == [{"default", DENSE_SLICES}, {"default"}]


# -- predictions


@pytest.mark.parametrize(("shards", "beside"), [(0, False), (2, False), (2, True)])
def test_predictors_and_shards_can_read_what_they_are_told(tmp_path, shards, beside):
    job = load_job(NEWS, [f"store.path={tmp_path}/store", 'cluster.max_message="64MiB"'])
    raw = {"input": {"paths": ["holdout.txt"]}, "output": "out", "trainers": 3 if shards else 1, "shards": shards}
    request = validate(PredictionRequest, raw)
    folders = PredictionFolders(
        output=str(tmp_path / "out"), commit=tmp_path / "commit", live=tmp_path / "rows", private=tmp_path / "private"
    )
    planned = plan_prediction(job, request, folders, 6.0, beside=beside)
    told = [validate(ShardProcess, shard.config) for shard in planned.shards]
    assert [(s.shard, s.num_shards, s.num_ranks, s.generation) for s in told] == [(n, 2, 3, 1) for n in range(shards)]
    assert [s.live for s in told] == [tmp_path / f"rows/shard-{n}" for n in range(shards)]
    predictors = [validate(PredictWorker, {**p.config, "shards": ["a", "b"]}) for p in planned.predictors]
    assert [p.rank for p in predictors] == list(range(request.trainers))
    assert {p.cores for p in predictors} == {6.0 / request.trainers}
    assert {p.commit for p in predictors} == {tmp_path / "commit"}
    assert {worker.secret for worker in (*told, *predictors)} == {planned.secret}
    assert {worker.max_message for worker in (*told, *predictors)} == {64 << 20}
    commands = {(spec.name[:5], spec.command[3:]) for spec in (*planned.shards, *planned.predictors)}
    run = ("headrace.trainer.predict.background",) if beside else ()
    assert commands == {
        ("predi", (*run, "headrace.trainer.predict")),
        *({("shard", (*run, "headrace.pserver"))} if shards else ()),
    }
    assert planned.secret not in repr(planned)
