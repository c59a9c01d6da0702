"""Running jobs move to another build at a close, one by one, and learn the same as one that stays."""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from contextlib import suppress
from pathlib import Path

import pytest

import headrace
from headrace.deadline import Deadline
from tests.integration.hosted_service import CONFIG, HostedService, closes, launcher, report, spec_of
from tests.integration.stream_job import write_job

ROOT = Path(headrace.__file__).parents[1]
SAME = ("digest", "events", "samples", "passes", "positions", "metrics")
NEXT = "0.3.0-next"
NEWER = ("FORMAT = 3", "FORMAT = 4"), ("FORMAT_OF_FILES = 2", "FORMAT_OF_FILES = 4")
"""What the next version writes into its commits."""


def environment(folder):
    """A second environment: a copy of this one's packages with another version number and a newer format of commits."""
    shutil.copytree(ROOT / "headrace", folder / "code" / "headrace")  # with times and compiled kernels
    rewrite(folder / "code" / "headrace" / "__init__.py", (f'"{headrace.__version__}"', f'"{NEXT}"'))
    rewrite(folder / "code" / "headrace" / "trainer" / "checkpoint" / "commits.py", *NEWER)
    venv.EnvBuilder(symlinks=True).create(folder / "env")
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "build.pth").write_text(f"{folder / 'code'}\n{sysconfig.get_paths()['purelib']}\n")
    return folder / "env" / "bin" / "python"


def rewrite(module, *changes):
    text = module.read_text()
    for old, new in changes:
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n")
    module.write_text(text)


@pytest.fixture
def service(tmp_path, url):
    python = environment(tmp_path / "next")
    builds = f'[builds.next]\npython = "{python}"\n[builds.bare]\npython = "/bin/false"\n'
    config = CONFIG.replace('[["cat"]]', '[["sh", "pipe.sh"]]').replace("[access]", f'database = "{url}"\n[access]')
    service = HostedService(tmp_path, config + builds)
    write_job(tmp_path / "data", num_lines=2400)
    (tmp_path / "data" / "pipe.sh").write_text("if [ -e slowly ]; then sleep 2; fi; exec cat\n")
    service.start()
    yield service
    service.clean_up()


def phase(*wanted):
    return lambda job: job["phase"] in wanted


def done(service, path, build):
    """The operation of a move, once it is over."""
    operation = service.ask("POST", path, {"build": build})
    return service.until(f"/operations/{operation['id']}", lambda told: told["ended"] is not None)


def moved_back(service, *words):
    """The command that moves jobs to the service's own environment."""
    command = [sys.executable, "-m", "headrace.service", "upgrade", *words, "--url", str(service.http.base_url)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def formats(store):
    """Of all commits of a job."""
    found = set()
    for path in store.glob("commits/*/manifest.json"):
        with suppress(FileNotFoundError):  # an old one is removed meanwhile
            found.add(json.loads(path.read_text())["manifest"]["format"])
    return found


@pytest.mark.parametrize("new_database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.long
@pytest.mark.timeout(300)
def test_jobs_that_move_while_they_run_learn_the_same_and_read_each_event_once(service, tmp_path):
    data, jobs, own = tmp_path / "data", tmp_path / "root" / "jobs", headrace.__version__
    train = {"threads": 1, "batch_size": 8, "matmul": "mkl"}
    often = {"every": "600s", "every_passes": 3}
    spec = spec_of(
        pipe={"command": ["sh", "pipe.sh"]},
        passes={"max_events": 100},
        train=train,
        commit=often,
        crosses={"choose": "off"},  # before the first pass; the stream must not end before both jobs have moved
    )

    def create(name):
        service.ask("POST", "/jobs", {"name": name, "spec": spec, "base": str(data)})

    create("stays")
    assert service.until("/jobs/stays", phase("ended", "failed"))["phase"] == "ended", service.said()
    (data / "slowly").touch()
    for name in ("moves", "follows"):
        create(name)
        before = service.until(f"/jobs/{name}", lambda job: (job["version"] or 0) >= 2)
    assert (before["build"], before["headrace_version"]) == ("", own)
    refused = done(service, "/jobs/moves/upgrade", "bare")
    assert refused["state"] == "failed" and "no environment that a job can move to" in refused["problem"]["detail"]
    assert launcher(jobs / "moves")[1] and service.ask("GET", "/jobs/moves")["build"] == ""

    moved = done(service, "/jobs/moves/upgrade", "next")
    assert moved["result"] == {"job": "moves", "build": "next", "version": NEXT, "was": own}, moved
    job = service.until("/jobs/moves", lambda job: job["headrace_version"] == NEXT)  # as its launcher tells it
    assert job["build"] == "next"
    _, pid = launcher(jobs / "moves")
    assert str(tmp_path / "next" / "env") in Path(f"/proc/{pid}/cmdline").read_text()
    assert sys.executable not in Path(f"/proc/{pid}/cmdline").read_text()

    told = done(service, "/upgrade", "next")["result"]["jobs"]
    assert [(each["job"], each["was"], each["version"]) for each in told] == [
        ("follows", own, NEXT), ("moves", NEXT, NEXT), ("stays", own, NEXT),
    ]  # fmt: skip
    assert launcher(jobs / "moves")[1] == pid, "it was there already"
    for name, wanted in (("follows", "training"), ("moves", "training"), ("stays", "ended")):
        service.until(f"/jobs/{name}", phase(wanted))

    deadline = Deadline.after(60)
    while 4 not in formats(jobs / "moves" / "store"):
        deadline.check(service.said())
        time.sleep(0.1)
    refused = done(service, "/jobs/moves/upgrade", "")
    assert refused["state"] == "failed" and "this Headrace reads format 3" in refused["problem"]["detail"]
    assert "run the newer one" in refused["problem"]["detail"] and launcher(jobs / "moves")[1] == pid

    (data / "slowly").unlink()
    for name in ("moves", "follows"):
        ended = service.until(f"/jobs/{name}", phase("ended", "failed"))
        assert ended["phase"] == "ended", service.said()
        found, expected = jobs / name / "store", jobs / "stays" / "store"
        first, second = ({each: report(store)[each] for each in SAME} for store in (found, expected))
        assert first == second
        assert [each["digests"] for each in closes(found)][-1] == [each["digests"] for each in closes(expected)][-1]
    assert first["events"] == sum(path.read_text().count("\n") for path in data.glob("part-*.txt"))
    assert "run the newer one" in moved_back(service, "--all").stderr
    assert moved_back(service, "stays").stdout == f"stays: {own} -> {own}\n", "it ran nowhere else"
    assert service.ask("GET", "/jobs/stays")["build"] == ""
    assert service.end() == 0
