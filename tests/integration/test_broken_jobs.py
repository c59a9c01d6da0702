"""A job that is broken, however that came about, hides no other: lists, figures and deletion go on."""

import dataclasses
import shutil
import threading
import time

import pytest

from headrace.service.auth import allowed_paths
from headrace.service.jobs import background, local_host
from tests.integration.served_host import SPEC, served_host


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served_host(tmp_path_factory.mktemp("broken"), limits={"max_jobs": 8}) as made:
        (made.config.root.parent / "data" / "file").write_text("no folder")
        assert made.create({**SPEC, "name": "good"}).status_code == 201
        yield made


STORES = {
    "a file": ("DATA/file", "DATA/file is a file"),
    "below a file": ("DATA/file/x/y", "DATA/file is a file"),
    "a name too long": ("DATA/" + "x" * 300, "has a name of 300 bytes"),
    "a name too long in bytes": ("DATA/" + "\u00fc" * 200, "has a name of 400 bytes"),
    "a path too long": ("DATA" + "/x" * 3000, "a path has at most 4095"),
    "a NUL": ("DATA/a\0b", "holds a NUL character"),
    "nothing": ("", "is empty"),
    "a folder of other things": ("DATA", "is not empty and no store of Headrace"),
}


@pytest.mark.parametrize("what", STORES)
def test_a_store_that_cannot_be_one_is_refused_before_the_job_is_there(service, what):
    data = str(service.config.root.parent / "data")
    path, said = STORES[what]
    answer = service.create({**SPEC, "name": "bad", "store": {"path": path.replace("DATA", data)}})
    assert answer.status_code == 422, answer.text
    assert answer.json()["path"] == "store.path"
    assert said.replace("DATA", data) in answer.json()["detail"]
    assert [job["name"] for job in service.ask("GET", "/v1/jobs").json()["items"]] == ["good"]
    assert not (service.config.jobs / "bad").exists()


def as_recorded_before(service, spec, base=None):
    """A job in the records that would be refused today."""
    entry = service.host._register.get("bad")
    service.host._register.remove("bad")
    changed = dataclasses.replace(entry, spec={**entry.spec, **spec}, base=base or entry.base)
    service.host._register.add(changed, 8)


def damage(service, how, data, folder):
    match how:
        case "the store is a file":
            (data / "store").rmdir()
            (data / "store").write_text("no folder")
        case "the store's name is too long":
            as_recorded_before(service, {"store": {"path": "x" * 300}})
        case "the store's path has a NUL":
            as_recorded_before(service, {"store": {"path": "a\0b"}})
        case "the record has no store":
            as_recorded_before(service, {"store": {}})
        case "the store is another job's":
            (data / "store" / "headrace.json").write_text("{}")
            (data / "store" / "run.json").write_text('{"job": "another"}')
        case "the folder is a file":
            shutil.rmtree(folder)
            folder.write_text("no folder")
        case "the folder is gone":
            shutil.rmtree(folder)
        case "its lock is a folder":
            (folder / "launcher.lock").mkdir()
        case "its files are brackets":
            (folder / "launcher.json").write_text("[" * 100_000)
        case "its records are of other types":
            (folder / "outcome.json").write_text('{"ask": 1, "code": [], "at": 7}')


DAMAGE = [
    "the store is a file",
    "the store's name is too long",
    "the store's path has a NUL",
    "the record has no store",
    "the store is another job's",
    "the folder is a file",
    "the folder is gone",
    "its lock is a folder",
    "its files are brackets",
    "its records are of other types",
]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_job_that_cannot_be_looked_at_hides_no_other_and_can_be_deleted(service, how):
    data, folder = service.config.root.parent / "data", service.config.jobs / "bad"
    (data / "store").mkdir()
    assert service.create({**SPEC, "name": "bad", "store": {"path": str(data / "store")}}).status_code == 201
    damage(service, how, data, folder)
    time.sleep(0.3)  # what was found out a moment ago is forgotten
    phases = {job["name"]: job["phase"] for job in service.ask("GET", "/v1/jobs").json()["items"]}
    assert phases["good"] == "stopped"
    assert phases["bad"] in ("broken", "failed", "stopped")
    told = service.ask("GET", "/v1/jobs/bad").json()
    assert told["phase"] != "broken" or told["trouble"]
    figures = service.ask("GET", "/metrics")
    assert figures.status_code == 200 and 'job="good"' in figures.text
    assert service.ask("DELETE", "/v1/jobs/bad", headers={"If-Match": "*"}).status_code == 204
    assert [job["name"] for job in service.ask("GET", "/v1/jobs").json()["items"]] == ["good"]
    assert not folder.exists()
    if how == "the store is another job's":
        assert (data / "store" / "run.json").exists()
    shutil.rmtree(data / "store", ignore_errors=True)
    (data / "store").unlink(missing_ok=True)


def test_a_job_of_which_nobody_knows_what_is_wrong_is_broken_and_says_so(service, monkeypatch):
    def observed(entry):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service.host._supervisor, "observed", observed)
    [job] = service.host.jobs()
    assert job.phase == "broken" and "ZeroDivisionError: a bug" in job.trouble
    assert service.host.status("good").state == "broken"


PATTERNS = {
    "many fields": ("".join(f"{{a{n}}}" for n in range(78)) + "b", "has 78 fields"),
    "many folders": ("**/" * 40 + "x", "has 40 wildcards"),
    "many stars": ("*a" * 200 + "b", "has 200 wildcards"),
}


@pytest.mark.parametrize("what", PATTERNS)
def test_a_pattern_that_would_take_for_ever_is_refused_at_once(service, what):
    data = service.config.root.parent / "data"
    (data / ("a" * 200)).touch()
    pattern, said = PATTERNS[what]
    began_s = time.monotonic()
    source = {"main": {"kind": "files", "paths": ["file", f"{data}/{pattern}"]}}
    answer = service.create({**SPEC, "name": "bad", "sources": source}, base=str(data))
    assert answer.status_code == 422 and answer.json()["path"] == "sources.main.paths.1", answer.text
    assert said in answer.json()["detail"]
    asked = {"input": {"paths": [f"{data}/{pattern}"]}, "output": "out"}
    answer = service.ask("POST", "/v1/jobs/good/predictions", json=asked)
    assert answer.status_code == 422 and said in answer.json()["detail"]
    assert time.monotonic() - began_s < 20


def test_patterns_are_looked_up_within_a_deadline(service, monkeypatch):
    monkeypatch.setattr(allowed_paths, "LOOK_S", 0.0)
    data = str(service.config.root.parent / "data")
    source = {"main": {"kind": "files", "paths": [f"{data}/**/x"]}}
    answer = service.create({**SPEC, "name": "bad", "sources": source}, base=data)
    assert answer.status_code == 422
    assert "name folders nearer to the files" in answer.json()["detail"]
    assert answer.json()["path"] == "sources.main.paths.0"


def test_folders_on_a_disk_that_is_away_keep_no_thread_that_answers(service, monkeypatch):
    back, begun = threading.Event(), threading.Semaphore(0)

    def away(*_):
        begun.release()
        back.wait(30)

    monkeypatch.setattr(background, "_places", threading.BoundedSemaphore(background.MAX_AT_ONCE))
    monkeypatch.setattr(local_host, "check_spec", away)
    monkeypatch.setattr(background.in_background, "__kwdefaults__", {"within_s": 1.0})
    answers = []
    ask = lambda: answers.append(service.create({**SPEC, "name": "bad"}).status_code)  # noqa: E731
    askers = [threading.Thread(target=ask) for _ in range(50)]  # more than the service has threads
    for asker in askers:
        asker.start()
    for _ in range(background.MAX_AT_ONCE):
        begun.acquire()
    for asker in askers:
        asker.join()
    assert answers == [503] * 50
    assert service.ask("GET", "/v1/jobs").status_code == 200
    back.set()
