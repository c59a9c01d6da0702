"""A port for subscribers, with a secret of its own: who has it can read what is told, and call nothing else.

Each subscriber takes a thread, which reads its base and sends what waits for it; a subscriber that is let go and does
not even take the words that say so is cut off. What is told is the source's matter: pserver.feed's, or the chief's.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

import grpc

from millrace import rpc
from millrace.errors import MillraceError
from pserver import feed_wire, wire
from pserver.errors import BadRequest
from pserver.feed import MAX_SUBSCRIBERS, Subscription, TooMany, TooSlow
from pserver.proto import feed_pb2 as pb

CUT_S = 2.0
"""How long one that is let go may take to hear why."""
CLOSE_S = 2.0
"""How long what waits may take to be sent once the source has ended."""


class Source(Protocol):
    """What subscribers are told. Any thread."""

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_wire.Outgoing]:
        """Tell one more; -> what it is to be told first. Raises TooMany."""
        ...

    def close(self, subscription: Subscription) -> None:
        """Tell one no longer; harmless where it is not told."""
        ...

    def poke(self) -> None:
        """Somebody would like to hear the newest version once more."""
        ...

    def end(self) -> None:
        """Nothing more is told to anybody."""
        ...


class FeedServer:
    """A served source; `close` it."""

    def __init__(self, source: Source, secret: str) -> None:
        """Bind a free port of loopback and serve; `address` is host:port."""
        self._source = source
        self._server, self.address = rpc.local_server(
            secret, max_workers=MAX_SUBSCRIBERS + 2, max_message_bytes=feed_wire.MAX_MESSAGE_BYTES
        )
        rpc.add_service(self._server, feed_wire.SERVICE, _Servicer(source), wire.encoded)
        self._server.start()

    def close(self) -> None:
        """Send what waits, stop serving and give the port back."""
        self._source.end()
        self._server.stop(CLOSE_S).wait()


class _Servicer:
    """The calls of feed.proto, each on a thread of the server."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def Subscribe(self, request: pb.SubscribeRequest, context: grpc.ServicerContext) -> Iterator[feed_wire.Outgoing]:
        def cut() -> None:
            timer = threading.Timer(CUT_S, context.cancel)
            timer.daemon = True
            timer.start()

        subscription = Subscription(cut)
        try:
            if request.format != feed_wire.FORMAT:
                raise BadRequest(f"the subscriber speaks format {request.format}, the feed {feed_wire.FORMAT}")
            base = self._source.open(subscription, request.since, request.generation)
            if not context.add_callback(subscription.end):  # it has left already
                return
            yield from _told(base, subscription)
        except (TooMany, TooSlow) as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except MillraceError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._source.close(subscription)

    def Poke(self, _request: pb.PokeRequest, _context: grpc.ServicerContext) -> pb.PokeReply:
        self._source.poke()
        return pb.PokeReply()


def _told(base: Iterator[feed_wire.Outgoing], subscription: Subscription) -> Iterator[feed_wire.Outgoing]:
    """The base with what comes meanwhile, that it is read, and what comes then."""
    for message in base:
        yield message
        yield from subscription.waiting()
    subscription.put([feed_wire.read()])  # behind what was told while it was read
    yield from subscription.all()
