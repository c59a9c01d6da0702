"""A running job moves to another build at a close, and learns the same as one that stays."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import millrace
from tests.integration.hosted_service import CONFIG, HostedService, closes, launcher, report, spec_of
from tests.integration.stream_job import write_job

ROOT = Path(millrace.__file__).parents[1]
PACKAGES = ("service", "trainer", "pserver", "dataset", "millrace")
SAME = ("digest", "events", "samples", "passes", "positions", "metrics")
NEXT = "0.2.0-next"


def environment(folder):
    """A second environment: a copy of this one's packages with another version number."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "code" / name)  # with times and compiled kernels
    module = folder / "code" / "millrace" / "__init__.py"
    module.write_text(module.read_text().replace(millrace.__version__, NEXT))
    venv.EnvBuilder(symlinks=True).create(folder / "env")
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "build.pth").write_text(f"{folder / 'code'}\n{sysconfig.get_paths()['purelib']}\n")
    return folder / "env" / "bin" / "python"


@pytest.fixture
def service(tmp_path, url):
    python = environment(tmp_path / "next")
    builds = f'[builds.next]\npython = "{python}"\n[builds.bare]\npython = "/bin/false"\n'
    config = CONFIG.replace('[["cat"]]', '[["sh", "pipe.sh"]]').replace("[access]", f'database = "{url}"\n[access]')
    service = HostedService(tmp_path, config + builds)
    write_job(tmp_path / "data", num_lines=2400)
    (tmp_path / "data" / "pipe.sh").write_text("if [ -e slowly ]; then sleep 1; fi; exec cat\n")
    service.start()
    yield service
    service.clean_up()


def phase(*wanted):
    return lambda job: job["phase"] in wanted


def done(service, path, build):
    """The operation of a move, once it is over."""
    operation = service.ask("POST", path, {"build": build})
    return service.until(f"/operations/{operation['id']}", lambda told: told["ended"] is not None)


def moved_back(service):
    """All jobs moved by the command to the service's own environment; what it prints."""
    words = [sys.executable, "-m", "service", "upgrade", "--all", "--url", str(service.http.base_url)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_that_moves_while_it_runs_learns_the_same_and_reads_each_event_once(service, tmp_path):
    data = tmp_path / "data"
    (data / "slowly").touch()
    train = {"threads": 1, "batch_size": 8, "matmul": "mkl"}
    spec = spec_of(pipe={"command": ["sh", "pipe.sh"]}, passes={"max_events": 100}, train=train)
    for name in ("moves", "stays"):
        service.ask("POST", "/jobs", {"name": name, "spec": spec, "base": str(data)})
    before = service.until("/jobs/moves", lambda job: (job["version"] or 0) >= 2)
    assert (before["build"], before["millrace_version"]) == ("", millrace.__version__)
    refused = done(service, "/jobs/moves/upgrade", "bare")
    assert refused["state"] == "failed" and "no environment that a job can move to" in refused["problem"]["detail"]
    assert launcher(tmp_path / "root" / "jobs" / "moves")[1] and service.ask("GET", "/jobs/moves")["build"] == ""

    moved = done(service, "/jobs/moves/upgrade", "next")
    assert moved["result"] == {
        "job": "moves", "build": "next", "version": NEXT, "was": millrace.__version__,
    }, moved  # fmt: skip
    job = service.ask("GET", "/jobs/moves")
    assert (job["build"], job["millrace_version"]) == ("next", NEXT)
    _, pid = launcher(tmp_path / "root" / "jobs" / "moves")
    assert str(tmp_path / "next" / "env") in Path(f"/proc/{pid}/cmdline").read_text()
    assert sys.executable not in Path(f"/proc/{pid}/cmdline").read_text()

    (data / "slowly").unlink()
    for name in ("moves", "stays"):
        ended = service.until(f"/jobs/{name}", phase("ended", "failed"))
        assert ended["phase"] == "ended", service.said()
    stores = [tmp_path / "root" / "jobs" / name / "store" for name in ("moves", "stays")]
    first, second = ({name: report(store)[name] for name in SAME} for store in stores)
    assert first == second
    assert [each["digests"] for each in closes(stores[0])][-1] == [each["digests"] for each in closes(stores[1])][-1]
    assert first["events"] == sum(path.read_text().count("\n") for path in data.glob("part-*.txt"))
    own = millrace.__version__
    assert moved_back(service) == f"moves: {NEXT} -> {own}\nstays: {own} -> {own}\n"
    assert service.ask("GET", "/jobs/moves")["build"] == ""
    assert service.end() == 0
