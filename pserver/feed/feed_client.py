"""The subscriber's end of one subscription: parts in order, and our errors instead of gRPC's.

trainer.replica.feed_updates joins the parts of all shards.
"""

from collections.abc import Iterator

import grpc

from millrace.deadline import Deadline
from millrace.errors import MillraceError, Refused, Unavailable
from millrace.rpc import channels
from pserver.feed import feed_messages
from pserver.feed.feed_messages import FeedMessage
from pserver.proto import feed_pb2 as pb


class FeedStream:
    """A channel to one source. One thread iterates; any may poke and close."""

    def __init__(self, name: str, address: str, secret: str) -> None:
        self._name = f"{name} at {address}"
        self._metadata = channels.metadata(secret)
        self._channel = channels.open_channel(address, max_message_bytes=feed_messages.MAX_MESSAGE_BYTES)

    def parts(self, since: int, generation: int) -> Iterator[FeedMessage]:
        """Subscribe; the parts in order. Raises Refused, and Unavailable, also when the feed ends."""
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
            raise _translated(error, self._name) from error
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
            raise _translated(error, self._name) from error

    def close(self) -> None:
        """End the subscription."""
        self._channel.close()


def _translated(error: grpc.RpcError, name: str) -> MillraceError:
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unavailable(f"the feed of {name} disconnected this subscriber: {error.details()}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return Refused(f"the feed of {name} refused: {error.details()}")
        case grpc.StatusCode.UNAUTHENTICATED:  # another process has the port now
            return Unavailable(f"the feed of {name} is another one: {error.details()}; where is it now?")
        case _:
            return channels.error_of_rpc(error, f"the feed of {name}")
