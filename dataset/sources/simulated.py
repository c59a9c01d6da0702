"""A synthetic click stream: users whose tastes drift, items that appear and disappear. The demo trains on it.

An event is a pure function of (seed, partition, position), so reading again gives the same bytes. It is one line:

    {"ts":1704067200.864,"user":17,"device":2,"hour":0,"shown":[8,1203],"topics":[3,0],"clicked":[0,1]}

`shown`, `topics` and `clicked` have one entry per item shown. Event n of partition p has number n * partitions + p in
the stream; EVENTS_A_DAY numbers are a day of event time. `rate` decides when an event arrives, by wall time since the
opening (or since `since`); it never changes the event. dataset.sources.simulated_world makes the events.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from headrace.dataset.sources.simulated_world import DAY_S, EVENTS_A_DAY, World, draws
from headrace.dataset.spec.config import Opening, SourceSection
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Events, Partition, Segment, check_identity
from headrace.deadline import Deadline

START_S = 1_704_067_200  # 2024-01-01T00:00:00Z
CHUNK_EVENTS = 1_000
"""Events generated at once. It influences the events, so it must never change."""
MAX_CHUNKS_KEPT = 8
"""Most chunks cached for readers of short segments; the least recently used one is dropped."""
FOREVER = 1 << 62
MAX_SIMULATED_EVENTS = 100_000_000_000
"""Upper limit of a simulated stream's events; their times in milliseconds fit 63 bits."""
MAX_ALIVE = 1 << 32
"""Upper limit of users or items alive at a time in a simulated stream."""
LAST_UNIX_TIME_S = 253_402_300_799
"""The last second of the year 9999."""


class SimulatedSource(SourceSection):
    """A synthetic click stream: users whose tastes drift, items that appear and disappear; seeded."""

    kind: Literal["simulated"]
    """Simulated."""
    events: int | None = Field(default=None, ge=1, le=MAX_SIMULATED_EVENTS)
    """Number of events; unset: the stream never ends."""
    rate: float = Field(default=0.0, ge=0, le=1e9)
    """Events per second of wall time; 0 = as fast as they are read (bounded sources only)."""
    since: float | None = Field(default=None, ge=0, le=LAST_UNIX_TIME_S)
    """Unix time of the first event's arrival, so that several jobs see one stream; default: when the source opens."""
    partitions: int = Field(default=4, ge=1, le=256)
    """Number of partitions."""
    users: int = Field(default=10_000, ge=1, le=MAX_ALIVE)
    """Users alive at any time."""
    items: int = Field(default=2_000, ge=10, le=MAX_ALIVE)
    """Items alive at any time."""
    item_life: int = Field(default=200_000, ge=1, le=MAX_SIMULATED_EVENTS)
    """Average number of events during which an item is alive."""
    shown: int = Field(default=5, ge=1, le=100)
    """Items shown by an event; one sample each."""
    drift: float = Field(default=1.0, ge=0, le=1e6)
    """How fast tastes change; 0 = never."""

    made_up_times: ClassVar[bool] = True

    @model_validator(mode="after")
    def _arrives(self) -> "SimulatedSource":
        if self.events is None and not self.rate:
            raise ValueError("a stream without an end needs a rate: set rate = 10000, or events = 100000")
        return self

    @model_validator(mode="after")
    def _numbers_fit(self) -> "SimulatedSource":
        """Numbers of users and items grow with each life; the greatest must fit 63 bits."""
        lives = 2 * (self.events or MAX_SIMULATED_EVENTS) // self.item_life + 2
        if max(self.users, self.items) * lives >= 1 << 62:
            raise ValueError("numbers of users or items exceed 63 bits: raise item_life, or lower users and items")
        return self

    @property
    @override
    def ends(self) -> bool:
        return self.events is not None

    def world(self, seed: int) -> World:
        """The world of its events, all that decides their content."""
        return World(seed, self.partitions, self.users, self.items, self.item_life, self.shown, self.drift)

    @override
    def open(self, opening: Opening) -> "SimulatedStream":
        return SimulatedStream(self, opening.seed)


class SimulatedStream:
    """A source of synthetic events."""

    missing: Sequence[str] = ()
    """See Source."""

    def __init__(self, config: SimulatedSource, seed: int) -> None:
        self.bounded = config.events is not None
        self._config, self._seed = config, seed
        self._world = config.world(seed)
        # A hash of all that decides the content of events; not of their arrival and the end of the stream.
        self._identity = hashlib.sha256(repr(self._world).encode()).hexdigest()[:16]
        self._opened_s = time.monotonic() - (0 if config.since is None else max(0.0, time.time() - config.since))
        self._num_arrived = 0  # at least this many, whatever the clock says: a replay has read them
        self._chunks: OrderedDict[tuple[int, int], Events] = OrderedDict()

    def resume(self, positions: Mapping[str, int]) -> None:
        """Arrival continues from there."""
        for name, position in positions.items():
            self._mark_arrived(int(name.removeprefix("simulated/")), position)

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        arrived, total = self._arrived(), self._total()
        return [
            Partition(_name(number), number, 0, 0, self._share(number, arrived), arrived == total, self._identity)
            for number in range(self._config.partitions)
        ]

    def look_again(self, deadline: Deadline) -> None:
        """Nothing to do."""

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> None:
        """None; partitions read in equal shares advance together anyway."""

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """In a stream without an end every position can be read; then all before it have arrived."""
        number = int(segment.partition.removeprefix("simulated/"))
        if not 0 <= number < self._config.partitions:
            raise SourceGap(f"{segment.partition}: no such partition; the last is {self._config.partitions - 1}")
        check_identity(segment.partition, segment.identity, self._identity)
        end = self._share(number, self._total())
        if segment.begin < 0 or segment.end > end:
            raise SourceGap(f"{segment.partition}: position {segment.end} was requested, the partition ends at {end}")
        self._mark_arrived(number, segment.end)
        for chunk in range(segment.begin // CHUNK_EVENTS, -(-segment.end // CHUNK_EVENTS)):
            first = chunk * CHUNK_EVENTS
            begin, end = max(segment.begin - first, 0), min(segment.end - first, CHUNK_EVENTS)
            if begin < end:
                yield self._chunk(number, chunk).slice(begin, end)

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Committed events have arrived."""
        self.resume(positions)

    def close(self) -> None:
        self._chunks.clear()

    def _total(self) -> int:
        return FOREVER if self._config.events is None else self._config.events

    def _arrived(self) -> int:
        if not self._config.rate:
            return self._total()
        by_clock = int((time.monotonic() - self._opened_s) * self._config.rate)
        return min(self._total(), max(by_clock, self._num_arrived))

    def _share(self, number: int, num_events: int) -> int:
        """Number of the stream's first `num_events` that are in partition `number`."""
        return max(0, -(-(num_events - number) // self._config.partitions))

    def _mark_arrived(self, number: int, position: int) -> None:
        if position > 0:
            shown = (position - 1) * self._config.partitions + number + 1
            if shown > self._arrived():  # arrival continues from here, as if the clock were this far
                self._num_arrived = shown
                if self._config.rate:
                    self._opened_s = time.monotonic() - shown / self._config.rate

    def _chunk(self, number: int, chunk: int) -> Events:
        key = (number, chunk)
        if key not in self._chunks:
            self._chunks[key] = self._make(number, chunk)
            if len(self._chunks) > MAX_CHUNKS_KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]

    def _make(self, number: int, chunk: int) -> Events:
        """Generate CHUNK_EVENTS events."""
        shown, partitions = self._config.shown, self._config.partitions
        position_E = np.arange(chunk * CHUNK_EVENTS, (chunk + 1) * CHUNK_EVENTS, dtype=np.int64)
        index_E = position_E * partitions + number
        draw_EK = draws(self._seed, number, chunk, CHUNK_EVENTS * (2 + 2 * shown)).reshape(CHUNK_EVENTS, -1)
        scene = self._world.scene(number, index_E, draw_EK)
        ms_E = START_S * 1000 + index_E * (DAY_S * 1000) // EVENTS_A_DAY
        lines = [
            (
                f'{{"ts":{ms // 1000}.{ms % 1000:03d},"user":{user},"device":{device},"hour":{hour},'
                f'"shown":{items},"topics":{topics},"clicked":{clicked}}}'
            )
            .replace(" ", "")
            .encode()
            for ms, user, device, hour, items, topics, clicked in zip(
                ms_E.tolist(),
                scene.user_E.tolist(),
                scene.device_E.tolist(),
                scene.hour_E.tolist(),
                scene.item_ES.tolist(),
                scene.topic_ES.tolist(),
                scene.clicked_ES.tolist(),
                strict=True,
            )
        ]
        return Events.of(lines, position_E, ms_E)


def _name(number: int) -> str:
    return f"simulated/{number}"
