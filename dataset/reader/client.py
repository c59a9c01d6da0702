"""The readers of a job as a trainer sees them: parts go out, their pieces come back and are put in order.

At most as many parts are on their way as a pipe of the trainer's own would have, and as one reader takes, as it may be
the last one that is left. Of each at most one piece waits here: then its reader waits, by the flow control of HTTP/2. A
reader that does not answer pings is lost; its parts are given to another one, from the first piece that is missing.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Empty, Full, Queue
from typing import Protocol

import grpc

from headrace import codec
from headrace.dataset.loader.batch_loader import POLL_S, PassTally
from headrace.dataset.loader.segment_parts import SegmentPart
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.proto import reader_pb2 as pb
from headrace.dataset.reader import messages
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import PipeFailed
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole
from headrace.rpc import channels
from headrace.rpc.channels import RenewedChannel, TlsPeer
from headrace.rpc.rendezvous import ServingWorker
from headrace.rpc.rpc_server import MAX_CALLS
from headrace.traffic import Links, LinkTraffic, links_of

BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""How a call ends by an exception at the reader that is no HeadraceError, as for a lack of memory or of descriptors."""
LOST_S = 60.0
"""How long a reader that was lost gets no part, if others are left and it was not started again."""
LOOK_S = 2.0
"""Between two questions to the launcher where a lost reader is now."""

log = logging.getLogger(__name__)

Piece = tuple[PipeInput, PipeOutput, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderCaller:
    """A rank as readers know it."""

    rank: int
    generation: int
    secret: str = field(repr=False)
    identity: Identity | None = None
    """For addresses off loopback."""


Find = Callable[[str], ServingWorker | None]
"""Takes the name of a reader; where it serves now, if it does. Raises HeadraceError."""


class ReaderLost(Unavailable):
    """A reader does not answer, or failed in a way that may pass."""


class _Reader:
    """One reader. Any thread."""

    def __init__(self, number: int, address: str, caller: ReaderCaller, before: "_Reader | None" = None) -> None:
        """`address`: "" of one that does not run. `before`: the process in whose place this one is."""
        self.number, self.name, self.address = number, f"{PeerRole.READER}-{number}", address
        self._caller, self._tls = caller, None
        if caller.identity is not None:
            self._tls = TlsPeer(caller.identity, caller.identity.current.peer(PeerRole.READER, number))
        self._channel = RenewedChannel(address, tls=self._tls, keepalive=True) if address else None
        self.traffic: LinkTraffic = LinkTraffic() if before is None else before.traffic
        self.counting: threading.Lock = threading.Lock() if before is None else before.counting
        self.num_calls, self.times = 0, 1 if address else 0
        self.lost_s = -math.inf if address else time.monotonic()
        self.looked_s = -math.inf

    def read(self, pass_number: int, part: SegmentPart, call: "_PartCall") -> Iterator[bytes]:
        """The pieces of a part. Raises ReaderLost, and what the source and the pipe raise there."""
        caller = self._caller
        if self._channel is None:
            raise ReaderLost(f"{self.name} does not run")
        request = pb.ReadRequest(
            generation=caller.generation,
            rank=caller.rank,
            format=messages.FORMAT,
            pass_number=pass_number,
            part=codec.packed(part),
        )
        with self.counting:
            self.traffic.sent(request.ByteSize())
        piece = bytearray()
        try:
            with self._channel.for_call() as channel:
                path = channels.path_of(messages.SERVICE, "Read")
                method = channel.unary_stream(path, channels.serialize, pb.ReadReply.FromString)
                stream = method(request, metadata=channels.metadata(caller.secret))
                call.begun(stream)
                for reply in stream:
                    with self.counting:
                        self.traffic.received(len(reply.data))
                    if reply.failure:
                        raise codec.unpacked(messages.Failure, reply.failure, "a failure of a reader").error()
                    piece += reply.data
                    if reply.ends:
                        yield bytes(piece)
                        piece.clear()
        except grpc.RpcError as error:
            found = channels.error_of_rpc(error, self.name, self._tls)
            is_lost = isinstance(found, Unavailable | DeadlineExceeded) or error.code() in BROKEN
            raise (ReaderLost(str(found)) if is_lost else found) from error

    def close(self) -> None:
        """Close the connection; calls fail."""
        if self._channel is not None:
            self._channel.close()


class _Stream(Protocol):
    """A call of gRPC."""

    def cancel(self) -> object: ...


class _PartCall:
    """A part that is on its way: one thread puts its pieces, another takes them."""

    def __init__(self, part: SegmentPart) -> None:
        self.part = part
        self.reader: _Reader | None = None
        self._pieces: Queue[Piece | Exception | None] = Queue(1)
        self._cancelled = threading.Event()
        self._stream: _Stream | None = None

    def begun(self, stream: _Stream) -> None:
        """`stream` is its call."""
        self._stream = stream
        if self._cancelled.is_set():
            stream.cancel()

    def put(self, item: Piece | Exception | None) -> None:
        """Add a piece, an error, or the end, and wait for room; without effect once cancelled."""
        while not self._cancelled.is_set():
            try:
                return self._pieces.put(item, timeout=POLL_S)
            except Full:
                continue

    def pieces(self) -> Iterator[Piece]:
        """The pieces in order. Raises the error that ends them."""
        while (item := self._next()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        """Nobody takes the rest."""
        self._cancelled.set()
        if self._stream is not None:
            self._stream.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether nobody takes the rest."""
        return self._cancelled.is_set()

    def _next(self) -> Piece | Exception | None:
        begin_s = time.monotonic()
        try:
            while not self._cancelled.is_set():
                try:
                    return self._pieces.get(timeout=POLL_S)
                except Empty:
                    continue
        finally:
            if self.reader is not None:
                self.reader.traffic.wait_s += time.monotonic() - begin_s
        raise PipeFailed("the readers were closed while they were in use")


class RemoteParts:
    """Parts through source and pipe at the readers; see dataset.loader.segment_parts.Parts."""

    def __init__(
        self,
        addresses: Sequence[str],
        caller: ReaderCaller,
        schema: Schema,
        processes: int,
        find: Find = lambda name: None,
    ) -> None:
        """`schema`: the slots that the pipe emits. `processes`: of the pipe, for this trainer."""
        self._find, self._caller = find, caller
        self._readers = [_Reader(number, address, caller) for number, address in enumerate(addresses)]
        self._schema, self._first = schema, caller.rank
        self._max_in_flight = min(processes + 1, MAX_CALLS // 2)  # a server counts a call for a moment after its end
        self._threads = ThreadPoolExecutor(self._max_in_flight, thread_name_prefix="reader")
        self._lock = threading.Lock()
        self._calls: set[_PartCall] = set()
        self._closed = False

    def run(
        self, pass_number: int, parts: Sequence[SegmentPart], tally: PassTally
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        left, in_flight = deque(parts), deque[_PartCall]()
        try:
            while left or in_flight:
                while left and len(in_flight) < self._max_in_flight:
                    in_flight.append(self._begin(pass_number, left.popleft()))
                for work, outcome, source_s in in_flight[0].pieces():
                    tally.source_s += source_s
                    yield work, outcome
                in_flight.popleft()
        finally:
            for call in in_flight:
                call.cancel()

    def links(self) -> Links:
        """The traffic with each reader: "reader-0". Any thread."""
        return links_of({reader.name: reader.traffic for reader in self._readers})

    def close(self) -> None:
        with self._lock:
            self._closed, calls = True, list(self._calls)
        for call in calls:
            call.cancel()
        for reader in self._readers:
            reader.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, pass_number: int, part: SegmentPart) -> _PartCall:
        call = _PartCall(part)
        with self._lock:
            if self._closed:
                raise PipeFailed("the readers were closed while they were in use")
            self._calls.add(call)
            self._threads.submit(self._fetch, pass_number, call)
        return call

    def _fetch(self, pass_number: int, call: _PartCall) -> None:
        """Put the pieces of a part, or the error that ends them; by a thread of its own."""
        try:
            self._fetch_all(pass_number, call)
        except Exception as error:  # noqa: BLE001 - raised by who takes the pieces
            call.put(error)
        else:
            call.put(None)
        finally:
            with self._lock:
                self._calls.discard(call)

    def _fetch_all(self, pass_number: int, call: _PartCall) -> None:
        segment, own_N = call.part.segment, call.part.own_N
        lost: set[_Reader] = set()
        begin, num_pieces = segment.begin, 0
        while True:
            rest = None if own_N is None else own_N[begin - segment.begin :]
            part = SegmentPart(replace(segment, begin=begin), rest)
            self._look_for_lost()
            call.reader = reader = self._chosen(lost)
            try:
                for data in reader.read(pass_number, part, call):
                    piece = messages.read_piece(data, replace(segment, begin=begin), self._schema)
                    begin, num_pieces = piece[0].segment.end, num_pieces + 1
                    call.put(piece)
                reader.lost_s = -math.inf
                if begin != segment.end:
                    raise HeadraceError(f"{reader.name} ended {segment.partition} at {begin}, before {segment.end}")
                return
            except ReaderLost as error:
                lost.add(reader)
                if begin == segment.end and num_pieces:
                    return
                if call.cancelled:
                    raise
                reader.lost_s = time.monotonic()
                if lost.issuperset(self._readers):
                    self._look_for_lost(pause_s=0.0)
                if lost.issuperset(self._readers):
                    raise
                log.warning("%s; its part of %s is given to another reader", error, segment.partition)
            finally:
                with self._lock:
                    reader.num_calls -= 1
                    if not reader.num_calls and reader not in self._readers:
                        reader.close()

    def _look_for_lost(self, pause_s: float | None = None) -> None:
        """Ask where lost readers are: another process in the place of one gets parts at once."""
        now_s = time.monotonic()
        before_s = now_s - (LOOK_S if pause_s is None else pause_s)
        with self._lock:
            lost = [each for each in self._readers if each.lost_s > -math.inf and each.looked_s <= before_s]
            for reader in lost:
                reader.looked_s = now_s
        for reader in lost:
            try:
                found = self._find(reader.name)
            except HeadraceError as error:
                log.info("%s is not found: %s", reader.name, error)
                continue
            if found is not None and found.times > reader.times:
                self._replace(reader, found)

    def _replace(self, before: _Reader, found: ServingWorker) -> None:
        after = _Reader(before.number, found.address, self._caller, before)
        after.times = found.times
        with self._lock:
            if self._closed or self._readers[before.number] is not before:
                return after.close()
            self._readers[before.number] = after
            if not before.num_calls:
                before.close()
        log.info("%s serves again, at %s", after.name, after.address)

    def _chosen(self, lost: set[_Reader]) -> _Reader:
        """The reader with the fewest calls of this trainer; each trainer begins with another one."""
        num, since_s = len(self._readers), time.monotonic() - LOST_S
        with self._lock:
            order = [self._readers[(self._first + at) % num] for at in range(num)]
            left = (each for each in order if each not in lost)
            reader = min(left, key=lambda each: (each.lost_s > since_s, each.num_calls))
            reader.num_calls += 1
            return reader
