"""A Kafka client for the source: bounds its waits, translates its errors.

kafka-python reconnects for ever and reports the reason only to its logger. Here a call waits until its deadline, logs
once that it waits and once that it continues, and the final error contains the last reason that kafka-python logged.
dataset.sources.kafka_options checks its options, dataset.sources.kafka_source handles positions and partitions.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kafka import KafkaConsumer
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RetriableError,
)
from kafka.net.compat import KafkaNetClient

from headrace.dataset.sources.kafka_reader import BrokenRecords, ReadRefused
from headrace.dataset.stream.errors import SourceUnavailable
from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError

log = logging.getLogger(__name__)

T = TypeVar("T")

TRY_S = 2.0
"""Longest time of one try; after the first failed one, the wait is logged."""
MAX_LINES, LINES_S = 20, 10.0
"""Lines of a client's own log that are passed on in so many seconds; the others are dropped."""


class LastWarning(logging.Handler):
    """Sends the log of a client library to our debug log, bounded, and keeps its last warning for an error.

    Leaves out its debug records, because kafka-python's contain every byte sent, including passwords.
    """

    NO_REASON = ("Bootstrap failed: KafkaTimeoutError", "not ready; waiting")
    """Warnings without a reason."""

    def __init__(self, logger: str = "kafka") -> None:
        super().__init__(logging.INFO)
        self.text = ""
        self._since_s, self._num_lines = -float("inf"), 0
        self._logger = logging.getLogger(logger)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one record."""
        message = record.getMessage()
        if record.levelno >= logging.WARNING and not any(words in message for words in self.NO_REASON):
            self.text = message
        now_s = time.monotonic()
        if now_s - self._since_s >= LINES_S:
            self._since_s, self._num_lines = now_s, 0
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            log.debug("%s: %s", record.name, message)

    def close(self) -> None:
        """Stop listening."""
        self._logger.removeHandler(self)
        super().close()


class BoundedWait:
    """A wait without progress, of at most `max_wait_s`. Its begin and its end are logged once."""

    def __init__(self, doing: str, max_wait_s: float) -> None:
        self.doing, self.max_wait_s = doing, max_wait_s
        self.waited_s = 0.0
        self.num_empty = 0
        self._logged = False

    def poll_ms(self) -> int:
        """Length of the next poll: short at first, since an end may be reached without a record."""
        return max(1, min(200, 4 << min(self.num_empty, 6), int(1000 * (self.max_wait_s - self.waited_s))))

    def empty(self, seconds: float) -> bool:
        """Count `seconds` more without progress; return whether `max_wait_s` is reached."""
        self.waited_s += seconds
        self.num_empty += 1
        if self.waited_s >= TRY_S and not self._logged:
            log.warning("Kafka does not answer: waiting, %s", self.doing)
            self._logged = True
        return self.waited_s >= self.max_wait_s

    def progress(self) -> None:
        """Progress was made; the wait starts again."""
        if self._logged:
            log.warning("Kafka answers again after %.1f s: continuing, %s", self.waited_s, self.doing)
        self.waited_s, self.num_empty, self._logged = 0.0, 0, False


class _Net(KafkaNetClient):  # type: ignore[misc]
    """kafka-python's network client, with a metadata request that does not wait for the next refresh."""

    def ask_metadata(self, timeout_ms: int) -> Any:
        """The broker's metadata of the consumer's topics."""

        async def ask() -> Any:
            if (node := self.least_loaded_node()) is None:
                raise NodeNotReadyError("no broker is connected")
            return await self._manager.send(self.cluster.metadata_request(), node, timeout_ms)

        return self._manager.run(ask)


class KafkaClient:
    """A kafka-python consumer with the metadata of its cluster."""

    def __init__(self, options: Mapping[str, Any], deadline: Deadline, group: str | None = None) -> None:
        """Connect. Raises SpecError for options that contradict each other, SourceUnavailable at the deadline."""
        self.servers = options["bootstrap_servers"]
        self._last_warning = LastWarning()
        self._net: list[_Net] = []
        self._consumer: KafkaConsumer | None = None
        timeout_ms = int(deadline.left_s() * 1000)
        try:
            self._consumer = KafkaConsumer(
                **options, group_id=group, bootstrap_timeout_ms=timeout_ms, kafka_client=self._remember
            )
        except KafkaTimeoutError:
            reason = self._last_warning.text
            self.close()
            raise SourceUnavailable(
                f"no broker of {self.servers} answered within {timeout_ms / 1000:.1f} s ({reason}); "
                f"is it running and reachable from here?"
            ) from None
        except (KafkaError, ValueError, TypeError, OSError) as error:
            self.close()
            raise SpecError(f"kafka-python rejects them: {error}", "sources.*.options") from error

    def _remember(self, **options: Any) -> _Net:
        # A consumer that fails to start keeps its threads and sockets open; this reference lets us close them.
        net = _Net(**options)
        # kafka-python 3.0 does not pass this option on, and a misspelt topic would be created.
        net.cluster.config["allow_auto_create_topics"] = False
        self._net.append(net)
        return net

    @property
    def consumer(self) -> KafkaConsumer:
        """The consumer."""
        assert self._consumer is not None
        return self._consumer

    def partitions(self, topic: str) -> Sequence[int]:
        """Known numbers of a topic's partitions, without a request; empty for an unknown topic."""
        return sorted(self._net[0].cluster.partitions_for_topic(topic) or ())

    def ask_identities(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """The broker's ids of topics; a topic that does not exist or has no id is left out.

        Raises SourceUnavailable if the broker does not answer in time.
        """
        net = self._net[0]
        answer = self.ask("asking for the ids of topics", net.ask_metadata, deadline)
        ids = {topic.name: topic.topic_id for topic in answer.topics if topic.topic_id and topic.topic_id.int}
        return {topic: str(ids[topic]) for topic in topics if topic in ids}

    def refresh(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Request the partitions of topics. Raises SpecError for an invalid name."""
        cluster = self._net[0].cluster
        try:
            cluster.set_topics(topics)
        except ValueError as error:
            raise SpecError(str(error), "sources.*.topics") from None
        future = cluster.request_update()
        while not future.is_done and not deadline.passed():
            time.sleep(0.005)

    def ask(self, doing: str, question: Callable[[int], T], deadline: Deadline) -> T:
        """The answer to `question(timeout_ms)`, retried until the deadline.

        Raises SourceUnavailable without an answer, or if the broker refuses; BadInput for corrupt records.
        """
        wait = BoundedWait(doing, deadline.left_s())
        while True:
            since_s = time.monotonic()
            try:
                answer = question(max(1, int(1000 * min(TRY_S, deadline.left_s()))))
            except RetriableError as error:
                time.sleep(min(0.1, deadline.left_s()))  # part of the wait; some questions fail at once
                if wait.empty(time.monotonic() - since_s) or deadline.passed():
                    raise self.unavailable(doing, error) from error
            except KafkaError as error:
                raise self.refused(doing, error) from error
            else:
                wait.progress()
                return answer

    def unavailable(self, doing: str, error: Exception | str = "") -> SourceUnavailable:
        """The error of a wait that reached its limit."""
        reason = str(error) if isinstance(error, str) and error else self._last_warning.text or str(error)
        reason = reason or "no reason was given"
        return SourceUnavailable(f"Kafka at {self.servers} did not answer in time while {doing} ({reason})")

    def refused(self, doing: str, error: Exception) -> SourceUnavailable | BadInput:
        """The error of a refusal that a retry would not change."""
        name = "" if isinstance(error, ReadRefused | BrokenRecords) else f"{type(error).__name__}: "
        problem = f"Kafka at {self.servers} refused while {doing}: {name}{error}"
        return BadInput(problem) if isinstance(error, BrokenRecords) else SourceUnavailable(problem)

    def close(self) -> None:
        """Close connections and threads. May be called twice."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=1000)
        else:
            for net in self._net:
                net.close()
        self._net.clear()
        self._last_warning.close()
