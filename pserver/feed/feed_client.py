"""The subscriber's end of one subscription: parts in order, and our errors instead of gRPC's.

trainer.replica.feed_updates joins the parts of all shards.
"""

from collections.abc import Iterator

import grpc

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, Unavailable
from headrace.pserver.feed import feed_messages
from headrace.pserver.feed.feed_messages import FeedMessage
from headrace.pserver.proto import feed_pb2 as pb
from headrace.rpc import channels
from headrace.rpc.channels import TlsPeer


class FeedTooSlow(Unavailable):
    """The feed disconnected this subscriber, for which too much waited."""


class FeedStream:
    """A channel to one source. One thread iterates; any may poke and close."""

    def __init__(self, name: str, address: str, secret: str, tls: TlsPeer | None = None) -> None:
        """`tls`: the source and our credentials, off loopback. Raises Refused without them there."""
        self._name, self._tls = f"{name} at {address}", tls
        self._metadata = channels.metadata(secret)
        self._closed = False
        self._channel = channels.open_channel(
            address, max_message_bytes=feed_messages.MAX_MESSAGE_BYTES, tls=tls, keepalive=True
        )

    def parts(self, since: int, generation: int) -> Iterator[FeedMessage]:
        """Subscribe; the parts in order. Raises Refused, and Unavailable, also when the feed ends; FeedTooSlow."""
        subscribe = self._channel.unary_stream(
            channels.path_of(feed_messages.SERVICE, "Subscribe"),
            pb.SubscribeRequest.SerializeToString,
            pb.FeedPart.FromString,
        )
        request = pb.SubscribeRequest(format=feed_messages.FORMAT, since=since, generation=generation)
        try:
            for message in subscribe(request, metadata=self._metadata):
                yield feed_messages.part_of(message)
        except grpc.RpcError as error:
            raise self._translated(error) from error
        except ValueError as error:  # the channel was closed
            raise Unavailable(f"the feed of {self._name} is closed") from error
        raise Unavailable(f"the feed of {self._name} has ended")

    def poke(self, deadline: Deadline) -> None:
        """Ask for the newest version to be sent again. Raises Unavailable and Refused."""
        poke = self._channel.unary_unary(
            channels.path_of(feed_messages.SERVICE, "Poke"), pb.PokeRequest.SerializeToString, pb.PokeReply.FromString
        )
        try:
            poke(pb.PokeRequest(), timeout=deadline.left_s(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def close(self) -> None:
        """End the subscription."""
        self._closed = True
        self._channel.close()

    def _translated(self, error: grpc.RpcError) -> HeadraceError:
        name, details = self._name, error.details()
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Unavailable(f"the feed of {name} disconnected this subscriber: {details}")
            case grpc.StatusCode.OUT_OF_RANGE:
                return FeedTooSlow(f"the feed of {name} disconnected this subscriber: {details}")
            case grpc.StatusCode.CANCELLED if not self._closed:  # while the source could not even say so
                return FeedTooSlow(f"the feed of {name} disconnected this subscriber, which reads too slowly")
            case grpc.StatusCode.INVALID_ARGUMENT:
                return Refused(f"the feed of {name} refused: {details}")
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
                # another process has the port now, or our certificate is of an older generation
                return Unavailable(f"the feed of {name} is another one: {details}; where is it now?")
        translated = channels.error_of_rpc(error, f"the feed of {name}", self._tls)
        return Unavailable(str(translated)) if isinstance(translated, Refused) else translated
