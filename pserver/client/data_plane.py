"""The calls of every step to all shards at once: requests go out, replies are taken as they come.

The thread that waits for replies also reads them, so a call costs no hand-over between threads. A call is repeated,
under its number, where its connection broke; each connection begins with a greeting by gRPC, which checks the job and
tells where the data plane is. pserver.client.remote decides which calls are made.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import zmq

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.pserver.errors import InvalidShardCall, MessageTooLarge, ShardUnavailable, StepTimedOut
from headrace.pserver.protocol import frames, statuses
from headrace.pserver.protocol.frames import DataCall, DataReply, DataRequest, TableNumbers
from headrace.pserver.rows.arrays import Empty, empty_floats
from headrace.retry import Backoff
from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import Context, DataAddress, DataConnection, KeyPair, MemoryOffer, SharedMemory
from headrace.timeline import Span, span
from headrace.traffic import LinkTraffic

BACKOFF = Backoff((0.05, 0.1, 0.2, 0.4))
"""Between tries of one call: a shard that is gone counts as unavailable within a second."""
SLICE_MS = 20
"""Longest wait that keeps another thread from sending."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Greeting:
    """A shard's answer to a greeting."""

    at: DataAddress
    max_message_bytes: int
    """Longest message that the shard takes."""
    opened_memory: bool = False
    """Whether it has opened the memory that was offered."""


Greet = Callable[[int, Deadline, MemoryOffer | None], Greeting]
"""greet(shard, deadline, memory to be opened)"""


@dataclass(slots=True)
class Call:
    """A call that was sent to a shard."""

    shard: int
    request: DataRequest
    arrays: Sequence[memoryview]
    until: Deadline
    attempts: int = 0
    again_at_s: float | None = None
    """When it is sent again, on the monotonic clock."""
    reply: DataReply | None = None
    rows: Sequence[memoryview] = ()
    """The arrays of the reply."""
    error: HeadraceError | None = None

    @property
    def done(self) -> bool:
        """Whether it has an answer."""
        return self.reply is not None or self.error is not None


@dataclass(slots=True)
class _Link:
    """The connection to one shard, and the calls that wait for it."""

    name: str
    connection: DataConnection | None = None
    memory: SharedMemory | None = None
    """Belongs to the connection: both are given up together."""
    max_message_bytes: int = 0
    open: dict[int, Call] = field(default_factory=dict)
    traffic: LinkTraffic = field(default_factory=LinkTraffic)
    """Of all its connections."""


class DataPlane:
    """Any thread may call; calls of one thread wait while another one sends or reads."""

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        greet: Greet,
        tables: TableNumbers,
        keys: KeyPair,
        max_message_bytes: int,
        *,
        shares_memory: bool,
        silent_s: float,
    ) -> None:
        """`names` of the shards are for messages. Connections are made with the first call.

        With `shares_memory` arrays lie beside the messages where a shard is on this machine; then calls are made one
        by one to each shard. `silent_s`: see headrace.rpc.data_sockets.SILENT_S.
        """
        self._context, self._tables, self._keys, self._max_message_bytes = context, tables, keys, max_message_bytes
        self._greet, self._links = greet, [_Link(name) for name in names]
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        self._next_number = random.SystemRandom().getrandbits(31) << 32  # another client of this rank has others
        self._shares_memory, self._silent_s, self._closed = shares_memory, silent_s, False

    def empty(self, shard: int) -> Empty:
        """Makes the arrays of the next call to a shard."""
        with self._lock:
            link = self._links[shard]
            if link.memory is None or link.open:
                return empty_floats
            link.memory.clear()
            return link.memory.empty

    def send(self, shard: int, request: DataRequest, arrays: Sequence[memoryview], deadline: Deadline) -> Call:
        """Send a call, which `wait` then awaits. `arrays` must not change before its end."""
        with self._lock:
            self._next_number += 1
            call = Call(shard, replace(request, request=self._next_number), arrays, deadline)
            self._links[shard].open[self._next_number] = call
            self._try(call)
            return call

    def wait(self, calls: Sequence[Call]) -> Iterator[Call]:
        """Each call once it has its reply, in the order of replies. Raises the error of the first that failed.

        Calls that have none by then are given up; a late reply is ignored.
        """
        left = list(calls)
        try:
            while left:
                ended = [call for call in left if call.done]
                left = [call for call in left if not call.done]
                for call in ended:
                    if call.error is not None:
                        raise call.error
                    yield call
                if not ended:
                    self._progress(left)
        finally:
            with self._lock:
                for call in left:
                    if self._links[call.shard].open.pop(call.request.request, None) is not None:
                        self._forget_memory(self._links[call.shard])

    def make_room(self, most: int) -> None:
        """Wait until fewer than `most` calls have no answer."""
        while len(calls := self._open()) >= most:
            self._progress(calls)

    def traffic(self) -> list[LinkTraffic]:
        """The counters of each shard. Any thread may read them."""
        return [link.traffic for link in self._links]

    def _open(self) -> list[Call]:
        with self._lock:
            return [call for link in self._links for call in link.open.values()]

    def close(self) -> None:
        """Give up all calls and connections."""
        with self._lock:
            self._closed = True
            for link in self._links:
                for call in list(link.open.values()):
                    self._end(call, InvalidShardCall(f"the client of {link.name} was closed during a call"))
                self._disconnect(link)

    # --- under the lock

    def _progress(self, calls: Sequence[Call]) -> None:
        """Wait a while for replies, and send again what is due."""
        with self._lock:
            times_s = [call.until.at_s for call in calls]
            times_s += [call.again_at_s for link in self._links for call in link.open.values() if call.again_at_s]
            left_ms = 1000 * (min(times_s) - time.monotonic())
            since_s = time.monotonic()
            self._read(max(0, min(SLICE_MS, int(left_ms) + 1)))
            now_s = time.monotonic()
            for shard in {call.shard for call in calls}:
                self._links[shard].traffic.wait_s += now_s - since_s
            for link in self._links:
                for call in list(link.open.values()):
                    if call.until.at_s <= now_s:
                        self._end(call, StepTimedOut(f"{link.name} did not answer in time"))
                        self._forget_memory(link)
                    elif call.again_at_s is not None and call.again_at_s <= now_s:
                        self._try(call)

    def _read(self, wait_ms: int) -> None:
        """Read what is here, after a wait of at most `wait_ms` for something."""
        with span(Span.WAIT):
            ready = dict(self._poller.poll(wait_ms))
        for link in self._links if ready else ():
            connection = link.connection
            while connection and (message := data_sockets.receive(connection.socket)) is not None:
                self._take(link, message)
                connection = link.connection
            if connection and connection.events in ready and (reason := connection.broken()):
                self._lose(link, reason)

    def _take(self, link: _Link, message: Sequence[memoryview]) -> None:
        reply = frames.decode_reply(message[0], self._tables)
        call = link.open.get(reply.request)
        if call is None:  # it was given up
            return
        if reply.status:
            code = statuses.code_of(reply.status)
            self._fail(call, statuses.error_of_status(code, reply.details, link.name, call.attempts))
            return
        call.reply, call.rows = reply, message[1:]
        if reply.beside:
            assert link.memory is not None, "an answer to a call that came from there"
            call.rows = frames.beside(link.memory, message[1:])
        link.traffic.received(frames.num_bytes_of(message), frames.num_bytes_of(call.rows) if reply.beside else 0)
        self._end(call)

    def _try(self, call: Call) -> None:
        """Send a call, for the first time or again."""
        link = self._links[call.shard]
        call.attempts, call.again_at_s = call.attempts + 1, None
        try:
            if link.connection is None:
                self._connect(call.shard, call.until)
            connection = link.connection
            assert connection is not None
            size = self._checked_size(link, call)
            beside_others = call.request.part.number or call.request.call is DataCall.EARLY
            memory = None if beside_others else link.memory  # it has room for one call alone
            places = None if memory is None else memory.places_of(call.arrays)
            request = replace(call.request, left_s=call.until.left_s(), beside=places is not None)
            header = frames.encode_request(request, self._tables)
            data_sockets.send(connection.socket, [header, *(call.arrays if places is None else [places])])
            in_message, shared = (size, 0) if places is None else (len(places), size)
            link.traffic.sent(len(header) + in_message, shared)
        except (zmq.ZMQError, OSError) as error:
            self._fail(call, ShardUnavailable(link.name, call.attempts, str(error)))
        except ShardUnavailable as error:  # of the greeting
            self._fail(call, ShardUnavailable(link.name, call.attempts, error.detail))
        except HeadraceError as error:
            self._fail(call, error)

    def _checked_size(self, link: _Link, call: Call) -> int:
        size = frames.num_bytes_of(call.arrays)
        if size > link.max_message_bytes:
            raise MessageTooLarge(link.name, f"a call needs {size} bytes, and a message has {link.max_message_bytes}")
        return size

    def _connect(self, shard: int, deadline: Deadline) -> None:
        link = self._links[shard]
        if self._closed:
            raise InvalidShardCall(f"a call to {link.name} after the end")
        memory = _new_memory() if self._shares_memory else None
        try:
            greeting = self._greet(shard, deadline, None if memory is None else memory.offer)
        finally:
            if memory is not None:
                memory.offered()
        link.memory = memory if greeting.opened_memory else None
        link.max_message_bytes = min(self._max_message_bytes, greeting.max_message_bytes)
        link.connection = DataConnection(
            self._context, greeting.at, self._keys, self._max_message_bytes, self._silent_s
        )
        self._poller.register(link.connection.socket, zmq.POLLIN)
        self._poller.register(link.connection.events, zmq.POLLIN)

    def _lose(self, link: _Link, reason: str) -> None:
        """A connection broke: its calls are sent again, or fail."""
        self._disconnect(link)
        for call in list(link.open.values()):
            if call.again_at_s is None:
                self._fail(call, ShardUnavailable(link.name, call.attempts, reason))

    def _disconnect(self, link: _Link) -> None:
        if link.connection is not None:
            self._poller.unregister(link.connection.socket)
            self._poller.unregister(link.connection.events)
            link.connection.close()
            link.connection = link.memory = None

    def _forget_memory(self, link: _Link) -> None:
        """A call was given up, whose arrays the shard may still read, and whose answer it may still write."""
        if link.memory is not None:
            self._lose(link, "an earlier call was given up")

    def _fail(self, call: Call, error: HeadraceError) -> None:
        """Try again later if that may help and there are tries and time left; else end with `error`."""
        pause_s = BACKOFF.next_pause_s(call.attempts, call.until.left_s())
        if isinstance(error, ShardUnavailable) and pause_s is not None:
            call.again_at_s = time.monotonic() + pause_s
        else:
            self._end(call, error)

    def _end(self, call: Call, error: HeadraceError | None = None) -> None:
        call.error = error
        self._links[call.shard].open.pop(call.request.request, None)


def _new_memory() -> SharedMemory | None:
    try:
        return SharedMemory.create()
    except OSError as error:
        log.warning("no memory can be shared with shards (%s); messages carry the arrays", error)
        return None
