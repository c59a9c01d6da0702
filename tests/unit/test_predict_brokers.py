"""Whose credentials a prediction of a topic shows to which brokers."""

import pytest

from headrace.config import validate
from headrace.dataset.sources.kafka_options import consumer_options
from headrace.errors import SpecError
from headrace.service.auth.config import AllowSection
from headrace.service.jobs.config import LimitsSection
from headrace.service.jobs.prediction_rules import check_brokers, check_workers
from headrace.service.spec.job import job_of
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.prediction_plan import merge_options, servers_of, source_config
from tests.unit.test_secrecy import PASSWORD, SPEC


@pytest.fixture
def job(tmp_path):
    return job_of(SPEC, tmp_path).spec


def request_of(**options):
    kafka = {"topic": "held-out", "options": options}
    return validate(PredictionRequest, {"input": {"kafka": kafka}, "output": "x"})


def passed(job, tmp_path, **options):
    """What the client is opened with."""
    return consumer_options(source_config(request_of(**options).input, job).options, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"bootstrap_servers": "evil:9092"},
        {"bootstrap_servers": ["broker:9092", "evil:9092"]},
        {"bootstrap_servers": "broker:9092,evil:9092"},
        {"bootstrap_servers": ["broker:9092,evil:9092"]},
        {"bootstrap_servers": "evil:9092", "client_id": "me"},
        {"security_protocol": "PLAINTEXT"},
        {"security_protocol": "SASL_PLAINTEXT"},
        {"sasl_mechanism": "PLAIN"},
        {"ssl_check_hostname": False},
        {"ssl_cafile": "evil.pem"},
        {"sasl_plain_username": "you"},
        {"proxy_url": "http://evil:3128"},
        {"socks5_proxy": "evil:1080"},
    ],
)
def test_a_request_that_changes_brokers_or_security_has_none_of_the_jobs_credentials(job, tmp_path, options):
    found = passed(job, tmp_path, **options)
    assert PASSWORD not in str(found) and "sasl_plain_password" not in found
    assert found.get("sasl_plain_username") == options.get("sasl_plain_username")
    for name in ("security_protocol", "sasl_mechanism"):
        assert found.get(name) == options.get(name)


@pytest.mark.parametrize("options", [{}, {"client_id": "me"}, {"bootstrap_servers": ["broker:9092"]}])
def test_a_request_that_changes_neither_reads_as_its_job_does(job, tmp_path, options):
    found = passed(job, tmp_path, **options)
    assert (found["sasl_plain_password"], found["sasl_mechanism"]) == (PASSWORD, "PLAIN")


def test_a_request_brings_credentials_of_its_own_for_other_brokers(job, tmp_path):
    own = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_plain_password": "mine"}
    found = passed(job, tmp_path, bootstrap_servers="other:9092", **own)
    assert found["sasl_plain_password"] == "mine" and "sasl_plain_username" not in found


def test_brokers_are_the_same_however_they_are_written():
    for written in ("b1:9092,b2:9092", "b2:9092, b1:9092", ["b1:9092", "b2:9092"], ["b1:9092,b2:9092"]):
        assert servers_of({"bootstrap_servers": written}) == {"b1:9092", "b2:9092"}
    assert servers_of({}) == frozenset()
    assert merge_options(
        {"bootstrap_servers": ["b1:9092", "b2:9092"], "ssl_password": "p"}, {"bootstrap_servers": "b1:9092"}
    )


def test_without_a_list_of_brokers_a_request_names_its_jobs_and_no_others(job):
    for options in ({}, {"bootstrap_servers": "broker:9092"}):
        check_brokers(request_of(**options), job, own_brokers=True, allow=AllowSection())
    for options in ({"bootstrap_servers": "evil:9092"}, {"bootstrap_servers": ["broker:9092", "evil:9092"]}):
        with pytest.raises(SpecError, match="^input.kafka.options.bootstrap_servers: 'evil:9092' is not a broker"):
            check_brokers(request_of(**options), job, own_brokers=True, allow=AllowSection())
    check_brokers(
        request_of(bootstrap_servers="other:9092"),
        job,
        own_brokers=True,
        allow=AllowSection(bootstrap_servers=("other:9092",)),
    )


def test_a_request_that_brings_its_spec_names_brokers_of_the_services_list_only(job):
    with pytest.raises(SpecError, match="known: none"):
        check_brokers(request_of(), job, own_brokers=False, allow=AllowSection())
    files = validate(PredictionRequest, {"input": {"paths": ["x"]}, "output": "x"})
    check_brokers(files, job, own_brokers=False, allow=AllowSection())


@pytest.mark.parametrize(
    ("trainers", "shards", "fits"), [(1, None, True), (4, 4, True), (5, 4, False), (64, 64, False)]
)
def test_a_prediction_has_no_more_processes_than_the_limit(trainers, shards, fits):
    asked = validate(
        PredictionRequest, {"input": {"paths": ["x"]}, "output": "x", "trainers": trainers, "shards": shards}
    )
    if fits:
        check_workers(asked, LimitsSection())
    else:
        with pytest.raises(SpecError, match="^trainers: .*at most 8 are allowed .limits.prediction_workers"):
            check_workers(asked, LimitsSection())
