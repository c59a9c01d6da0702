"""A prediction whose request names a broker of its own: what that broker is shown, over a real connection."""

import io
import logging
from pathlib import Path

import pytest
from kafka import TopicPartition

from headrace.config import validate
from headrace.dataset.sources.kafka_options import consumer_options, librdkafka_options
from headrace.dataset.stream.errors import SourceUnavailable
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.spec.job import job_of
from headrace.trainer.predict import prediction_plan
from headrace.trainer.predict.config import PredictionRequest
from tests.fakes.sasl_broker import sasl_broker
from tests.unit.test_secrecy import PASSWORD, spec

SASL = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}


@pytest.fixture(autouse=True)
def open_s(monkeypatch):
    """Set for how long a source is opened; soon over unless a test says otherwise."""
    monkeypatch.setattr(prediction_plan, "OPEN_S", 0.5)
    return lambda seconds: monkeypatch.setattr(prediction_plan, "OPEN_S", seconds)


def opened(tmp_path, job_servers, **options):
    """Open the input of a request for a job of these brokers."""
    job = job_of(spec(bootstrap_servers=job_servers), tmp_path).spec
    asked = {"input": {"kafka": {"topic": "t", "options": options}}, "output": "x"}
    with pytest.raises(HeadraceError) as caught:
        prediction_plan.open_input(validate(PredictionRequest, asked).input, job, tmp_path)
    assert PASSWORD not in str(caught.value)
    return caught.value


@pytest.fixture
def logged():
    """All that reaches the root logger; not caplog, for pytest listens at loggers that do not propagate, too."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.mark.long
def test_a_broker_of_the_job_is_shown_its_password(tmp_path, logged, open_s):
    """And no log is, at any level."""
    open_s(6.0)  # this broker never lets the client in, so all of it is waited for
    with sasl_broker() as broker:
        opened(tmp_path, broker.servers)
        assert f"\0me\0{PASSWORD}".encode() in broker.sent
    logging.getLogger("dataset").debug("heard")
    assert "heard" in logged.getvalue() and PASSWORD not in logged.getvalue()


@pytest.mark.parametrize("more", [{}, SASL, {"ssl_check_hostname": False}])
def test_a_broker_of_the_requests_is_not(tmp_path, more):
    with sasl_broker() as evil:
        error = opened(tmp_path, "broker.invalid:9092", bootstrap_servers=evil.servers, **more)
        assert isinstance(error, SourceUnavailable) or "kafka-python refuses" in str(error)
        assert PASSWORD.encode() not in evil.sent


def test_librdkafka_shows_a_password_to_the_broker_and_to_no_log(logged):
    librdkafka_reader = pytest.importorskip("headrace.dataset.sources.librdkafka_reader")
    with sasl_broker() as broker:
        own = SASL | {"sasl_plain_username": "me", "sasl_plain_password": PASSWORD, "bootstrap_servers": broker.servers}
        reader = librdkafka_reader.LibrdkafkaReader(librdkafka_options(consumer_options(own, Path()), "group"))
        until = Deadline.after(20)
        while f"\0me\0{PASSWORD}".encode() not in broker.sent or not reader.reason():
            until.check("waiting for the password, and for the end of the connection")
            assert reader.poll(TopicPartition("t", 0), 0, 1, 50) == (None, 0)
        assert PASSWORD not in reader.reason()
        reader.close()
    assert "librdkafka" in logged.getvalue() and PASSWORD not in logged.getvalue()
