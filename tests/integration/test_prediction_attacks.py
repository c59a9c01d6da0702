"""Attacks by predictions on a service over a real socket: passwords, folders of jobs, stores, exports."""

import json
import os
import socket
import time

import pytest

from headrace.service.auth.roles import Role
from headrace.service.cluster.store import MARKER
from tests.fakes.exports import write_export
from tests.integration.served_host import SPEC, served_host

SECRET = "hunter2"
KAFKA = {
    "kind": "kafka",
    "topics": ["t"],
    "options": {
        "bootstrap_servers": "broker.invalid:9092",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "me",
        "sasl_plain_password": SECRET,
    },
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Jobs whose stores lie below an allowed root, and one whose store lies in its own folder."""
    folder = tmp_path_factory.mktemp("attacked")
    with served_host(folder) as made:
        made.folder, made.data = folder, folder / "data"
        base = str(made.data)
        mirrored = {"store": {"path": "news-store", "mirror": "mirror"}, "exports": {"main": {"path": "exported"}}}
        assert made.create({**SPEC, **mirrored}, base=base).status_code == 201
        assert made.create({**SPEC, "name": "own"}).status_code == 201
        spec = {**SPEC, "name": "kafka", "sources": {"main": KAFKA}, "store": {"path": "kafka-store"}}
        assert made.create(spec, base=base).status_code == 201
        for store in ("news-store", "of-nobody"):
            (made.data / store / "workers" / "g1").mkdir(parents=True)
            (made.data / store / "workers" / "g1" / "shard-0.json").write_text(json.dumps({"secret": SECRET}))
            (made.data / store / MARKER).write_text("{}")
        (made.data / "lines.txt").write_text("1 1 1 0\n")
        yield made


def ask(service, job="news", **changed):
    asked = {"input": {"paths": ["lines.txt"]}, "output": "out", **changed}
    return service.ask("POST", f"/v1/jobs/{job}/predictions", role=Role.OPERATOR, json=placed(service, asked))


def ask_by_export(service, spec, **changed):
    asked = {"input": {"paths": ["lines.txt"]}, "output": "out", "version": "export", "base": "ROOT/data", **changed}
    told = placed(service, {**asked, "spec": {**spec, "store": {"path": "none"}}})
    return service.ask("POST", "/v1/predictions", role=Role.OPERATOR, json=told)


def placed(service, asked):
    return json.loads(json.dumps(asked).replace("ROOT", str(service.folder)))


def done(service, answer):
    """The operation once it is over."""
    assert answer.status_code == 202, answer.text
    end_s = time.monotonic() + 30
    while (told := service.ask("GET", answer.headers["location"]).json())["state"] in ("waiting", "running"):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return told


def refused(answer, key):
    assert (answer.status_code, answer.json()["path"]) == (422, key), answer.text
    assert SECRET not in answer.text


# Passwords


@pytest.mark.parametrize("security", [{}, {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}])
def test_a_request_that_names_its_own_broker_connects_to_nobody(service, security):
    with socket.create_server(("127.0.0.1", 0)) as evil:
        evil.settimeout(0.5)
        servers = f"127.0.0.1:{evil.getsockname()[1]}"
        for given in (servers, [servers], ["broker.invalid:9092", servers], f"broker.invalid:9092,{servers}"):
            kafka = {"topic": "t", "options": {"bootstrap_servers": given, **security}}
            refused(ask(service, "kafka", input={"kafka": kafka}), "input.kafka.options.bootstrap_servers")
        source = {**KAFKA, "options": {**KAFKA["options"], "bootstrap_servers": servers}}
        answer = ask_by_export(service, {**SPEC, "sources": {"main": source}}, input={"kafka": {"topic": "t"}})
        refused(answer, "input.kafka.options.bootstrap_servers")
        with pytest.raises(TimeoutError):
            evil.accept()


@pytest.mark.parametrize("reference", [{"env": "PATH"}, {"file": "ROOT/data/lines.txt"}, {"file": "lines.txt"}])
def test_a_request_names_no_secret_of_the_services_machine(service, reference):
    options = {"sasl_plain_password": reference}
    key = "options.sasl_plain_password"
    refused(ask(service, "kafka", input={"kafka": {"topic": "t", "options": options}}), f"input.kafka.{key}")
    source = {**KAFKA, "options": {**KAFKA["options"], **options}}
    refused(ask_by_export(service, {**SPEC, "sources": {"main": source}}), f"sources.main.{key}")
    answer = service.create(placed(service, {**SPEC, "name": "evil", "sources": {"main": source}}))
    refused(answer, f"sources.main.{key}")


def test_a_password_is_in_no_answer_and_in_no_store(service):
    paths = ["", "/spec", "/log", "/output", "/commits", "/predictions", "/tables", "/metrics"]
    for path in [f"/v1/jobs/kafka{path}" for path in paths] + ["/v1/jobs", "/v1/audit", "/v1/operations", "/metrics"]:
        assert SECRET not in service.ask("GET", path).text, path
    made = ask(service, "kafka", output="again", version="export", columns=["user"])
    assert SECRET not in json.dumps(done(service, made))
    files = [path for path in service.data.rglob("*") if path.is_file() and "workers" not in path.parts]
    assert files and not [path for path in files if SECRET in path.read_text(errors="replace")]


# Folders of jobs, and stores

OWN = "ROOT/service/jobs/own"
INPUTS = {
    "a job's spec": ("own", "job.json"),
    "a job's spec by a pattern": ("own", "*.json"),
    "what its launcher was told": ("own", "launcher.json"),
    "its store": ("own", "store/log/*"),
    "another job's folder": ("news", f"{OWN}/job.json"),
    "workers' secrets": ("news", "news-store/workers/g1/shard-0.json"),
    "workers' secrets by a pattern": ("news", "news-store/workers/*/shard-0.json"),
    "workers' secrets by a field": ("news", "{store}/workers/{g}/shard-0.json"),
    "workers' secrets at any depth": ("news", "**/shard-0.json"),
    "workers' secrets of another job": ("kafka", "news-*/workers/g1/*.json"),
    "workers' secrets of a job of nobody": ("news", "of-nobody/workers/g1/shard-0.json"),
    "the same by a pattern": ("news", "of-*/workers/g1/shard-0.json"),
    "a store that is not there yet": ("news", "kafka-store/log/*"),
    "a mirror": ("kafka", "mirror/commits/*"),
    "the service's private files of predictions": ("news", "ROOT/service/predicting/*/*/*.json"),
    "through a link": ("news", "link/workers/g1/shard-0.json"),
    "through a link by a pattern": ("news", "li*/workers/g1/shard-0.json"),
}


@pytest.mark.parametrize("what", INPUTS)
def test_no_input_reaches_a_jobs_folder_or_a_store(service, what):
    link = service.data / "link"
    if not link.is_symlink():
        link.symlink_to(service.data / "news-store")
    job, path = INPUTS[what]
    refused(ask(service, job, input={"paths": ["ROOT/data/lines.txt", path]}), "input.paths.1")
    if job == "news":
        refused(ask_by_export(service, SPEC, input={"paths": [path]}), "input.paths.0")


OUTPUTS = {
    "another job's dead letters": ("news", "kafka-store/dead_letters"),
    "what pauses a job": ("kafka", "news-store/paused"),
    "a store itself": ("kafka", "news-store"),
    "its own store": ("news", "news-store/x"),
    "a folder around stores": ("news", "ROOT/data"),
    "a job's folder": ("news", OWN),
    "below its own folder": ("own", "x"),
    "a launcher's outcome": ("own", "outcome.json"),
    "a store of nobody": ("news", "of-nobody/x"),
    "a mirror": ("kafka", "mirror/commits/x"),
    "a place of exports": ("kafka", "exported/news/t1"),
    "through a link": ("news", "out-link/x"),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_no_output_lies_in_a_jobs_folder_or_a_store(service, what):
    link = service.data / "out-link"
    if not link.is_symlink():
        link.symlink_to(service.data / "news-store")
    job, path = OUTPUTS[what]
    refused(ask(service, job, input={"paths": ["ROOT/data/lines.txt"]}, output=path), "output")
    assert not (service.data / "news-store" / "paused").exists() and not (service.data / "kafka-store").exists()


def test_a_link_that_is_made_after_the_request_was_accepted_leads_nowhere(service):
    """The operation is checked once more when it begins: here, it waits behind others meanwhile."""
    from headrace.service.jobs.prediction_rules import PredictionRules

    asked = {"input": {"paths": ["late/*.json"]}, "output": "late-out"}
    checks = []
    real = PredictionRules.check

    def check(self, *args):
        checks.append(1)
        if len(checks) == 2:
            (service.data / "late").symlink_to(service.data / "news-store" / "workers" / "g1")
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PredictionRules, "check", check)
        told = done(service, ask(service, **asked))
    assert (told["state"], told["problem"]["path"]) == ("failed", "input.paths.0"), told
    assert not (service.data / "late-out").exists()


@pytest.mark.parametrize("key", ["store", "exports", "source"])
def test_no_job_is_made_that_lies_in_another_ones_store(service, key):
    sections = {
        "store": {"store": {"path": "mine", "mirror": "news-store/mirror"}},
        "exports": {"exports": {"main": {"path": "news-store/exports"}}},
        "source": {"sources": {"main": {"kind": "files", "paths": ["news-store/workers/*/*.json"]}}},
    }
    answer = service.create({**SPEC, "name": "evil", **sections[key]}, base=str(service.data))
    assert answer.status_code == 422 and "which belongs to a job" in answer.text, answer.text


def test_no_job_reads_what_its_own_launcher_is_told(service):
    for path in ("launcher.json", "*.json", "workers/*/*.json", "**/*.json"):
        source = {"kind": "files", "paths": [path]}
        answer = service.create({**SPEC, "name": "evil", "sources": {"main": source}})
        refused(answer, "sources.main.paths.0")


# Versions


def test_a_version_is_opened_where_it_is_checked_and_not_where_the_service_stands(service, monkeypatch):
    elsewhere = service.folder / "elsewhere"
    elsewhere.mkdir()
    write_export(elsewhere / "exports", "base", 3, {("a", 1): [0.5, 0.5]}, dim=1)
    (found,) = elsewhere.glob("exports/**/manifest.json")
    monkeypatch.chdir(elsewhere)
    relative = os.path.relpath(found.parent, elsewhere)
    for number, version in enumerate([relative, f"./{relative}"]):
        told = done(service, ask(service, version=version, output=f"version-{number}"))
        assert told["state"] == "failed"
        assert f"{service.data / relative}: is not an export" in told["problem"]["detail"]
        assert str(elsewhere) not in json.dumps(told)
    for version in (str(found.parent), f"file://{found.parent}", "../elsewhere/exports"):
        refused(ask(service, version=version), "version")


def test_an_export_of_a_job_may_be_read_wherever_the_job_keeps_it(service):
    places = ["ROOT/data/exported/news/t1/x", "news-store/exports/main/x", "ROOT/service/jobs/own/store/exports/main"]
    for number, place in enumerate([*places, "of-nobody/exports/main"]):
        told = done(service, ask(service, version=place, output=f"export-{number}"))
        assert "is not an export" in told["problem"]["detail"], told
    for place in ("news-store/log", "news-store/exports/../log", "ROOT/service/jobs/own", "of-nobody/workers"):
        refused(ask(service, version=place), "version")


# How much


@pytest.mark.parametrize("asked", [{"trainers": 64, "shards": 64}, {"trainers": 9}, {"shards": 9}])
def test_a_prediction_takes_no_more_processes_than_its_limit(service, asked):
    refused(ask(service, **asked), "trainers")
    refused(ask_by_export(service, SPEC, **asked), "trainers")
