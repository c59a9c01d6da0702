"""What `headrace worker` and the external launcher are told: ranks, the section of the job file, the inputs."""

import pytest

from headrace import extras
from headrace.config import validate
from headrace.errors import SpecError
from headrace.service.cli.worker_command import ranks_of
from headrace.service.cluster.machine import input_files
from headrace.service.cluster.worker_plan import plan_job
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import load_job
from headrace.service.spec.launchers import check_launcher


def test_ranks_come_from_the_environment_where_they_are_set():
    assert ranks_of({}) == (None, 0, None)
    assert ranks_of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HOME": "x"}) == (3, 4, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, "set both RANK and WORLD_SIZE"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a' .* is not a number"),
    ],
)
def test_ranks_that_are_none_are_refused(environment, words):
    with pytest.raises(SpecError, match=words):
        ranks_of(environment)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            {"launcher": "ray"},
            'launcher = "ray" needs ray_address: HOST:PORT of the cluster, as `ray start --head` says',
        ),
        ({"launcher": "ray", "ray_address": "auto"}, "ray_address: 'auto' is not of the form 127.0.0.1:6379"),
        ({"resources": {"shard": {"cores": 0}}}, "resources.shard.cores: "),
        ({"launcher": "nomad"}, "launcher"),
        (
            {"launcher": "external", "listen": "0.0.0.0:7070", "trust_interface": True},
            "listen = '0.0.0.0:7070' lets workers of other machines join, and at interface = 'lo' no worker can reach",
        ),
        ({"listen": "7070"}, "'7070' is not of the form"),
        ({"node_timeout": "0s"}, "node_timeout"),
    ],
)
def test_a_launcher_that_is_not_there_is_refused(cluster, words):
    with pytest.raises(SpecError, match=words):
        validate(ClusterSection, cluster)


def test_workers_of_other_machines_join_where_an_interface_is_named_and_trusted():
    told = {"launcher": "external", "listen": "10.0.0.1:7070", "interface": "eth0"}
    assert validate(ClusterSection, {**told, "trust_interface": True}).leaves_machine
    with pytest.raises(SpecError, match="set trust_interface = true if that network is yours alone"):
        validate(ClusterSection, told)


def test_ray_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    with pytest.raises(
        SpecError, match=r"cluster.launcher: every machine of a Ray cluster needs Ray, .*headrace\[ray\]"
    ):
        check_launcher(validate(ClusterSection, {"launcher": "ray", "ray_address": "127.0.0.1:6379"}))
    check_launcher(validate(ClusterSection, {"launcher": "external"}))


def test_the_inputs_of_a_job_are_its_generator_its_model_and_its_source_files(tmp_path):
    (tmp_path / "job.toml").write_text("""
name = "own"
sources.lines = {kind = "files", paths = ["part-*.txt"]}
pipe.command = ["python", "generator.py", "--fast"]
slots = [{names = ["user"]}, {name = "click", kind = "meta"}]
tasks = [{name = "ctr", label = "click"}]
model.class = "nets.mine:Net"
store.path = "store"
""")
    for name in ("generator.py", "part-10.txt", "part-9.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text("")
    files = input_files(load_job(tmp_path / "job.toml"))
    assert files == ["generator.py", "part-9.txt", "part-10.txt", "nets/mine.py"]


def test_trainers_need_no_generator_and_no_source_files_where_there_are_readers(tmp_path):
    (tmp_path / "job.toml").write_text("""
name = "own"
sources.lines = {kind = "files", paths = ["part-*.txt"]}
pipe.command = ["python", "generator.py"]
slots = [{names = ["user"]}, {name = "click", kind = "meta"}]
tasks = [{name = "ctr", label = "click"}]
model.class = "mine:Net"
store.path = "store"
cluster = {readers = 2, launcher = "external"}
""")
    for name in ("generator.py", "part-1.txt", "mine.py"):
        (tmp_path / name).write_text(name)
    plan = plan_job(load_job(tmp_path / "job.toml"), tmp_path / "run", generation=1)
    assert [set(each.config["digests"]) for each in plan.readers] == [{"generator.py", "part-1.txt"}] * 2
    assert [set(each.inputs) for each in plan.trainers] == [{"mine.py"}]
