"""The options of a Kafka source: one list for both clients, with kafka-python's names.

`TRANSLATED` gives librdkafka's name of each. Options of `KAFKA_PYTHON_ONLY` and mechanisms that librdkafka's packages
lack make kafka-python read the records. Everything else is refused.
"""

import difflib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from headrace.errors import SpecError
from headrace.extras import is_installed, require
from headrace.secrets import SECRET_KEYS, resolve_secret


class KafkaLibrary(StrEnum):
    """The library that reads Kafka's records."""

    LIBRDKAFKA = "librdkafka"
    KAFKA_PYTHON = "kafka-python"


FILE_OPTIONS = ("ssl_cafile", "ssl_certfile", "ssl_crlfile", "ssl_keyfile")
"""Options that name a file."""
OURS = {
    "allow_auto_create_topics": "reading a topic never creates it",
    "auto_commit_interval_ms": "positions are Headrace's own",
    "auto_offset_reset": 'use start = "earliest" | "latest" | "group" | a time',
    "bootstrap_timeout_ms": "use connect_deadline",
    "enable_auto_commit": "positions are Headrace's own",
    "group_id": "use group",
}
"""Options that would break guarantees of the source, and what to do instead."""
NEED_CODE = frozenset(
    "consumer_timeout_ms default_offset_commit_callback exclude_internal_topics group_instance_id "
    "heartbeat_interval_ms kafka_client key_deserializer max_poll_interval_ms max_poll_records metric_group_prefix "
    "metric_reporters partition_assignment_strategy sasl_oauth_token_provider selector session_timeout_ms "
    "socket_options ssl_context value_deserializer".split()
)
"""Options that need Python values, or have no meaning without kafka-python's own groups."""
TRANSLATED: Mapping[str, str] = {
    "bootstrap_servers": "bootstrap.servers",
    "check_crcs": "check.crcs",
    "client_dns_lookup": "client.dns.lookup",
    "client_id": "client.id",
    "client_rack": "client.rack",
    "connections_max_idle_ms": "connections.max.idle.ms",
    "fetch_max_bytes": "fetch.max.bytes",
    "fetch_max_wait_ms": "fetch.wait.max.ms",
    "fetch_min_bytes": "fetch.min.bytes",
    "isolation_level": "isolation.level",
    "max_partition_fetch_bytes": "max.partition.fetch.bytes",
    "metadata_max_age_ms": "topic.metadata.refresh.interval.ms",
    "receive_buffer_bytes": "socket.receive.buffer.bytes",
    "receive_message_max_bytes": "receive.message.max.bytes",
    "reconnect_backoff_max_ms": "reconnect.backoff.max.ms",
    "reconnect_backoff_ms": "reconnect.backoff.ms",
    "request_timeout_ms": "socket.timeout.ms",
    "retry_backoff_ms": "retry.backoff.ms",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_password": "sasl.password",
    "sasl_plain_username": "sasl.username",
    "security_protocol": "security.protocol",
    "send_buffer_bytes": "socket.send.buffer.bytes",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_check_hostname": "ssl.endpoint.identification.algorithm",
    "ssl_ciphers": "ssl.cipher.suites",
    "ssl_crlfile": "ssl.crl.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}
"""kafka-python's name of an option, and librdkafka's."""
WITHOUT_EFFECT = frozenset(
    "api_version enable_incremental_fetch_sessions max_in_flight_requests_per_connection metrics_enabled "
    "metrics_num_samples metrics_sample_window_ms".split()
)
"""Options that concern kafka-python's own workings; librdkafka needs none of them to read the same records."""
KAFKA_PYTHON_ONLY = frozenset(
    "proxy_url sasl_kerberos_domain_name sasl_kerberos_name sasl_kerberos_service_name socks5_proxy".split()
)
"""Options that librdkafka's packages cannot follow."""
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
"""SASL mechanisms that both clients have."""
KNOWN = tuple(sorted({*TRANSLATED, *WITHOUT_EFFECT, *KAFKA_PYTHON_ONLY}))

DEFAULTS: Mapping[str, Any] = {
    "enable_incremental_fetch_sessions": False,  # useless: one partition is fetched at a time
    "fetch_max_wait_ms": 10,  # the records exist; a fetch that waits delays the next partition
    "isolation_level": "read_committed",
    "reconnect_backoff_max_ms": 1_000,
    "metadata_max_age_ms": 10_000,  # new partitions are found within this time
    "metrics_enabled": False,
}
FIXED: Mapping[str, Any] = {
    "allow_auto_create_topics": False,
    "auto_offset_reset": "none",
    "enable_auto_commit": False,
}
PATHS = ("ssl_cafile", "ssl_certfile", "ssl_crlfile", "ssl_keyfile")

LIBRDKAFKA_DEFAULTS: Mapping[str, Any] = {
    "check.crcs": True,
    "fetch.max.bytes": 8 << 20,
    "fetch.wait.max.ms": 50,  # it also asks while nobody reads: 20 times a second where there is nothing new
}
LIBRDKAFKA_FIXED: Mapping[str, Any] = {
    "allow.auto.create.topics": False,
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "fetch.queue.backoff.ms": 5,  # by default a full queue stops fetching for a second
    "fetch.error.backoff.ms": 100,
    "log_level": 4,
    "message.max.bytes": 1_000,  # a producer's bound, and fetch.max.bytes may not be below it
    "queued.max.messages.kbytes": 16 << 10,
    "queued.min.messages": 32_768,  # with so many records at hand, none are fetched
}
"""Bounds of the queue, and no position that is not ours."""


def consumer_options(options: Mapping[str, Any], folder: Path, at: str = "sources.*.options") -> dict[str, Any]:
    """The user's options, checked and completed. Paths of certificates are relative to `folder`; secrets are read.

    Raises SpecError naming the option.
    """
    for name in options:
        _check_name(name, at)
    if "bootstrap_servers" not in options:
        raise SpecError('is missing; for example bootstrap_servers = "broker:9092"', f"{at}.bootstrap_servers")
    passed = {name: str(folder / value) if name in PATHS else value for name, value in options.items()}
    for name in SECRET_KEYS & passed.keys():
        passed[name] = resolve_secret(passed[name], folder, f"{at}.{name}")
    if isinstance(passed.get("api_version"), list):
        passed["api_version"] = tuple(passed["api_version"])
    return {**DEFAULTS, **passed, **FIXED}


def _check_name(name: str, at: str) -> None:
    if name in OURS:
        raise SpecError(f"cannot be set by the user: {OURS[name]}", f"{at}.{name}")
    if name in NEED_CODE:
        raise SpecError("cannot be set in a spec", f"{at}.{name}")
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpecError(f"unknown key; {hint}known here: {', '.join(KNOWN)}", f"{at}.{name}")


def only_kafka_python(options: Mapping[str, Any]) -> str:
    """The first option that librdkafka cannot follow; "" if it can follow all."""
    for name in sorted(KAFKA_PYTHON_ONLY & options.keys()):
        if options[name] is not None:
            return name
    return "sasl_mechanism" if options.get("sasl_mechanism") not in (None, *MECHANISMS) else ""


def library_of(wanted: KafkaLibrary | None, options: Mapping[str, Any], at: str = "sources.*") -> KafkaLibrary:
    """The library that reads records: the wanted one, else librdkafka where it is installed and knows all options.

    Raises SpecError if librdkafka is wanted and cannot read.
    """
    option = only_kafka_python(options)
    if wanted is not KafkaLibrary.LIBRDKAFKA:
        usable = not option and is_installed("confluent_kafka")
        return wanted or (KafkaLibrary.LIBRDKAFKA if usable else KafkaLibrary.KAFKA_PYTHON)
    require("confluent_kafka", '"librdkafka"', f"{at}.library")
    if option:
        problem = f'librdkafka has no {option} = {options[option]!r}; use library = "kafka-python", or leave it out'
        raise SpecError(problem, f"{at}.library")
    return wanted


def librdkafka_options(options: Mapping[str, Any], group: str) -> dict[str, Any]:
    """librdkafka's options from those of `consumer_options`. It only reads, so it joins no group."""
    named = {name: value for name, value in options.items() if DEFAULTS.get(name) != value and value is not None}
    passed = {TRANSLATED[name]: _value(name, value) for name, value in named.items() if name in TRANSLATED}
    for name in ("isolation_level", "metadata_max_age_ms", "reconnect_backoff_max_ms"):
        passed[TRANSLATED[name]] = options[name]
    if "ssl_certfile" in named and "ssl_keyfile" not in named:  # then the file holds both, as for kafka-python
        passed[TRANSLATED["ssl_keyfile"]] = named["ssl_certfile"]
    return {**LIBRDKAFKA_DEFAULTS, **passed, **LIBRDKAFKA_FIXED, "group.id": group}


def _value(name: str, value: Any) -> Any:
    if name == "bootstrap_servers" and not isinstance(value, str):
        return ",".join(value)
    if name == "ssl_check_hostname":
        return "https" if value else "none"
    return value
