"""The live feed of one shard: its subscribers, and when versions are published to them.

Rank 0 publishes a version after its operations. Changed rows are copied then and sent by other threads, so nobody waits
for a subscriber; one that is too slow is disconnected. While a shrink still sweeps rows, the version is held until all
deleted keys are known. If the next pass closes before that, the held version is not sent; the next one covers both.
pserver.feed.table_changes collects the changes of one table, pserver.feed.feed_messages encodes messages,
pserver.feed.feed_server owns the port.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from headrace.errors import Unavailable
from headrace.pserver.errors import PserverError
from headrace.pserver.feed import feed_messages
from headrace.pserver.feed.table_changes import TableDelta, TableFeed
from headrace.pserver.proto import feed_pb2 as pb
from headrace.pserver.protocol.shards import U64

NO_STATISTICS: Mapping[str, tuple[str, int]] = MappingProxyType({})
MAX_SUBSCRIBERS = 8
"""Replicas that follow one shard, or rank 0; one more is refused."""
MAX_WAITING_BYTES = 128 << 20
"""Most bytes queued for one subscriber; with more it is disconnected. One larger version is queued if it is alone."""


class TooManySubscribers(PserverError, Unavailable):
    """MAX_SUBSCRIBERS follow already."""

    def __init__(self) -> None:
        super().__init__(f"{MAX_SUBSCRIBERS} subscribers follow already; one of them must leave first")


class SubscriberTooSlow(PserverError, Unavailable):
    """A subscriber was disconnected because too much waited for it."""

    def __init__(self, waiting_bytes: int) -> None:
        super().__init__(f"too slow: {waiting_bytes >> 20} MiB waited to be sent; subscribe again")


class Subscription:
    """The queue of messages for one subscriber. Any thread may put; one takes."""

    def __init__(self, on_overflow: Callable[[int], None] = lambda _waiting_bytes: None) -> None:
        """`on_overflow` is called once, when the subscriber is too slow, with the number of bytes that wait; the
        sending thread may be blocked then."""
        self._turn = threading.Condition()
        self._waiting: deque[feed_messages.Outgoing] = deque()
        self._num_bytes = 0
        self._on_overflow, self._slow, self._over = on_overflow, False, False

    def put(self, outgoing: Sequence[feed_messages.Outgoing]) -> None:
        """Queue messages. If too many bytes wait, the queue is dropped and nothing more is sent."""
        size = feed_messages.num_bytes(outgoing)
        with self._turn:
            if self._over or self._slow:
                return
            self._slow = self._num_bytes > 0 and self._num_bytes + size > MAX_WAITING_BYTES
            if self._slow:
                self._waiting.clear()
            else:
                self._waiting += outgoing
            self._num_bytes += size
            self._turn.notify_all()
        if self._slow:
            self._on_overflow(self._num_bytes)

    def end(self) -> None:
        """Accept no more messages; queued ones are still sent."""
        with self._turn:
            self._over = True
            self._turn.notify_all()

    def waiting(self) -> Iterator[feed_messages.Outgoing]:
        """The messages that are queued now. Raises SubscriberTooSlow."""
        while True:
            with self._turn:
                if self._slow:
                    raise SubscriberTooSlow(self._num_bytes)
                if not self._waiting:
                    return
                message = self._waiting.popleft()
                self._num_bytes -= feed_messages.num_bytes([message])
            yield message

    def all(self) -> Iterator[feed_messages.Outgoing]:
        """All messages until the end, waiting for new ones. Raises SubscriberTooSlow."""
        while True:
            yield from self.waiting()
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._slow or self._over)
                if self._over and not self._waiting and not self._slow:
                    return


class Subscribers:
    """The subscribers of one source. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Subscription, ...] = ()
        self._ended = False

    def now(self) -> tuple[Subscription, ...]:
        """The present subscribers."""
        return self._all

    def add(self, subscription: Subscription) -> None:
        """Add a subscriber. Raises TooManySubscribers."""
        with self._lock:
            if len(self._all) >= MAX_SUBSCRIBERS:
                raise TooManySubscribers
            self._all = (*self._all, subscription)
            if self._ended:
                subscription.end()

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscriber, if it is there."""
        with self._lock:
            self._all = tuple(each for each in self._all if each is not subscription)

    def end(self) -> None:
        """End every subscription, present and future."""
        with self._lock:
            self._ended = True
            for each in self._all:
                each.end()


@dataclass(frozen=True, slots=True)
class _Held:
    """A version whose rows are copied, while not all its deleted keys are known."""

    version: int
    tables: Mapping[str, TableDelta]
    subscribers: tuple[Subscription, ...]
    """Those that subscribed before the copy; the base of later ones is newer than this version."""
    facts: Mapping[str, Any]
    """Facts of the version, by name."""


class ShardFeed:
    """Call `publish`, `seal` and `closed` between passes, the rest from any thread."""

    def __init__(
        self,
        tables: Mapping[str, TableFeed],
        generation: int = 1,
        statistics: Mapping[str, tuple[str, int]] = NO_STATISTICS,
    ) -> None:
        """`statistics`: table and slot group of rows whose shows and clicks are sent, by the name for them."""
        self._tables, self._generation, self._statistics = tables, generation, statistics
        for table, _ in statistics.values():
            tables[table].tells_statistics = True
        self._lock = threading.Lock()
        self._subscribers = Subscribers()
        self._restored = self._version = 0
        self._held: _Held | None = None

    # --- events of the shard -----------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Start from the rows of a commit of `version`."""
        with self._lock:
            self._restored = self._version = version
            for table in self._tables.values():
                table.begin(version)

    def seal(self) -> None:
        """A pass is about to close: later changes no longer belong to the version before."""
        with self._lock:
            self._restore_held()

    def _restore_held(self) -> None:
        if self._held is not None:
            for name, delta in self._held.tables.items():
                self._tables[name].restore_changes(delta)
            self._held = None

    def closed(self, version: int) -> None:
        """Note that the pass of `version` is closed."""
        with self._lock:
            self._version = version
            for table in self._tables.values():
                table.closed(version)

    def publish(self, version: int) -> None:
        """Send subscribers the rows changed and deleted up to `version`, after its operations."""
        with self._lock:
            subscribers = self._subscribers.now()
            if not subscribers:
                return
            if self._held is not None and self._held.version == version and self._held.subscribers == subscribers:
                return  # sent once it is complete
            self._restore_held()
            sweeping = self._sweeping()  # asked first: once sweeping is over, no deleted key is added
            taken = {name: table.take() for name, table in self._tables.items()}
            held = _Held(version, taken, subscribers, self._facts())
            if not sweeping:
                self._send(held)
                return
            self._held = held
        self.swept()  # sweeping may have ended meanwhile

    def swept(self) -> None:
        """Note that a table is swept; send the held version if all tables are."""
        with self._lock:
            if self._held is None or self._sweeping():
                return
            tables = {name: self._tables[name].take_deleted(delta) for name, delta in self._held.tables.items()}
            self._send(replace(self._held, tables=tables))
            self._held = None

    def _sweeping(self) -> bool:
        return any(table.sweeping for table in self._tables.values())

    # --- subscribers: pserver.feed.feed_server.FeedSource
    # ---------------------------------------------------------------------

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_messages.Outgoing]:
        """Add a subscriber. Returns its base, the first messages, which it reads at its own pace.

        `since` is the version that it has, from workers of `generation`. Raises TooManySubscribers.
        """
        with self._lock:
            since = self._begin_of(since, generation)
            if not self._subscribers.now():
                for table in self._tables.values():
                    table.follow(True)
            self._subscribers.add(subscription)
            gone = {name: table.deleted_since(since) for name, table in self._tables.items()} if since else {}
        return self._base(since, gone)

    def _begin_of(self, since: int, generation: int) -> int:
        """The version after which changes are sent to a subscriber that has `since`; 0: send all rows.

        If other workers made the subscriber's version, it may differ from ours after the restored commit. So everything
        changed after that commit is sent.
        """
        if generation != self._generation:
            since = self._restored if since >= self._restored else 0
        known = all(table.known_since <= since for table in self._tables.values())
        return since if known and since <= self._version else 0

    def _base(self, since: int, gone: Mapping[str, U64]) -> Iterator[feed_messages.Outgoing]:
        yield feed_messages.begin(whole=since == 0)
        for name, table in self._tables.items():
            if name in gone:
                nothing = table.read(feed_messages.NO_GONE)
                yield from self._messages(pb.FeedPart.BASE, name, TableDelta(nothing, gone[name]))
            for present in table.scan(since):
                yield from self._messages(pb.FeedPart.BASE, name, TableDelta(present, feed_messages.NO_GONE))

    def _send(self, held: _Held) -> None:
        outgoing = [m for name, delta in held.tables.items() for m in self._messages(pb.FeedPart.ROWS, name, delta)]
        outgoing.append(feed_messages.version(held.version, held.facts))
        for subscription in held.subscribers:
            subscription.put(outgoing)

    def _messages(self, kind: pb.FeedPart.Kind, table: str, delta: TableDelta) -> Iterator[feed_messages.Outgoing]:
        """The changes of a table, and those of shows and clicks. Deleted keys have no slot group: all are sent."""
        yield from feed_messages.rows(kind, table, delta)
        for name, (of, group) in self._statistics.items():
            if of == table:
                yield from feed_messages.rows(kind, name, TableDelta(delta.rows.known_of(group), delta.gone_U))

    def _facts(self) -> dict[str, Any]:
        """The day of a version and the rates up to it, by name of statistics, if there are any."""
        told = {name: self._tables[of].decay_of(group).message() for name, (of, group) in self._statistics.items()}
        return {"decays": told} if told else {}

    def close(self, subscription: Subscription) -> None:
        """Remove a subscriber."""
        with self._lock:
            self._subscribers.remove(subscription)
            if not self._subscribers.now():
                self._held = None
                for table in self._tables.values():
                    table.follow(False)

    def poke(self) -> None:
        """Does nothing: rank 0 decides when a shard publishes."""

    def end(self) -> None:
        """End every subscription."""
        self._subscribers.end()
