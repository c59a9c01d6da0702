"""The client of Kafka as our source uses it: its options checked, its waits bounded, its errors translated.

kafka-python reconnects for ever and tells only its logger why. Here a call waits until its deadline, says once that
it waits and once that it goes on, and the error at the end carries the last thing the client had to say. Positions
and partitions are kafka's work.
"""

import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kafka import KafkaConsumer
from kafka.errors import (
    CorruptRecordError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RetriableError,
    UnsupportedCodecError,
)
from kafka.net.compat import KafkaNetClient

from dataset.errors import SourceUnavailable
from millrace.deadline import Deadline
from millrace.errors import BadInput, SpecError
from millrace.secrecy import SECRET_KEYS, resolved

log = logging.getLogger(__name__)

T = TypeVar("T")

OURS = {
    "allow_auto_create_topics": "a topic of the spec is never created by reading it",
    "auto_commit_interval_ms": "positions are Millrace's own",
    "auto_offset_reset": 'say start = "earliest" | "latest" | "group" | a time',
    "bootstrap_timeout_ms": "say connect_deadline",
    "enable_auto_commit": "positions are Millrace's own",
    "group_id": "say group",
}
"""Options that would break our promises, and what to do instead."""
NEED_CODE = frozenset(
    "consumer_timeout_ms default_offset_commit_callback exclude_internal_topics group_instance_id "
    "heartbeat_interval_ms kafka_client key_deserializer max_poll_interval_ms max_poll_records metric_group_prefix "
    "metric_reporters partition_assignment_strategy sasl_oauth_token_provider selector session_timeout_ms "
    "socket_options ssl_context value_deserializer".split()
)
"""Options that are values of Python, or have no meaning without kafka-python's own groups."""
DEFAULTS: Mapping[str, Any] = {
    "enable_incremental_fetch_sessions": False,  # one partition is fetched at a time, so they would save nothing
    "fetch_max_wait_ms": 10,  # what is read is known to be there; a fetch that waits holds up the next partition's
    "isolation_level": "read_committed",
    "reconnect_backoff_max_ms": 1_000,
    "metadata_max_age_ms": 10_000,  # partitions found later are found within so much
    "metrics_enabled": False,
}
FIXED: Mapping[str, Any] = {
    "allow_auto_create_topics": False,
    "auto_offset_reset": "none",
    "enable_auto_commit": False,
}
PATHS = ("ssl_cafile", "ssl_certfile", "ssl_crlfile", "ssl_keyfile")
TRY_S = 2.0
"""One try of a question; after the first that failed a wait is announced."""


def consumer_options(options: Mapping[str, Any], folder: Path, at: str = "sources.*.options") -> dict[str, Any]:
    """What the user wrote, checked and completed; paths of certificates are relative to `folder`, references to
    secrets are read.

    Raises SpecError naming the option.
    """
    known = sorted(set(KafkaConsumer.DEFAULT_CONFIG) - set(OURS) - NEED_CODE)
    for name in options:
        if name in OURS:
            raise SpecError(f"is not for the user to set: {OURS[name]}", f"{at}.{name}")
        if name in NEED_CODE:
            raise SpecError("cannot be set in a spec", f"{at}.{name}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SpecError(f"unknown key; {hint}known here: {', '.join(known)}", f"{at}.{name}")
    if "bootstrap_servers" not in options:
        raise SpecError('is missing; for example bootstrap_servers = "broker:9092"', f"{at}.bootstrap_servers")
    passed = {name: str(folder / value) if name in PATHS else value for name, value in options.items()}
    for name in SECRET_KEYS & passed.keys():
        passed[name] = resolved(passed[name], folder, f"{at}.{name}")
    if isinstance(passed.get("api_version"), list):
        passed["api_version"] = tuple(passed["api_version"])
    return {**DEFAULTS, **passed, **FIXED}


class LastWord(logging.Handler):
    """Takes what kafka-python logs: it goes to our debug log, the last reason it gives is kept for an error.

    But for what it logs to find its own bugs: every byte it sends is there, passwords too.
    """

    NO_REASON = ("Bootstrap failed: KafkaTimeoutError", "not ready; waiting")
    """Warnings that say only what the caller knows."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""
        client_log = logging.getLogger("kafka")
        client_log.propagate = False
        client_log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep or pass on one record."""
        said = record.getMessage()
        if record.levelno >= logging.WARNING and not any(words in said for words in self.NO_REASON):
            self.text = said
        log.debug("%s: %s", record.name, said)

    def close(self) -> None:
        """Listen no more."""
        logging.getLogger("kafka").removeHandler(self)
        super().close()


class Wait:
    """A wait without progress: announced once, its end too, and bounded by `patience_s` at a stretch."""

    def __init__(self, doing: str, patience_s: float) -> None:
        self.doing, self.patience_s = doing, patience_s
        self.waited_s = 0.0
        self.num_empty = 0
        self._said = False

    def poll_ms(self) -> int:
        """How long to listen next: briefly at first, since an end may be reached without a record."""
        return max(1, min(200, 4 << min(self.num_empty, 6), int(1000 * (self.patience_s - self.waited_s))))

    def empty(self, seconds: float) -> bool:
        """Nothing came for `seconds` more; whether patience is at its end."""
        self.waited_s += seconds
        self.num_empty += 1
        if self.waited_s >= TRY_S and not self._said:
            log.warning("Kafka does not answer: waiting, %s", self.doing)
            self._said = True
        return self.waited_s >= self.patience_s

    def progress(self) -> None:
        """Something came."""
        if self._said:
            log.warning("Kafka answers again after %.1f s: going on, %s", self.waited_s, self.doing)
        self.waited_s, self.num_empty, self._said = 0.0, 0, False


class _Net(KafkaNetClient):  # type: ignore[misc]
    """kafka-python's net, which can be asked for metadata at once; by itself it waits a while between two answers."""

    def ask_metadata(self, timeout_ms: int) -> Any:
        """The broker's answer about the consumer's topics."""

        async def ask() -> Any:
            if (node := self.least_loaded_node()) is None:
                raise NodeNotReadyError("no broker is connected")
            return await self._manager.send(self.cluster.metadata_request(), node, timeout_ms)

        return self._manager.run(ask)


class Client:
    """One kafka-python consumer with its cluster's metadata."""

    def __init__(self, options: Mapping[str, Any], deadline: Deadline, group: str | None = None) -> None:
        """Connect. Raises SpecError on options that do not go together, SourceUnavailable at the deadline."""
        self.servers = options["bootstrap_servers"]
        self._last_word = LastWord()
        self._net: list[_Net] = []
        self._consumer: KafkaConsumer | None = None
        timeout_ms = int(deadline.left_s() * 1000)
        try:
            self._consumer = KafkaConsumer(
                **options, group_id=group, bootstrap_timeout_ms=timeout_ms, kafka_client=self._remember
            )
        except KafkaTimeoutError:
            said = self._last_word.text
            self.close()
            raise SourceUnavailable(
                f"no broker of {self.servers} answered within {timeout_ms / 1000:.1f} s ({said}); "
                f"is it running, and reachable from here?"
            ) from None
        except (KafkaError, ValueError, TypeError, OSError) as error:
            self.close()
            raise SpecError(f"kafka-python refuses them: {error}", "sources.*.options") from error

    def _remember(self, **options: Any) -> _Net:
        # A consumer that fails to start keeps its threads and sockets to itself; this is how we can close them.
        net = _Net(**options)
        # kafka-python 3.0 does not hand this option on, and a misspelt topic would be made.
        net.cluster.config["allow_auto_create_topics"] = False
        self._net.append(net)
        return net

    @property
    def consumer(self) -> KafkaConsumer:
        """The consumer."""
        assert self._consumer is not None
        return self._consumer

    def partitions(self, topic: str) -> Sequence[int]:
        """Numbers of a topic's partitions as far as known, without asking; empty where the topic is not known."""
        return sorted(self._net[0].cluster.partitions_for_topic(topic) or ())

    def ask_identities(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """The ids that the broker gave topics when they were made; none of a topic that is not there, or unknown.

        Raises SourceUnavailable where it does not answer in time.
        """
        net = self._net[0]
        answer = self.ask("asking for the ids of topics", net.ask_metadata, deadline)
        ids = {topic.name: topic.topic_id for topic in answer.topics if topic.topic_id and topic.topic_id.int}
        return {topic: str(ids[topic]) for topic in topics if topic in ids}

    def refresh(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Ask for the partitions of topics. Raises SpecError for a name that cannot be one."""
        cluster = self._net[0].cluster
        try:
            cluster.set_topics(topics)
        except ValueError as error:
            raise SpecError(str(error), "sources.*.topics") from None
        future = cluster.request_update()
        while not future.is_done and not deadline.passed():
            time.sleep(0.005)

    def ask(self, doing: str, question: Callable[[int], T], deadline: Deadline) -> T:
        """The answer to `question(timeout_ms)`, asked again until the deadline.

        Raises SourceUnavailable where there is none, or where the broker says no.
        """
        wait = Wait(doing, deadline.left_s())
        while True:
            since_s = time.monotonic()
            try:
                answer = question(max(1, int(1000 * min(TRY_S, deadline.left_s()))))
            except RetriableError as error:
                time.sleep(min(0.1, deadline.left_s()))  # a part of the wait: some questions fail at once
                if wait.empty(time.monotonic() - since_s) or deadline.passed():
                    raise self.unavailable(doing, error) from error
            except KafkaError as error:
                raise self.refused(doing, error) from error
            else:
                wait.progress()
                return answer

    def unavailable(self, doing: str, error: Exception | None = None) -> SourceUnavailable:
        """The error of a wait that came to its end."""
        reason = self._last_word.text or (str(error) if error else "") or "nothing was said"
        return SourceUnavailable(f"Kafka at {self.servers} did not answer in time while {doing} ({reason})")

    def refused(self, doing: str, error: KafkaError) -> SourceUnavailable | BadInput:
        """The error of an answer that asking again would not change."""
        told = f"Kafka at {self.servers} said no while {doing}: {type(error).__name__}: {error}"
        broken = isinstance(error, CorruptRecordError | UnsupportedCodecError)
        return BadInput(told) if broken else SourceUnavailable(told)

    def close(self) -> None:
        """Let go of connections and threads. Harmless when called twice."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=1000)
        else:
            for net in self._net:
                net.close()
        self._net.clear()
        self._last_word.close()
