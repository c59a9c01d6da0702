"""News impressions that arrive: made up (the same ones each time) or the real data, written to Kafka at a rate."""

import contextlib
import gzip
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FIRST_S = 1_684_393_200
"""When the first event happens, unix seconds: at the beginning of an hour, and not of a day."""
PER_HOUR = 500
"""Made-up events in an hour of their time."""
NUM_PARTITIONS = 4
TICK_S = 0.05


def made_up() -> Iterator[bytes]:
    """Impressions as deploy/examples/news reads them, for ever: few articles, whose readers click by taste."""
    rng = np.random.default_rng(11)
    taste_A = rng.normal(size=400)
    for number in itertools.count():
        hour = number // PER_HOUR
        at_s = FIRST_S + hour * 3600 + number % PER_HOUR * 3600 // PER_HOUR
        user, device, age = (int(rng.integers(most)) for most in (300, 3, 8))
        born = 5 * hour  # articles come and go
        shown = sorted({born + int(article) for article in rng.integers(0, 60, rng.integers(2, 6))})
        odds = [taste_A[article % len(taste_A)] + 0.5 * (user % 3 == article % 3) - 1 for article in shown]
        clicked = [article for article, odd in zip(shown, odds, strict=True) if rng.random() < 1 / (1 + np.exp(-odd))]
        impression = {
            **{"ts": at_s, "impression": number, "user_id": user, "context_article": user % 7, "last_click": user % 50},
            **{"device_type": device, "is_sso": user % 2, "is_subscriber": int(user % 5 == 0), "gender": user % 3},
            **{"postcode": user % 40, "age": age, "hour_of_day": hour % 24, "day_of_week": hour // 24 % 7},
            **{"n_inview": len(shown), "shown": shown, "clicked": clicked},
        }
        yield json.dumps(impression).encode()


def real(path: Path) -> Iterator[bytes]:
    """The impressions of a file, two weeks; then the same again two weeks later, for ever."""
    for later_s in itertools.count(step=14 * 86_400):
        with gzip.open(path) as lines:
            for line in lines:
                impression = json.loads(line)
                yield json.dumps(impression | {"ts": impression["ts"] + later_s}).encode()


class Producer:
    """Writes events to a topic by turns of its partitions, from a thread, until it is told to end."""

    def __init__(self, kafka, events: Iterator[bytes], rate: float) -> None:
        self.topic = kafka.create_topic(NUM_PARTITIONS)
        self.num_sent, self.num_samples, self.num_written = 0, 0, 0
        """Events sent, articles shown in them, and events acknowledged."""
        self._kafka, self._events, self._per_tick = kafka, events, max(1, round(rate * TICK_S))
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> int:
        """Write no more; how many events are in the topic, every one of them acknowledged."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(60)
        assert not self._thread.is_alive(), "the producer does not end within 60 s: Kafka does not acknowledge"
        if self._error is not None:
            raise self._error
        return self.num_sent

    def _write(self) -> None:
        try:
            with contextlib.closing(self._kafka.producer(acks="all", enable_idempotence=True)) as producer:
                while not self._ending.wait(TICK_S):
                    sent = [self._send(producer, event) for event in itertools.islice(self._events, self._per_tick)]
                    producer.flush(timeout=30)
                    for each in sent:
                        each.get(timeout=30)
                    self.num_written += len(sent)
        except BaseException as error:  # noqa: BLE001  # raised where the test ends the producer
            self._error = error

    def _send(self, producer, event: bytes):
        sent = producer.send(self.topic, value=event, partition=self.num_sent % NUM_PARTITIONS)
        self.num_sent += 1
        self.num_samples += len(json.loads(event)["shown"])
        return sent
