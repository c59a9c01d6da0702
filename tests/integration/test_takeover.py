"""Two services with one PostgreSQL: the second takes over when the first is killed or frozen, and jobs go on."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from headrace.deadline import Deadline
from headrace.service.jobs.folder import JobFolder
from tests.integration.hosted_service import CONFIG, HostedService, closes, kill, launcher, report, spec_of
from tests.integration.stream_job import write_job
from tests.postgres.cluster import PASSWORD

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
WITHIN_S = 30.0
NUM_LINES = 2000


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair(HostedService):
    """A service beside another one of the same folder: with a file and a port of its own."""

    def __init__(self, folder, name, database):
        self.port, self.name = free_port(), name
        config = CONFIG.replace(":0", f":{self.port}").replace("[access]", f'database = "{database}"\n[access]', 1)
        super().__init__(folder, config)
        (folder / "service.toml").rename(folder / f"{name}.toml")
        self.http.base_url = f"http://127.0.0.1:{self.port}"

    def begin(self):
        """Start it, whether it serves or waits."""
        command = [
            sys.executable,
            "-m",
            "headrace.service",
            "serve",
            "--config",
            str(self.folder / f"{self.name}.toml"),
        ]
        with (self.folder / "serve.err").open("a") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def says(self, word):
        line = self.process.stdout.readline()
        assert line.startswith(word), f"{line}{self.said()}"

    def standing_by(self, active):
        """Its answers while `active` is."""
        refused = self.http.get("/v1/jobs")
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert f"http://127.0.0.1:{active.port} is active" in refused.json()["detail"]
        assert self.http.post("/v1/jobs", json={}).status_code == 503
        assert self.http.get("/v1/health").json()["status"] == "ok"
        assert "headrace_service_active 0.0" in self.http.get("/metrics").text

    def active(self):
        """Whether it answers as the active service."""
        try:
            return self.http.get("/v1/jobs").status_code == 200
        except httpx.HTTPError:  # between the end of the standby's server and the start of the other
            return False

    def takes_over(self):
        """Wait until it is active; how long it took."""
        begun_s = time.monotonic()
        while not self.active():
            assert time.monotonic() < begun_s + WITHIN_S, self.said()
            time.sleep(0.05)
        assert "headrace_service_active 1.0" in self.http.get("/metrics").text
        return time.monotonic() - begun_s


@pytest.fixture
def pair(tmp_path, postgres):
    database = postgres.database()
    with ExitStack() as held:
        pair = [Pair(tmp_path, name, database) for name in ("first", "second")]
        for each in pair:
            held.callback(each.clean_up)
        write_job(tmp_path / "data", num_parts=3, num_lines=NUM_LINES)
        first, second = pair
        first.begin()
        first.says("serving")
        second.begin()
        second.says("waiting")
        yield pair


def test_a_killed_services_place_is_taken_and_its_jobs_go_on_untouched(pair, tmp_path, record_property):
    first, second = pair
    second.standing_by(first)
    spec = spec_of(commit={"every_passes": 8})
    first.ask("POST", "/jobs", {"name": "one", "spec": spec, "base": str(tmp_path / "data")})
    first.ask("POST", "/jobs/one/pause")
    first.until("/jobs/one", lambda job: job["phase"] == "paused")
    began = launcher(tmp_path / "root" / "jobs" / "one")

    first.kill()
    record_property("takeover_s", took_s := second.takes_over())
    print(f"took over {took_s:.1f} s after kill -9")
    second.until("/jobs/one", lambda job: job["phase"] == "paused")
    assert launcher(tmp_path / "root" / "jobs" / "one") == began, "a take-over restarts no job"
    second.ask("POST", "/jobs/one/resume")
    ended = second.until("/jobs/one", lambda job: job["phase"] in ("ended", "failed"))
    assert ended["phase"] == "ended", second.said()
    store = tmp_path / "root" / "jobs" / "one" / "store"
    num_events = sum(path.read_text().count("\n") for path in (tmp_path / "data").glob("part-*.txt"))
    assert report(store)["events"] == num_events
    numbers = [close["number"] for close in closes(store)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    acts = [entry["method"] for entry in second.ask("GET", "/audit?who=service")["items"]]
    assert sorted(acts) == ["start", "take over", "take over"]
    assert PASSWORD not in second.said()


def test_a_job_trains_while_no_service_is_active(pair, tmp_path):
    """Events arrive after one service's death and before the other has taken over, and are trained between the two."""
    first, second = pair
    stream = tmp_path / "data" / "part-0.txt"
    early, late, last = parts_of(stream.read_text().splitlines(keepends=True), 3)
    for path in (tmp_path / "data").glob("part-*.txt"):
        path.unlink()
    stream.write_text(early)
    followed = {"lines": {"kind": "files", "paths": ["part-*.txt"], "follow": True, "poll": "50ms"}}
    spec = spec_of(sources=followed, passes={"max_events": 100}, commit={"every": "1h"})
    first.ask("POST", "/jobs", {"name": "one", "spec": spec, "base": str(tmp_path / "data")})
    folder = tmp_path / "root" / "jobs" / "one"
    until_trained(folder, early)
    began = launcher(folder)

    os.kill(second.process.pid, signal.SIGSTOP)  # else it might be active before the events are trained
    first.kill()
    with stream.open("a") as more:
        more.write(late)
    until_trained(folder, early + late)
    assert Path(f"/proc/{second.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    os.kill(second.process.pid, signal.SIGCONT)
    print(f"took over {second.takes_over():.1f} s after the other standby was thawed")
    second.until("/jobs/one", lambda job: job["phase"] == "training")
    with stream.open("a") as more:
        more.write(last)
    until_trained(folder, early + late + last)
    assert launcher(folder) == began, "a take-over restarts no job"
    second.ask("POST", "/jobs/one/stop")
    second.until("/jobs/one", lambda job: job["phase"] == "stopped")
    assert report(folder / "store")["events"] == (early + late + last).count("\n")
    numbers = [close["number"] for close in closes(folder / "store")]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


def parts_of(lines, number):
    """The lines in so many texts."""
    each = len(lines) // number
    return ["".join(lines[at * each : (at + 1) * each]) for at in range(number)]


def until_trained(folder, text):
    """Wait until the log has closed passes with all events of `text`."""
    deadline = Deadline.after(60)
    while sum(close["events"] for close in closes(folder / "store")) < text.count("\n"):
        deadline.check(f"training the events in {folder}")
        time.sleep(0.05)


def test_a_frozen_service_that_wakes_up_does_nothing_and_waits(pair, tmp_path):
    first, second = pair
    spec = spec_of(commit={"every_passes": 8})
    first.ask("POST", "/jobs", {"name": "one", "spec": spec, "base": str(tmp_path / "data"), "start": False})
    os.kill(first.process.pid, signal.SIGSTOP)
    print(f"took over {second.takes_over():.1f} s after SIGSTOP")
    before = second.ask("GET", "/jobs/one")
    with socket.create_connection(("127.0.0.1", first.port), 10) as late:  # it reads this when it wakes up
        late.sendall(f"POST /v1/jobs/one/resume HTTP/1.1\r\nHost: 127.0.0.1:{first.port}\r\n\r\n".encode())
        os.kill(first.process.pid, signal.SIGCONT)
        late.settimeout(20)
        try:
            answer = late.recv(4096)
        except ConnectionResetError:  # closed before it was read
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 503"), answer
    first.says("waiting")
    first.standing_by(second)
    assert second.ask("GET", "/jobs/one") == before and before["phase"] == "stopped"
    assert not JobFolder(tmp_path / "root" / "jobs" / "one").alive()

    begun_s = time.monotonic()
    assert second.end() == 0
    first.takes_over()
    print(f"took over {time.monotonic() - begun_s:.1f} s after an orderly end")
    first.ask("POST", "/jobs/one/resume")
    first.until("/jobs/one", lambda job: job["phase"] == "training")
    kill(launcher(tmp_path / "root" / "jobs" / "one")[1])
