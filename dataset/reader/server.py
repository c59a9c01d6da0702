"""A reader: runs parts of segments through source and pipe, one call for each part.

It keeps nothing between two calls but open sources and processes, so any reader may get any part, and get it again.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from headrace import codec
from headrace.address import address_of
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_parts import (
    AWAY_WAIT_S,
    EventCuts,
    PartsHere,
    SegmentPart,
    SourceEvents,
    make_pool,
)
from headrace.dataset.proto import reader_pb2 as pb
from headrace.dataset.reader import messages
from headrace.dataset.reader.config import ReaderProcess
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceUnavailable
from headrace.dataset.stream.source import Source
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole, PeerRule
from headrace.rpc.rpc_server import MAX_CALLS, RpcServer
from headrace.rpc.tls_listener import TlsEndpoint

OPEN_S = 60.0
"""Longest time for an answer of a source that is opened."""
PIECES_AHEAD = 2
"""Pieces of one call in memory: one in the pipe, and one that is read meanwhile."""

log = logging.getLogger(__name__)


class OpenSources:
    """The sources of a job, opened once for each call that reads at the same time. Any thread."""

    def __init__(self, config: ReaderProcess) -> None:
        self._config = config
        self._idle: list[Source] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, stopping: threading.Event) -> Iterator[Source]:
        """A source for one call. Waits while it is unavailable, as reads do. Raises what opening raises."""
        with self._lock:
            source = self._idle.pop() if self._idle else None
        if source is None:
            source = self._opened(stopping)
        try:
            yield source
        finally:
            with self._lock:
                self._idle.append(source)

    def _opened(self, stopping: threading.Event) -> Source:
        config, give_up = self._config, Deadline.after(self._config.max_outage)
        while True:
            deadline = Deadline.after(OPEN_S)
            opening = Opening(folder=config.folder, job=config.name, seed=config.seed, deadline=deadline, known=None)
            try:
                return open_sources(config.sources, opening)
            except SourceUnavailable as error:
                if give_up.passed() or stopping.wait(AWAY_WAIT_S):
                    raise
                log.warning("waiting for the source: %s", error)

    def close(self) -> None:
        """Close all sources that no call uses."""
        with self._lock:
            for source in self._idle:
                source.close()
            self._idle = []


class _Servicer:
    """The calls of reader.proto, each on a thread of the server."""

    def __init__(self, config: ReaderProcess) -> None:
        self._config = config
        sections, schema = SourceSet(config.sources), Schema.of(config.slots).emitted
        self._sources = OpenSources(config)
        self._cuts = EventCuts(sections, config.pipe, schema, config.memory)
        here = config.pipe.model_copy(update={"processes": config.processes})
        self._pool = make_pool(here, schema, sections, config.masks, config.folder, None, config.max_outage)

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadReply]:
        stopping = threading.Event()
        context.add_callback(stopping.set)
        try:
            self._check(request)
            part = codec.unpacked(SegmentPart, request.part, "a part of a segment")
            with self._sources.lent(stopping) as source:
                events = SourceEvents(source, self._config.max_outage, stopping)
                parts = PartsHere(events, self._cuts, self._pool, PIECES_AHEAD)
                for piece in self._pieces(parts, request.pass_number, part):
                    yield from chunks_of(piece)
        except HeadraceError as error:
            yield pb.ReadReply(failure=codec.packed(messages.Failure.of(error)))

    def _pieces(self, parts: PartsHere, pass_number: int, part: SegmentPart) -> Iterator[bytes]:
        tally, source_s = PassTally(), 0.0
        labels, traced = self._config.labels, self._config.pipe.traced
        for work, outcome in parts.run(pass_number, [part], tally):
            yield messages.piece_of(work, outcome, tally.source_s - source_s, labels, traced=traced)
            source_s = tally.source_s

    def _check(self, request: pb.ReadRequest) -> None:
        if request.generation != self._config.generation:
            raise Refused(
                f"reader-{self._config.reader} is of generation {self._config.generation}, and trainer-{request.rank} "
                f"of generation {request.generation}"
            )
        if request.format != messages.FORMAT:
            raise Refused(
                f"trainer-{request.rank} speaks format {request.format}, reader-{self._config.reader} format "
                f"{messages.FORMAT}: all machines need the same version of Headrace"
            )

    def close(self) -> None:
        """End processes and close sources."""
        self._pool.close()
        self._sources.close()


def chunks_of(piece: bytes) -> Iterator[pb.ReadReply]:
    """The messages of a piece."""
    for begin in range(0, len(piece), messages.CHUNK_BYTES):
        end = begin + messages.CHUNK_BYTES
        yield pb.ReadReply(data=piece[begin:end], ends=end >= len(piece))


class ReaderServer:
    """A reader that is served. Call `close`, or use it as a context."""

    def __init__(self, config: ReaderProcess, socket: Path | None = None, identity: Identity | None = None) -> None:
        """Bind the unix socket `socket`, or else a free port of loopback; with an `identity` a port of the interface.

        Raises SpecError where the pipe cannot be started. Each trainer has one call more than processes of the pipe.
        """
        self._servicer = _Servicer(config)
        tls = None
        if identity is not None:
            mine = identity.current.name
            accepts = PeerRule(mine.job, mine.generation, {PeerRole.TRAINER: range(config.num_ranks)})
            tls = TlsEndpoint(address_of(config.interface), identity, accepts)
        self._server = RpcServer(
            config.secret,
            max_workers=config.num_ranks * min(config.pipe.processes + 1, MAX_CALLS // 2),
            socket=socket,
            tls=tls,
            keepalive=True,
        )
        self._server.add_service(messages.SERVICE, self._servicer)
        self._server.start()
        self.address = self._server.address

    def close(self, grace_s: float = 1.0) -> None:
        """Stop serving and free the address. Calls in flight have `grace_s` to end."""
        self._server.close(grace_s)
        self._servicer.close()

    def __enter__(self) -> "ReaderServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
