"""Moves to another build: refused before anything is done, one by one, and the first that fails ends it."""

import sys
import threading
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

import millrace
from millrace.deadline import Deadline
from millrace.errors import SpecError
from service.jobs import builds
from service.jobs.build_check import report_on
from service.jobs.builds import BuildRefused, ask, interpreter
from service.jobs.config import ServiceConfig
from service.jobs.decisions import DesiredState, ObservedState, requested_move
from service.jobs.errors import HostingError, NotHosted
from service.jobs.folder import JobFolder
from service.jobs.foreground_host import foreground_host
from service.jobs.host import Desired, Ending, NewJob
from service.jobs.upgrade import upgrade, upgrade_all
from service.spec.job import job_of
from tests.fakes.asked_api import api
from tests.fakes.past import Past
from tests.integration.stream_job import SPEC
from trainer.checkpoint import commits

RAW = tomllib.loads(SPEC)
NOW = datetime(2026, 3, 4, tzinfo=UTC)


def quiet(_progress, _words):
    pass


def hosted(served, name):
    """A job whose folder a build can read."""
    job = served.host.create(NewJob(spec=RAW, name=name), "ann")
    job.folder.mkdir()
    JobFolder(job.folder).write_job({**RAW, "name": name}, job.folder)
    return job


@pytest.fixture
def served(tmp_path):
    with api(tmp_path) as served:
        yield served


def test_jobs_move_by_name_until_one_fails(served):
    for name in ("c", "a", "b"):
        hosted(served, name)
    (served.host.job("b").folder / "job.json").write_text("{")
    told = served.done(served.post("/v1/upgrade", {}))
    assert told["state"] == "failed"
    assert "job 'b', which stays as it is" in told["problem"]["detail"]
    assert told["problem"]["detail"].endswith("Moved before: a; not tried: c")
    assert [served.host.job(name).revision for name in "abc"] == [2, 1, 1]


def test_all_that_can_move_do_and_the_answer_names_them(served):
    for name in ("b", "a"):
        hosted(served, name)
    done = upgrade_all(served.host, "", quiet, threading.Event())
    assert [(each["job"], each["version"]) for each in done["jobs"]] == [
        ("a", millrace.__version__),
        ("b", millrace.__version__),
    ]


def test_a_build_that_no_file_names_is_refused_at_once(served):
    hosted(served, "a")
    served.host.builds = {"next": Path(sys.executable)}
    for path in ("/v1/jobs/a/upgrade", "/v1/upgrade"):
        refused = served.post(path, {"build": "/bin/sh"})
        assert refused.status_code == 422 and "builds of the service's configuration: next" in refused.json()["detail"]
    assert served.get("/v1/builds").json() == {"builds": ["next"]}
    with pytest.raises(SpecError, match="build: 'x' is not among"):
        interpreter({}, "x")


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_an_environment_without_millrace_is_refused(tmp_path, program):
    with pytest.raises(HostingError, match="build 'bad' .*cannot be started|is no environment that a job can move to"):
        ask({"bad": Path(program)}, "bad", tmp_path, Deadline.after(20))


def test_a_build_that_is_older_than_the_store_says_what_to_do_and_the_job_stays(served, monkeypatch):
    job = hosted(served, "news")
    past = Past(job.store).begin()
    past.close(1, a=(0, 100))
    with monkeypatch.context() as newer:
        newer.setattr("tests.fakes.past.FORMAT", commits.FORMAT + 1)
        name = past.commit(1)
    past.end()
    problem = report_on(JobFolder(job.folder))["problem"]
    assert problem.startswith(f"{name}: is of format {commits.FORMAT + 1}") and "run the newer one" in problem
    with pytest.raises(BuildRefused, match="the service's own build cannot go on with job 'news', which stays"):
        upgrade(served.host, "news", builds.OWN, quiet, threading.Event())
    assert served.host.job("news").revision == 1


def test_a_job_that_is_to_run_starts_again_and_one_at_rest_has_the_build_from_its_next_start():
    running = DesiredState(desired=Desired.PAUSED, ask=3, asked_s=0.0)
    moved = requested_move(running, ObservedState(alive=True, ask=3), "next", NOW)
    assert moved == {"build": "next", "ask": 4, "asked_at": NOW, "deaths": ()}, "and it is paused still"
    ended = ObservedState(ask=3, ending=Ending(0, "", (), NOW))
    assert requested_move(running, ended, "next", NOW) == {"build": "next"}
    stopped = DesiredState(desired=Desired.STOPPED, ask=3, asked_s=0.0)
    assert requested_move(stopped, ObservedState(), "next", NOW) == {"build": "next"}


def test_a_foreground_run_does_not_move(tmp_path):
    with foreground_host(job_of(RAW, tmp_path), dict) as host, pytest.raises(NotHosted, match="another build"):
        host.use_build("small", "next")


def test_the_folder_of_a_build_is_closed_to_specs_and_its_path_is_absolute(tmp_path):
    (tmp_path / "pyvenv.cfg").touch()
    of_a_venv, of_the_machine = tmp_path / "bin" / "python", Path("/bin/python")
    builds_ = {"next": {"python": of_a_venv}, "plain": {"python": of_the_machine}}
    assert ServiceConfig(root=tmp_path / "root", builds=builds_).private[-2:] == (tmp_path, Path("/bin"))
    with pytest.raises(ValueError, match="absolute path"):
        ServiceConfig(root=tmp_path, builds={"next": {"python": "python"}})
