"""Moves to another build: refused before anything is done, one by one, and the first that fails ends it."""

import sys
import sysconfig
import threading
import tomllib
import venv
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import headrace
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.jobs import builds
from headrace.service.jobs.build_check import environment, identity_of, report_on
from headrace.service.jobs.builds import BuildRefused, BuildReport, ask, interpreter, upgrade, upgrade_all
from headrace.service.jobs.config import ServiceConfig
from headrace.service.jobs.decisions import DesiredState, ObservedState, requested_move
from headrace.service.jobs.errors import HostingError, NotHosted
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.foreground_host import foreground_host
from headrace.service.jobs.host import Desired, Ending, NewJob
from headrace.service.spec.job import job_of
from headrace.trainer.checkpoint import commits
from headrace.trainer.journal import log_file
from headrace.trainer.journal.log_file import listed
from tests.fakes.asked_api import api
from tests.fakes.past import Past
from tests.integration.stream_job import SPEC

ROOT = Path(headrace.__file__).parents[1]
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
def served(tmp_path, url):
    with api(tmp_path, database=url) as served:
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
        ("a", headrace.__version__),
        ("b", headrace.__version__),
    ]


@pytest.mark.parametrize(
    ("of_the_launcher", "of_the_build", "moves"),
    [("one", "one", False), ("one", "another", True), ("", "one", True), ("one", "", True), ("", "", True)],
)
def test_a_job_stays_only_where_it_runs_in_the_very_environment_of_the_build(
    served, monkeypatch, of_the_launcher, of_the_build, moves
):
    job = hosted(served, "a")
    running = replace(job, version=headrace.__version__, environment=of_the_launcher)
    served.host._jobs["a"] = running  # of the service's own build, and of its version
    monkeypatch.setattr("headrace.service.jobs.build_check.environment", lambda: of_the_build)
    told = upgrade(served.host, "a", builds.OWN, quiet, threading.Event())
    assert told == {"job": "a", "build": "", "version": headrace.__version__, "was": headrace.__version__}
    assert served.host.job("a").revision == (2 if moves else 1)


def test_a_job_moves_to_another_build_of_the_same_environment(served):
    job = hosted(served, "a")
    served.host._jobs["a"] = replace(job, environment=environment())
    served.host.builds = {"same": Path(sys.executable)}
    assert ask(served.host.builds, "same", job.folder, Deadline.after(60)).environment == environment() != ""
    upgrade(served.host, "a", "same", quiet, threading.Event())
    assert served.host.job("a").build == "same"


def test_a_build_that_does_not_tell_its_environment_has_an_unknown_one(tmp_path):
    old = tmp_path / "python"
    old.write_text("""#!/bin/sh\necho '{"version": "0.0.9", "problem": ""}'\n""")
    old.chmod(0o755)
    assert ask({"old": old}, "old", tmp_path, Deadline.after(20)) == BuildReport("0.0.9", "", "")


def test_the_identity_of_an_environment_changes_with_its_interpreter_and_its_code(tmp_path):
    for name in ("dataset", "pserver", "service", "trainer"):
        (tmp_path / name / "deep").mkdir(parents=True)
    code, proto = tmp_path / "trainer/deep/loop.py", tmp_path / "pserver/rows.proto"
    code.write_text("pass\n")
    found = [identity_of("/opt/a", tmp_path), identity_of("/opt/b", tmp_path)]
    for path, text in ((code, "fail\n"), (proto, "a"), (tmp_path / "dataset/deep/new.py", "")):
        path.write_text(text)
        found.append(identity_of("/opt/a", tmp_path))
    code.rename(code.with_name("pool.py"))
    found.append(identity_of("/opt/a", tmp_path))
    assert len(set(found)) == len(found)
    for name in ("trainer/deep/loop.cpython-311.pyc", "trainer/README.md"):
        (tmp_path / name).write_text("x")
    assert identity_of("/opt/a", tmp_path) == found[-1]


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
def test_an_environment_without_headrace_is_refused(tmp_path, program):
    with pytest.raises(HostingError, match="build 'bad' .*cannot be started|is no environment that a job can move to"):
        ask({"bad": Path(program)}, "bad", tmp_path, Deadline.after(20))


def test_a_build_runs_its_own_packages_whatever_the_services_variables_name(served, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONUTF8", "1")
    other, own = builds.variables_for(str(python)), builds.variables_for(sys.executable)
    assert own.keys() - other.keys() == {"PYTHONHOME", "PYTHONPATH"} and other["PYTHONUTF8"] == "1"
    job = hosted(served, "a")
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "build.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    found = ask({"next": tmp_path / "venv" / "bin" / "python"}, "next", job.folder, Deadline.after(60))
    assert (found.version, found.problem) == (headrace.__version__, "")


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


def test_a_build_that_is_older_than_the_log_is_refused(served, monkeypatch):
    job = hosted(served, "news")
    past = Past(job.store).begin()
    past.close(1, a=(0, 100))
    assert report_on(JobFolder(job.folder))["problem"] == ""
    with monkeypatch.context() as newer:
        newer.setattr(log_file, "FORMAT", log_file.FORMAT + 1)
        past.close(2, a=(100, 200))
    assert f"a record of format {log_file.FORMAT + 1}" in report_on(JobFolder(job.folder))["problem"]
    with pytest.raises(BuildRefused, match="run the newer one"):
        upgrade(served.host, "news", builds.OWN, quiet, threading.Event())
    past.end()
    assert served.host.job("news").revision == 1


def test_a_build_that_does_not_know_a_record_is_refused(served):
    job = hosted(served, "news")
    Past(job.store).begin().end()
    text = b'{"n":2,"kind":"of tomorrow"}'
    with newest_file(job.store).open("ab") as log:
        log.write(b"%d %08x %s\n" % (log_file.FORMAT, zlib.crc32(text), text))
    problem = report_on(JobFolder(job.folder))["problem"]
    assert "of tomorrow" in problem and problem.endswith("run the program that wrote it")


@pytest.mark.parametrize("length", [-7, 3], ids=["torn", "damaged"])
def test_whether_a_log_is_whole_is_for_the_start_to_judge(served, length):
    job = hosted(served, "news")
    past = Past(job.store).begin()
    past.close(1, a=(0, 100))
    past.end()
    newest_file(job.store).write_bytes(newest_file(job.store).read_bytes()[:length])
    assert report_on(JobFolder(job.folder))["problem"] == ""


def newest_file(store):
    return listed(store / "log")[-1]


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
