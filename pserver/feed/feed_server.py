"""A port for subscribers of the live feed, with its own secret: it allows reading the feed and nothing else.

Off loopback it has mutual TLS with the job's authority, and takes replicas of this generation alone.

Each subscriber takes a thread, which reads its base and sends its queued messages. A subscriber that is too slow gets
an error; if it does not read even that, its call is cancelled. The source decides what is sent: pserver.feed.publisher
on a shard, trainer.train.model_feed on rank 0.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from headrace.address import address_of
from headrace.errors import HeadraceError
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole, PeerRule
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed import feed_messages, payloads
from headrace.pserver.feed.publisher import MAX_SUBSCRIBERS, SubscriberTooSlow, Subscription, TooManySubscribers
from headrace.pserver.proto import feed_pb2 as pb
from headrace.rpc import refusals
from headrace.rpc.refusals import RefusalReason
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint

CUT_S = 2.0
"""How long a disconnected subscriber may take to read the error."""
CLOSE_S = 2.0
"""How long queued messages may take to be sent once the source has ended."""


class FeedSource(Protocol):
    """Where the messages of a feed come from. Any thread."""

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_messages.Outgoing]:
        """Add a subscriber; return its first messages. Raises TooManySubscribers."""
        ...

    def close(self, subscription: Subscription) -> None:
        """Remove a subscriber; does nothing if it is not there."""
        ...

    def poke(self) -> None:
        """Ask for the newest version to be sent again."""
        ...

    def end(self) -> None:
        """End every subscription."""
        ...


class FeedServer:
    """A served source; `close` it."""

    def __init__(self, source: FeedSource, secret: str, tls: TlsEndpoint | None = None) -> None:
        """Bind a free port of loopback, or `tls`, and serve; `address` is host:port."""
        self._source = source
        self._server = RpcServer(
            secret,
            max_workers=MAX_SUBSCRIBERS + 2,
            max_message_bytes=feed_messages.MAX_MESSAGE_BYTES,
            tls=tls,
            keepalive=True,
        )
        self.address = self._server.address
        servicer = _Servicer(source, self._server.source_of)
        self._server.add_service(feed_messages.SERVICE, servicer, payloads.encoded)
        self._server.start()

    def close(self) -> None:
        """Send queued messages, stop serving and free the port."""
        self._source.end()
        self._server.close(CLOSE_S)


def endpoint_of(interface: str, identity: Identity | None) -> TlsEndpoint | None:
    """Where a process with an identity serves its feed, and for whom: replicas with a certificate of its generation.

    Replicas are not told apart: each has number 0.
    """
    if identity is None:
        return None
    mine = identity.current.name
    accepts = PeerRule(mine.job, mine.generation, {PeerRole.REPLICA: range(1)})
    return TlsEndpoint(address_of(interface), identity, accepts)


class _Servicer:
    """The calls of feed.proto, each on a thread of the server."""

    def __init__(self, source: FeedSource, source_of: Callable[[grpc.ServicerContext], str]) -> None:
        self._source, self._source_of = source, source_of

    def Subscribe(
        self, request: pb.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[feed_messages.Outgoing]:
        name = self._source_of(context)

        def cancel_soon(waiting_bytes: int) -> None:
            why = f"it is too slow for the live feed: {waiting_bytes >> 20} MiB wait, so it is disconnected"
            refusals.PROCESS.note(RefusalReason.TOO_SLOW, name, why)
            timer = threading.Timer(CUT_S, context.cancel)
            timer.daemon = True
            timer.start()

        subscription = Subscription(cancel_soon)
        try:
            if request.format != feed_messages.FORMAT:
                raise InvalidShardCall(
                    f"the subscriber speaks format {request.format}, the feed {feed_messages.FORMAT}"
                )
            base = self._source.open(subscription, request.since, request.generation)
            if not context.add_callback(subscription.end):  # it has left already
                return
            yield from _messages(base, subscription)
        except TooManySubscribers as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except SubscriberTooSlow as error:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except HeadraceError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._source.close(subscription)

    def Poke(self, _request: pb.PokeRequest, _context: grpc.ServicerContext) -> pb.PokeReply:
        self._source.poke()
        return pb.PokeReply()


def _messages(base: Iterator[feed_messages.Outgoing], subscription: Subscription) -> Iterator[feed_messages.Outgoing]:
    """The base mixed with what is queued meanwhile, the mark that the base is read, then all later messages."""
    for message in base:
        yield message
        yield from subscription.waiting()
    subscription.put([feed_messages.read()])  # behind what was queued during the base
    yield from subscription.all()
