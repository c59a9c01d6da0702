import logging
from pathlib import Path

import pytest

from dataset.sources.kafka_client import BoundedWait, LastWarning, consumer_options
from millrace.errors import SpecError
from tests.kafka import cluster

HERE = Path("/spec")


def options(**settings):
    return consumer_options({"bootstrap_servers": "broker:9092"} | settings, HERE)


def test_what_the_user_says_goes_before_our_defaults():
    assert options()["isolation_level"] == "read_committed"
    assert options(isolation_level="read_uncommitted")["isolation_level"] == "read_uncommitted"


def test_what_keeps_our_promises_cannot_be_changed():
    fixed = options()
    assert fixed["enable_auto_commit"] is False
    assert fixed["auto_offset_reset"] == "none"
    assert fixed["allow_auto_create_topics"] is False


@pytest.mark.parametrize(
    ("name", "instead"),
    [("enable_auto_commit", "Millrace's own"), ("group_id", "use group"), ("auto_offset_reset", "use start")],
)
def test_an_option_that_is_ours_is_refused_with_what_to_say_instead(name, instead):
    with pytest.raises(SpecError, match=rf"options\.{name}: .*{instead}"):
        options(**{name: "x"})


def test_an_option_that_needs_code_is_refused():
    with pytest.raises(SpecError, match=r"value_deserializer: cannot be set in a spec"):
        options(value_deserializer="json.loads")


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match=r"security_protocoll: unknown key; did you mean 'security_protocol'\?"):
        options(security_protocoll="SSL")


def test_servers_are_not_guessed():
    with pytest.raises(SpecError, match=r"bootstrap_servers: is missing"):
        consumer_options({}, HERE)


def test_tls_and_sasl_pass_with_certificates_beside_the_spec():
    passed = options(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username="u",
        sasl_plain_password="p",
        ssl_cafile="certs/ca.pem",
        ssl_keyfile="/etc/key.pem",
        api_version=[3, 6],
    )
    assert (passed["ssl_cafile"], passed["ssl_keyfile"]) == ("/spec/certs/ca.pem", "/etc/key.pem")
    assert (passed["sasl_mechanism"], passed["api_version"]) == ("SCRAM-SHA-512", (3, 6))


def test_a_wait_is_announced_once_and_so_is_its_end(caplog):
    wait = BoundedWait("reading t/0 from 7", 10.0)
    assert not any([wait.empty(1.0), wait.empty(1.5), wait.empty(1.0)])
    wait.progress()
    wait.progress()
    said = [record.message for record in caplog.records]
    assert said == [
        "Kafka does not answer: waiting, reading t/0 from 7",
        "Kafka answers again after 3.5 s: continuing, reading t/0 from 7",
    ]


def test_patience_is_for_one_stretch_without_progress():
    wait = BoundedWait("x", 10.0)
    assert not wait.empty(9.0)
    wait.progress()
    assert not wait.empty(9.0)
    assert wait.empty(1.0)


def test_listening_is_short_at_first_and_never_beyond_patience():
    wait = BoundedWait("x", 0.5)
    heard = [wait.poll_ms()]
    for _ in range(8):
        wait.empty(0.05)
        heard.append(wait.poll_ms())
    assert heard[0] < 10 and max(heard) <= 200 and heard[-1] <= 100


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        self.names.append(record.name)


def test_the_clients_own_log_is_quiet_and_its_last_warning_is_kept():
    last_warning, heard = LastWarning(), Heard()
    logging.getLogger().addHandler(heard)  # not caplog: pytest listens at loggers that do not propagate, too
    logging.getLogger("kafka.net").error("authentication failed")
    logging.getLogger("kafka.net").debug("something")
    last_warning.close()
    logging.getLogger().removeHandler(heard)
    assert last_warning.text == "authentication failed"
    assert not [name for name in heard.names if name.startswith("kafka")]


def test_without_java_or_mvn_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(cluster.shutil, "which", lambda program: None if program == "mvn" else "/usr/bin/java")
    assert cluster.why_not() == "no mvn on this machine"
    monkeypatch.setenv("MILLRACE_REQUIRE_KAFKA", "1")
    assert cluster.required()
