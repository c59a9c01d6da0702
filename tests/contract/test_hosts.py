"""The contract of every Host: that of the service, of a foreground run, and in memory."""

import threading
import tomllib

import pytest

from headrace.errors import HeadraceError, SpecError
from headrace.service.auth.config import AllowSection
from headrace.service.jobs.config import LimitsSection, ServiceConfig
from headrace.service.jobs.errors import JobExists, LimitReached, NotHosted, StillRunning, UnknownJob
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.foreground_host import foreground_host
from headrace.service.jobs.host import Action, Desired, LineFilter, NewJob, Phase
from headrace.service.jobs.local_host import host_jobs
from headrace.service.jobs.memory_host import MemoryHost
from headrace.service.jobs.operation_queue import OperationQueue
from headrace.service.jobs.output_files import OutputWriter
from headrace.service.records.database import NotActive, opened
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import Status
from tests.integration.stream_job import SPEC

RAW = tomllib.loads(SPEC)
HOSTS = ("service", "service on postgresql", "run", "memory")


def new(name="small", start=False, **sections):
    return NewJob(spec={**RAW, **sections}, name=name, start=start)


def config_of(tmp_path, database=None, **limits):
    allow = AllowSection(pipe_commands=[("cat",)], roots=(str(tmp_path / "data"),))
    return ServiceConfig(root=tmp_path / "root", database=database, allow=allow, limits=LimitsSection(**limits))


@pytest.fixture
def local(tmp_path):
    with host_jobs(config_of(tmp_path, max_jobs=2)) as host:
        yield host


@pytest.fixture
def host(request, tmp_path):
    """With the job "small", which does not run."""
    match request.param:
        case "service":
            host = request.getfixturevalue("local")
            host.create(new(), "ann")
            yield host
        case "service on postgresql":
            config = config_of(tmp_path, request.getfixturevalue("postgres").database(), max_jobs=2)
            with host_jobs(config) as host:
                host.create(new(), "ann")
                yield host
        case "run":
            with foreground_host(job_of(RAW, tmp_path), Status) as host:
                yield host
        case "memory":
            with opened(f"sqlite:///{tmp_path}/memory.db") as records:
                host = MemoryHost(records, OperationQueue(records), tmp_path)
                host.create(new(), "ann")
                yield host
                host.work.close()


every_host = pytest.mark.parametrize("host", HOSTS, indirect=True)


@every_host
def test_jobs_are_listed_and_each_is_what_the_list_has(host):
    assert [job.name for job in host.jobs()] == ["small"]
    job = host.job("small")
    assert job == host.jobs()[0] and job.loaded().spec.name == "small" and job.revision == 1
    assert host.status("small").state and host.log_lines("small", None, 0, 10) == []


@every_host
def test_what_names_no_job_is_told_which_there_are(host):
    for ask in (
        lambda: host.job("smal"),
        lambda: host.status("smal"),
        lambda: host.act("smal", Action.STOP, "ann"),
        lambda: host.count_change("smal"),
        lambda: host.delete("smal", "ann", keep_store=False),
        lambda: host.log_lines("smal", None, 0, 1),
    ):
        with pytest.raises(UnknownJob, match="known here: small"):
            ask()


@every_host
def test_a_change_is_another_revision(host):
    before = host.job("small").revision
    host.count_change("small")
    assert host.job("small").revision > before


@pytest.mark.parametrize("host", ["run"], indirect=True)
def test_a_foreground_run_neither_makes_nor_ends_jobs(host):
    with pytest.raises(NotHosted):
        host.create(new("other"), "ann")
    with pytest.raises(NotHosted):
        host.delete("small", "ann", keep_store=True)
    for action in Action:
        with pytest.raises(NotHosted):
            host.act("small", action, "ann")


@pytest.mark.parametrize("host", ["service", "memory"], indirect=True)
def test_a_job_that_does_not_run_is_deleted_and_its_name_is_free_again(host):
    with pytest.raises(JobExists):
        host.create(new(), "ann")
    host.delete("small", "ann", keep_store=False)
    assert host.jobs() == []
    assert host.create(new(), "ann").desired is Desired.STOPPED


def test_a_job_has_a_folder_with_its_spec_and_a_store_of_its_own(local, tmp_path):
    job = local.create(NewJob(spec={k: v for k, v in RAW.items() if k != "store"}, name="one", start=False), "ann")
    assert job.folder == tmp_path / "root" / "jobs" / "one" and job.store == job.folder / "store"
    assert (job.phase, job.desired, job.created_by) == (Phase.STOPPED, Desired.STOPPED, "ann")
    assert job.folder.stat().st_mode & 0o077 == 0
    assert JobFolder(job.folder).job() == (job.spec, job.base)


def test_jobs_are_there_again_after_the_host_was(tmp_path, url):
    with host_jobs(config_of(tmp_path, url)) as host:
        before = host.create(new(), "ann")
        host.act("small", Action.STOP, "ann")
    with host_jobs(config_of(tmp_path, url)) as host:
        assert host.job("small") == before


def test_one_service_hosts_a_root(tmp_path):
    with (
        host_jobs(config_of(tmp_path)),
        pytest.raises(SpecError, match="another service hosts the jobs"),
        host_jobs(config_of(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (new("../up"), SpecError, "name"),
        (new(pipe={"command": ["sh", "-c", "true"]}), SpecError, "pipe.command"),
        (new(store={"path": "/etc/store"}), SpecError, "store.path"),
        (new(modl={}), SpecError, "modl"),
        (NewJob(spec={}), SpecError, "name"),
    ],
    ids=["name", "command", "store", "unknown key", "nothing"],
)
def test_what_is_wrong_or_not_allowed_leaves_nothing_behind(local, tmp_path, request_, error, words):
    with pytest.raises(error, match=words):
        local.create(request_, "ann")
    assert local.jobs() == [] and list((tmp_path / "root" / "jobs").iterdir()) == []


def test_there_is_a_limit_on_jobs_and_two_do_not_share_a_store(local, tmp_path):
    (tmp_path / "data").mkdir()
    shared = {"path": str(tmp_path / "data" / "store")}
    local.create(new("a", store=shared), "ann")
    with pytest.raises(SpecError, match="belongs to job 'a'"):
        local.create(new("b", store={"path": f"{shared['path']}/below"}), "ann")
    local.create(new("b"), "ann")
    with pytest.raises(LimitReached, match="limits.max_jobs"):
        local.create(new("c"), "ann")


def test_of_many_that_make_the_same_job_one_does(local):
    made, errors = [], []

    def make():
        try:
            made.append(local.create(new(), "ann"))
        except HeadraceError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and {type(error) for error in errors} == {JobExists}
    assert local.job("small").phase is Phase.STOPPED


def test_a_folder_that_the_records_do_not_know_is_not_taken_over_unless_it_holds_a_spec_alone(local, tmp_path):
    folder = tmp_path / "root" / "jobs" / "small"
    folder.mkdir()
    (folder / "job.json").write_text("{}")  # a service died between folder and record
    local.create(new(), "ann")
    (tmp_path / "root" / "jobs" / "two").mkdir()
    (tmp_path / "root" / "jobs" / "two" / "store").mkdir()
    with pytest.raises(JobExists, match="unknown to the records"):
        local.create(new("two"), "ann")


@pytest.mark.parametrize("keep", [False, True])
def test_a_deleted_jobs_store_goes_or_is_kept(local, tmp_path, keep):
    store = tmp_path / "data" / "store"
    store.parent.mkdir()
    inside, outside = local.create(new("in"), "ann"), local.create(new("out", store={"path": str(store)}), "ann")
    for where in (inside.store, outside.store):
        where.mkdir()
        (where / "headrace.json").write_text('{"kind": "store", "format": 1}')
        (where / "run.json").write_text('{"job": "%s"}' % ("in" if where == inside.store else "out"))
        (where / "mine").touch()
    for name in ("in", "out"):
        local.delete(name, "ann", keep_store=keep)
    assert not inside.folder.exists() and not outside.folder.exists()
    kept = list((tmp_path / "root").glob("kept/in-*/store/run.json"))
    assert len(kept) == keep and (store / "run.json").exists() == keep
    assert (store / "mine").exists(), "nothing that is not ours is ever removed"


def test_a_job_that_something_is_done_to_is_not_deleted(local):
    local.create(new(), "ann")
    go = threading.Event()
    asked = local.work.start("verify", "small", "ann", lambda progress, cancelled: go.wait(20))
    with pytest.raises(StillRunning, match="an operation that is not over"):
        local.delete("small", "ann", keep_store=False)
    go.set()
    assert local.work.get(asked.id).job == "small"


def test_a_service_that_is_no_longer_active_touches_no_folder_and_no_store(local, tmp_path, monkeypatch):
    job = local.create(new(), "ann")

    def lost():
        raise NotActive("another one has taken its place")

    monkeypatch.setattr(local.records, "fence", lost)
    for act in (lambda: local.delete("small", "ann", keep_store=False), lambda: local.create(new("two"), "ann")):
        with pytest.raises(NotActive):
            act()
    assert job.folder.exists() and not (tmp_path / "root" / "jobs" / "two").exists()


def test_what_its_processes_printed_is_told(local):
    job = local.create(new(), "ann")
    output = OutputWriter(job.store / "output", 1 << 20)
    output.write("trainer-0", "hello")
    output.close()
    assert [line.text for line in local.log_lines("small", LineFilter("trainer-0"), -1, 5)] == ["hello"]
