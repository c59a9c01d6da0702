import logging
import re
import sys
from pathlib import Path

import pytest

from headrace.dataset.sources import kafka_options
from headrace.dataset.sources.kafka_client import BoundedWait, LastWarning
from headrace.dataset.sources.kafka_options import (
    KAFKA_PYTHON_ONLY,
    PATHS,
    TRANSLATED,
    WITHOUT_EFFECT,
    KafkaLibrary,
    consumer_options,
    library_of,
    librdkafka_options,
)
from headrace.errors import SpecError
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
    [("enable_auto_commit", "Headrace's own"), ("group_id", "use group"), ("auto_offset_reset", "use start")],
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
    monkeypatch.setenv("HEADRACE_REQUIRE_KAFKA", "1")
    assert cluster.required()


def translated(**settings):
    return librdkafka_options(options(**settings), "group")


def test_librdkafka_gets_every_option_by_its_own_name():
    passed = translated(
        bootstrap_servers=["a:1", "b:2"],
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username="u",
        sasl_plain_password="p",
        ssl_cafile="certs/ca.pem",
        ssl_certfile="certs/me.pem",
        ssl_check_hostname=False,
        max_partition_fetch_bytes=1000,
    )
    assert passed["bootstrap.servers"] == "a:1,b:2"
    assert (passed["security.protocol"], passed["sasl.mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (passed["sasl.username"], passed["sasl.password"]) == ("u", "p")
    assert passed["ssl.ca.location"] == "/spec/certs/ca.pem"
    assert passed["ssl.certificate.location"] == passed["ssl.key.location"] == "/spec/certs/me.pem"
    assert passed["ssl.endpoint.identification.algorithm"] == "none"
    assert passed["max.partition.fetch.bytes"] == 1000
    assert passed["group.id"] == "group"


def test_librdkafka_never_chooses_a_position_and_its_queue_is_bounded():
    fixed = translated()
    assert fixed["auto.offset.reset"] == "error"
    assert fixed["enable.partition.eof"] is True
    assert fixed["enable.auto.commit"] is fixed["allow.auto.create.topics"] is False
    assert fixed["isolation.level"] == "read_committed"
    assert fixed["queued.max.messages.kbytes"] == 16 << 10
    assert translated(fetch_max_wait_ms=500)["fetch.wait.max.ms"] == 500


def test_librdkafka_takes_each_translated_option():
    confluent_kafka = pytest.importorskip("confluent_kafka")
    values = dict.fromkeys(TRANSLATED, 100_000) | {
        "bootstrap_servers": "127.0.0.1:1",
        "check_crcs": False,
        "client_dns_lookup": "use_all_dns_ips",
        "client_id": "me",
        "client_rack": "here",
        "isolation_level": "read_uncommitted",
        "receive_message_max_bytes": 200_000_000,
        "sasl_mechanism": "PLAIN",
        "sasl_plain_password": "p",
        "sasl_plain_username": "u",
        "security_protocol": "PLAINTEXT",
        "ssl_check_hostname": True,
        "ssl_ciphers": "ALL",
    }
    values = {name: value for name, value in values.items() if name not in PATHS and name != "ssl_password"}
    confluent_kafka.Consumer(translated(**values)).close()


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"socks5_proxy": "http://p:1"}, "socks5_proxy"),
        ({"sasl_mechanism": "GSSAPI"}, "sasl_mechanism"),
        ({"sasl_mechanism": "AWS_MSK_IAM"}, "sasl_mechanism"),
        ({"socks5_proxy": None, "sasl_mechanism": "PLAIN"}, ""),
    ],
)
def test_kafka_python_reads_where_librdkafka_cannot_follow(monkeypatch, settings, option):
    monkeypatch.setattr(kafka_options, "is_installed", lambda name: True)
    assert library_of(None, settings) is (KafkaLibrary.KAFKA_PYTHON if option else KafkaLibrary.LIBRDKAFKA)
    assert library_of(KafkaLibrary.KAFKA_PYTHON, settings) is KafkaLibrary.KAFKA_PYTHON
    if option:
        with pytest.raises(SpecError, match=rf"sources\.\*\.library: librdkafka has no {option} = "):
            library_of(KafkaLibrary.LIBRDKAFKA, settings)


def test_kafka_python_reads_where_librdkafka_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    assert library_of(None, {}) is KafkaLibrary.KAFKA_PYTHON
    with pytest.raises(SpecError, match=r"library: \"librdkafka\" needs confluent-kafka, .*'headrace\[kafka\]'"):
        library_of(KafkaLibrary.LIBRDKAFKA, {})


def test_the_readme_lists_every_option():
    text = (Path(kafka_options.__file__).parents[1] / "README.md").read_text()
    listed = dict(re.findall(r"\| `([a-z0-9_]+)` \| `([a-z0-9.]+)` (?=\|)", text))
    assert listed == TRANSLATED
    for names in (WITHOUT_EFFECT, KAFKA_PYTHON_ONLY):
        assert ", ".join(f"`{name}`" for name in sorted(names)) in text


def test_a_librarys_log_is_bounded(caplog):
    last_warning = LastWarning("librdkafka")
    with caplog.at_level(logging.DEBUG, "headrace.dataset.sources.kafka_client"):
        for n in range(100):
            logging.getLogger("librdkafka").error("refused %d", n)
    last_warning.close()
    assert len([record for record in caplog.records if record.name == "headrace.dataset.sources.kafka_client"]) == 20
    assert last_warning.text == "refused 99"
