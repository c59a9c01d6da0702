"""The service from outside: jobs survive its death and that of launchers, and no event counts twice."""

import os
import signal
import time
from pathlib import Path

import pytest

from headrace.service.jobs.folder import JobFolder
from tests.integration.hosted_service import HostedService, closes, kill, launcher, report, spec_of
from tests.integration.running_job import runs
from tests.integration.stream_job import write_job

MAX_EVENTS, PASS_EVENTS = 3 * 4000, 400


@pytest.fixture
def service(tmp_path):
    service = HostedService(tmp_path, own_forkserver=True)
    write_job(tmp_path / "data", num_parts=3, num_lines=MAX_EVENTS // 3)
    service.start()
    yield service
    service.clean_up()


def phase(*wanted):
    return lambda job: job["phase"] in wanted


def wait_for(condition, within_s=60):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def children(pid):
    """Process numbers of its children, by the module or program that each runs."""
    listed = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in listed}
    return {line.partition(" -m ")[2].split()[0]: child for child, line in lines.items() if " -m " in line}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_training_goes_on_without_the_service_and_again_after_its_launcher_and_every_event_counts_once(service):
    body = {
        "name": "one",
        "spec": spec_of(commit={"every_passes": 8}),
        "base": str(service.folder / "data"),
    }
    assert service.ask("POST", "/jobs", body)["name"] == "one"
    service.until("/jobs/one", phase("training"))
    folder = service.jobs / "one"
    store = folder / "store"
    service.ask("POST", "/jobs/one/pause")
    service.until("/jobs/one", phase("paused"))
    first = launcher(folder)
    warm = children(service.process.pid)["headrace.warm_forkserver"]
    assert "headrace.forkserver" not in children(first[1]) and "headrace.forkserver" in children(warm)

    service.kill()
    wait_for(lambda: not runs(warm))
    seen = len(closes(store))
    (store / "paused").unlink()  # nobody but rank 0 is there to notice
    wait_for(lambda: len(closes(store)) > seen)
    (store / "paused").touch()  # there must be something left to train
    assert JobFolder(folder).alive() and launcher(folder) == first

    service.start()
    service.until("/jobs/one", phase("paused"))
    assert launcher(folder) == first

    kill(first[1])
    service.until("/jobs/one", lambda job: phase("paused")(job) and launcher(folder) != first)
    service.ask("POST", "/jobs/one/resume")
    ended = service.until("/jobs/one", phase("ended", "failed"))
    assert (ended["phase"], ended["outcome"]["code"]) == ("ended", 0), service.said()
    num_events = sum(path.read_text().count("\n") for path in (service.folder / "data").glob("part-*.txt"))
    assert report(store)["events"] == num_events
    assert report(store)["passes"] == -(-num_events // PASS_EVENTS)
    numbers = [close["number"] for close in closes(store)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    lines = service.ask("GET", "/jobs/one/output?worker=trainer-0&last=true&limit=1")["items"]
    assert "done: version" in lines[0]["text"]
    acts = [entry["method"] for entry in service.ask("GET", "/audit?who=service")["items"]]
    assert acts == ["start", "start"]

    assert service.ask("DELETE", "/jobs/one", **{"If-Match": "*"}) is None
    assert not folder.exists() and service.ask("GET", "/jobs")["items"] == []
    assert service.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_is_stopped_begun_again_drained_and_killed_where_it_does_not_end(service):
    spec = spec_of(commit={"every_passes": 8})
    service.ask("POST", "/jobs", {"name": "two", "spec": spec, "base": str(service.folder / "data"), "start": False})
    folder = service.jobs / "two"
    assert service.ask("GET", "/jobs/two")["phase"] == "stopped" and not JobFolder(folder).alive()
    service.ask("POST", "/jobs/two/resume")
    service.until("/jobs/two", phase("training"))
    service.ask("POST", "/jobs/two/stop")
    assert service.until("/jobs/two", phase("stopped", "failed"))["phase"] == "stopped"
    seen = len(closes(folder / "store"))
    assert 0 < seen < MAX_EVENTS // PASS_EVENTS

    for action in ("restart", "pause"):  # held, or the stream would be over before all is asked
        service.ask("POST", f"/jobs/two/{action}")
    service.until("/jobs/two", phase("paused"))
    before = launcher(folder)
    for action in ("restart", "pause"):
        service.ask("POST", f"/jobs/two/{action}")
    service.until("/jobs/two", lambda job: phase("paused")(job) and launcher(folder) != before)

    stuck = launcher(folder)[1]
    os.kill(stuck, signal.SIGSTOP)
    service.ask("POST", "/jobs/two/stop")
    service.until("/jobs/two", phase("stopped"))
    assert not JobFolder(folder).alive()
    kills = [each for each in service.ask("GET", "/audit?who=service")["items"] if each["method"] == "kill"]
    assert "not ended after" in kills[0]["detail"]["reason"]
    service.ask("POST", "/jobs/two/resume")
    service.until("/jobs/two", phase("training", "draining", "ended"))  # drained earlier it would not begin at all
    service.ask("POST", "/jobs/two/drain")
    drained = service.until("/jobs/two", phase("ended", "failed"))
    assert drained["outcome"]["reason"] in ("stopped after the pass in training", "the stream is drained")
    numbers = [close["number"] for close in closes(folder / "store")]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_damaged_folder_is_told_of_and_stops_nobody_else(service):
    for name in ("good", "bad"):
        service.ask(
            "POST", "/jobs", {"name": name, "spec": spec_of(), "base": str(service.folder / "data"), "start": False}
        )
    (service.jobs / "bad" / "job.json").write_text("{")
    broken = service.ask("GET", "/jobs/bad")
    assert broken["phase"] == "broken" and "job.json is damaged" in broken["trouble"]
    service.kill()
    (service.jobs / "bad" / "launcher.json").write_text("[]")
    service.start()
    assert {job["name"]: job["phase"] for job in service.ask("GET", "/jobs")["items"]} == {
        "good": "stopped",
        "bad": "broken",
    }
    service.ask("POST", "/jobs/bad/resume")
    assert service.ask("GET", "/jobs/bad")["phase"] == "broken"
    service.ask("DELETE", "/jobs/bad", **{"If-Match": "*"})
    assert [job["name"] for job in service.ask("GET", "/jobs")["items"]] == ["good"]
