"""The live feed of one shard: who is told, and when; subscribers that are too slow are let go, and nobody waits.

A version is told when the chief says so, after its operations: what changed is copied then, and sent by other threads.
Where a shrink's rows are not all swept yet, the version is held until they are, and keys that went are known; where
the next pass closes before that, it is never told alone, and the next version tells of both.
What is told of a table is pserver.feed_table's, the messages pserver.feed_wire's, the port pserver.feed_server's.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from millrace.errors import Unavailable
from pserver import feed_wire
from pserver.client import U64
from pserver.errors import PserverError
from pserver.feed_table import TableFeed, Told
from pserver.proto import feed_pb2 as pb

MAX_SUBSCRIBERS = 8
"""Replicas that follow one shard, or one chief; one more is refused."""
MAX_WAITING_BYTES = 128 << 20
"""Of one subscriber; where more waits, it is let go. A single version may be larger: it is kept if nothing waits."""

log = logging.getLogger(__name__)


class TooMany(PserverError, Unavailable):
    """All places are taken."""

    def __init__(self) -> None:
        super().__init__(f"{MAX_SUBSCRIBERS} subscribers follow already; one of them must leave first")


class TooSlow(PserverError, Unavailable):
    """A subscriber was let go."""

    def __init__(self, waiting_bytes: int) -> None:
        super().__init__(f"too slow: {waiting_bytes >> 20} MiB waited to be sent; subscribe again")


class Subscription:
    """What waits to be sent to one subscriber. Any thread may put; one takes."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        """`let_go` is called, once, when nothing more will be sent: whoever sends may be stuck."""
        self._turn = threading.Condition()
        self._waiting: deque[feed_wire.Outgoing] = deque()
        self._num_bytes = 0
        self._let_go, self._slow, self._over = let_go, False, False

    def put(self, outgoing: Sequence[feed_wire.Outgoing]) -> None:
        """Have messages sent; where too much waits, nothing more ever is."""
        size = feed_wire.num_bytes(outgoing)
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
            log.warning("a subscriber of the live feed is let go: %d MiB waited for it", self._num_bytes >> 20)
            self._let_go()

    def end(self) -> None:
        """Nothing more comes; what waits is still to be sent."""
        with self._turn:
            self._over = True
            self._turn.notify_all()

    def waiting(self) -> Iterator[feed_wire.Outgoing]:
        """What waits now. Raises TooSlow."""
        while True:
            with self._turn:
                if self._slow:
                    raise TooSlow(self._num_bytes)
                if not self._waiting:
                    return
                message = self._waiting.popleft()
                self._num_bytes -= feed_wire.num_bytes([message])
            yield message

    def all(self) -> Iterator[feed_wire.Outgoing]:
        """What waits and comes, until the end. Raises TooSlow."""
        while True:
            yield from self.waiting()
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._slow or self._over)
                if self._over and not self._waiting and not self._slow:
                    return


class Subscribers:
    """Those of one source. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Subscription, ...] = ()
        self._ended = False

    def now(self) -> tuple[Subscription, ...]:
        """All there are."""
        return self._all

    def add(self, subscription: Subscription) -> None:
        """One more. Raises TooMany."""
        with self._lock:
            if len(self._all) >= MAX_SUBSCRIBERS:
                raise TooMany
            self._all = (*self._all, subscription)
            if self._ended:
                subscription.end()

    def remove(self, subscription: Subscription) -> None:
        """One less."""
        with self._lock:
            self._all = tuple(each for each in self._all if each is not subscription)

    def end(self) -> None:
        """Nothing more is said to any."""
        with self._lock:
            self._ended = True
            for each in self._all:
                each.end()


@dataclass(frozen=True, slots=True)
class _Held:
    """A version that is copied, of which not all keys that went are known."""

    version: int
    tables: Mapping[str, Told]
    whom: tuple[Subscription, ...]
    """Those who subscribed before: for others it is no version, as their base is newer."""


class ShardFeed:
    """See module docstring. `publish`, `seal` and `closed` between passes; the rest from any thread."""

    def __init__(self, tables: Mapping[str, TableFeed], generation: int = 1) -> None:
        self._tables, self._generation = tables, generation
        self._lock = threading.Lock()
        self._subscribers = Subscribers()
        self._restored = self._version = 0
        self._held: _Held | None = None

    # --- what happens ------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """The rows are those of a commit of `version`."""
        with self._lock:
            self._restored = self._version = version
            for table in self._tables.values():
                table.begin(version)

    def seal(self) -> None:
        """A pass is about to close: what happens from here on is no longer of the version before."""
        with self._lock:
            self._put_back()

    def _put_back(self) -> None:
        if self._held is not None:
            for name, told in self._held.tables.items():
                self._tables[name].put_back(told)
            self._held = None

    def closed(self, version: int) -> None:
        """A pass is closed."""
        with self._lock:
            self._version = version
            for table in self._tables.values():
                table.closed(version)

    def publish(self, version: int) -> None:
        """Tell subscribers what changed and went up to `version`, whose operations have acted."""
        with self._lock:
            whom = self._subscribers.now()
            if not whom:
                return
            if self._held is not None and self._held.version == version and self._held.whom == whom:
                return  # told once it is complete
            self._put_back()
            sweeping = self._sweeping()  # before what went is taken: nothing goes later where this is over
            held = _Held(version, {name: table.take() for name, table in self._tables.items()}, whom)
            if not sweeping:
                _say(held)
                return
            self._held = held
        self.swept()  # it may have ended meanwhile

    def swept(self) -> None:
        """A table has no more rows that shrinks took."""
        with self._lock:
            if self._held is None or self._sweeping():
                return
            tables = {name: self._tables[name].take_gone(told) for name, told in self._held.tables.items()}
            _say(_Held(self._held.version, tables, self._held.whom))
            self._held = None

    def _sweeping(self) -> bool:
        return any(table.sweeping for table in self._tables.values())

    # --- who is told: pserver.feed_server.Source ---------------------------------------------------------------------

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_wire.Outgoing]:
        """Tell one more from here on; -> what it is to be told first, its base, to be read at its own pace.

        `since` is the version it has, from workers of `generation`. Raises TooMany.
        """
        with self._lock:
            since = self._begin_of(since, generation)
            if not self._subscribers.now():
                for table in self._tables.values():
                    table.follow(True)
            self._subscribers.add(subscription)
            gone = {name: table.gone_since(since) for name, table in self._tables.items()} if since else {}
        return self._base(since, gone)

    def _begin_of(self, since: int, generation: int) -> int:
        """The version after which changes are told to who has `since`; 0: everything.

        Other workers than these made the versions after the commit that was restored here, and made them alike, if
        nothing was otherwise; so all that changed after the commit is told.
        """
        if generation != self._generation:
            since = self._restored if since >= self._restored else 0
        known = all(table.known_since <= since for table in self._tables.values())
        return since if known and since <= self._version else 0

    def _base(self, since: int, gone: Mapping[str, U64]) -> Iterator[feed_wire.Outgoing]:
        yield feed_wire.begin(whole=since == 0)
        for name, table in self._tables.items():
            if name in gone:
                nothing = table.read(feed_wire.NO_GONE)
                yield from feed_wire.rows(pb.FeedPart.BASE, name, Told(nothing, gone[name]))
            for present in table.scan(since):
                yield from feed_wire.rows(pb.FeedPart.BASE, name, Told(present, feed_wire.NO_GONE))

    def close(self, subscription: Subscription) -> None:
        """Tell one no longer."""
        with self._lock:
            self._subscribers.remove(subscription)
            if not self._subscribers.now():
                self._held = None
                for table in self._tables.values():
                    table.follow(False)

    def poke(self) -> None:
        """See Source: a shard is told by the chief when to tell."""

    def end(self) -> None:
        """Nothing more is told to anybody."""
        self._subscribers.end()


def _say(held: _Held) -> None:
    outgoing = [m for name, told in held.tables.items() for m in feed_wire.rows(pb.FeedPart.ROWS, name, told)]
    outgoing.append(feed_wire.version(held.version))
    for subscription in held.whom:
        subscription.put(outgoing)
