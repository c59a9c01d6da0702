"""Secrets of a spec: removed when it is loaded, named by references, read where a client is opened, never shown."""

import json
from pathlib import Path

import pytest

from headrace.config import validate
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_options import consumer_options
from headrace.errors import SpecError
from headrace.secrets import (
    HIDDEN,
    check_shown,
    dump_with_secrets,
    resolve_secret,
    secrets_of,
    with_secrets,
    with_secrets_of,
    without_keys,
    without_secrets,
)
from headrace.service.history.log_text import log_lines
from headrace.service.spec.job import JobFile, job_of
from headrace.trainer.journal.log_file import LogRecord, RecordPlace
from headrace.trainer.journal.records import SpecOperation
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.spec import changes

PASSWORD = "hunter2"
SPEC = {
    "name": "clicks",
    "sources": {
        "main": {
            "kind": "kafka",
            "topics": ["clicks"],
            "options": {
                "bootstrap_servers": "broker:9092",
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": "me",
                "sasl_plain_password": PASSWORD,
            },
        }
    },
    "pipe": {"command": ["cat"]},
    "slots": [{"name": "user"}, {"name": "label", "kind": "meta"}],
    "tasks": [{"name": "ctr", "label": "label"}],
    "model": {"name": "lr"},
    "store": {"path": "store"},
}


def spec(name="main", **options):
    source = SPEC["sources"]["main"]
    return {**SPEC, "sources": {name: {**source, "options": {**source["options"], **options}}}}


def options_of(raw, name="main"):
    return raw["sources"][name]["options"]


def test_a_loaded_job_holds_its_secrets_apart_and_shows_them_nowhere(tmp_path):
    job = job_of(SPEC, tmp_path)
    assert job.secrets == {
        "sources.main.options.sasl_plain_username": "me",
        "sources.main.options.sasl_plain_password": PASSWORD,
    }
    assert options_of(job.raw)["sasl_plain_password"] == HIDDEN
    assert job.whole() == SPEC
    for shown in (
        repr(job),
        str(job.spec),
        json.dumps(job.raw),
        job.spec.model_dump_json(),
        str(job.spec.model_dump()),
    ):
        assert PASSWORD not in shown
    assert SPEC["sources"]["main"]["options"]["sasl_plain_password"] == PASSWORD, "what was given is left as it is"


def test_a_client_is_opened_with_the_secret_itself(tmp_path, monkeypatch):
    (tmp_path / "password").write_text("of the file\n")
    monkeypatch.setenv("KAFKA_USER", "of the environment")
    given = spec(sasl_plain_username={"env": "KAFKA_USER"}, sasl_plain_password={"file": "password"})
    for raw, user, password in ((SPEC, "me", PASSWORD), (given, "of the environment", "of the file")):
        passed = consumer_options(job_of(raw, tmp_path).spec.sources["main"].options, tmp_path)
        assert (passed["sasl_plain_username"], passed["sasl_plain_password"]) == (user, password)


def test_references_are_shown_and_are_no_secrets(tmp_path):
    given = spec(sasl_plain_username={"env": "KAFKA_USER"}, sasl_plain_password={"file": "password"})
    job = job_of(given, tmp_path)
    assert job.secrets == {} and job.raw == given


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"env": "NOT_SET_HERE"}, "the environment variable NOT_SET_HERE, which it names, is not set"),
        ({"file": "missing"}, "missing, which it names, cannot be read: No such file or directory"),
        ({"file": "folder"}, "cannot be read: Is a directory"),
        ({"file": "empty"}, "is empty"),
        ({"file": "large"}, "longer than 65536 bytes"),
        ({"file": "binary"}, "it is no UTF-8"),
        (HIDDEN, "is hidden: logs and commits contain no secrets"),
    ],
)
def test_a_secret_that_cannot_be_read_is_told_by_its_key_and_not_by_its_content(tmp_path, value, told):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "large").write_text("hunter2" * 10_000)
    (tmp_path / "binary").write_bytes(b"hunter2\xff")
    with pytest.raises(SpecError, match="^a.key: ") as caught:
        resolve_secret(value, tmp_path, "a.key")
    assert told in str(caught.value) and PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "value", [7, ["hunter2"], {}, {"env": ""}, {"env": "A", "file": "hunter2"}, {"environment": "hunter2"}, {"env": 7}]
)
def test_what_is_neither_text_nor_a_reference_is_refused_and_not_repeated(tmp_path, value):
    with pytest.raises(SpecError, match="sources.main.options: sasl_plain_password is neither text") as caught:
        job_of(spec(sasl_plain_password=value), tmp_path)
    assert '{ env = "NAME" } or { file = "path" }' in str(caught.value) and PASSWORD not in str(caught.value)
    assert without_secrets({"sasl_plain_password": value}) == {"sasl_plain_password": HIDDEN}


def test_a_mistake_around_a_secret_does_not_repeat_it(tmp_path):
    source = SPEC["sources"]["main"]
    for sources in ([source], {"main": [source]}, {"main": {**source, "option": source["options"]}}):
        with pytest.raises(SpecError) as caught:
            job_of({**SPEC, "sources": sources}, tmp_path)
        assert PASSWORD not in str(caught.value), caught.value


def test_a_spec_that_was_copied_from_where_secrets_are_hidden_is_refused_by_key(tmp_path):
    with pytest.raises(SpecError, match="^sources.main.options.sasl_plain_password: is '\\*\\*\\*', which replaces"):
        job_of(without_secrets(spec(sasl_plain_username={"env": "USER"})), tmp_path)
    check_shown(SPEC)


def test_secrets_go_out_of_a_spec_and_back_into_it():
    raw = {"a": [{"ssl_password": "p", "n": 1}], "b": {"proxy_url": None, "sasl_plain_password": {"env": "X"}}}
    secrets = secrets_of(raw)
    assert secrets == {"a.0.ssl_password": "p"}
    assert without_secrets(raw) == {"a": [{"ssl_password": HIDDEN, "n": 1}], "b": raw["b"]}
    assert with_secrets(without_secrets(raw), secrets) == raw
    assert without_keys(raw) == {"a": [{"n": 1}], "b": {}}


OTHERS = [{"sasl_plain_password": "rotated"}, {"sasl_plain_password": {"env": "NAME"}}, {"ssl_password": "more"}]


@pytest.mark.parametrize("options", OTHERS)
def test_another_secret_is_no_change_of_the_job_be_it_logged_with_it_or_without(tmp_path, options):
    now = job_of(spec(**options), tmp_path).raw
    for logged in (SPEC, job_of(SPEC, tmp_path).raw):
        assert changes.changed_keys(logged, now) == [] and changes.significant_keys(logged, now) == []
    assert changes.changed_keys(SPEC, job_of(spec(client_id="x"), tmp_path).raw) == ["sources.main.options.client_id"]


def test_a_logged_spec_is_trained_again_with_the_secrets_of_now(tmp_path):
    job = job_of(spec("renamed", sasl_plain_password="rotated", ssl_password={"file": "p"}), tmp_path)
    for logged in (SPEC, without_secrets(SPEC), spec(sasl_plain_password={"env": "OLD"})):
        again = job.under(logged, tmp_path / "store")
        found = options_of(again.whole())
        assert (found["sasl_plain_password"], found["ssl_password"]) == ("rotated", {"file": "p"})
        assert options_of(again.raw)["sasl_plain_password"] == HIDDEN
        assert again.spec.sources["main"].options["sasl_plain_password"].get_secret_value() == "rotated"


def test_a_logged_secret_that_the_job_file_lacks_stays_as_it_was_logged():
    bare = {**SPEC, "sources": {"main": {"kind": "files", "paths": ["x"]}}}
    assert with_secrets_of(without_secrets(SPEC), bare) == without_secrets(SPEC)
    assert with_secrets_of(spec(sasl_plain_password={"env": "OLD"}), bare) == spec(sasl_plain_password={"env": "OLD"})


def test_the_lines_of_a_log_that_holds_a_secret_from_before_do_not_tell_it():
    specs = [SPEC, spec(sasl_plain_password="rotated", client_id="x")]
    records = [LogRecord(n, SpecOperation(spec=each), RecordPlace(Path("log"), 0)) for n, each in enumerate(specs, 1)]
    lines = "\n".join(map(str, log_lines(records)))
    assert "client_id" in lines and PASSWORD not in lines and "rotated" not in lines


def test_a_request_shows_no_secret_but_to_its_own_workers():
    kafka = {"topic": "t", "options": {"sasl_plain_password": PASSWORD, "sasl_plain_username": {"env": "U"}}}
    request = validate(PredictionRequest, {"input": {"kafka": kafka}, "output": "x"})
    for shown in (repr(request), json.dumps(request.what()), request.model_dump_json()):
        assert PASSWORD not in shown
    assert request.what()["input"]["kafka"]["options"] == {
        "sasl_plain_password": HIDDEN,
        "sasl_plain_username": {"env": "U"},
    }
    assert dump_with_secrets(request)["input"]["kafka"]["options"] == kafka["options"]


def test_a_worker_is_told_secrets_and_the_spec_without_them_for_its_log(tmp_path):
    from headrace.service.cluster.worker_plan import plan_job

    trainer = plan_job(job_of(SPEC, tmp_path), tmp_path / "run", generation=1).trainers[0].config
    assert PASSWORD not in json.dumps(trainer["job"])
    told = validate(JobFile, with_secrets(trainer["job"], trainer["secrets"]))
    assert told.sources["main"].options["sasl_plain_password"].get_secret_value() == PASSWORD


def test_the_schema_of_options_is_that_of_any_mapping():
    assert KafkaSource.model_json_schema()["properties"]["options"]["type"] == "object"
