"""Calls to one shard, with a deadline, a bounded size, bounded retries, and our errors instead of gRPC's.

Every call of the protocol is idempotent, so a call that found no peer is retried within its deadline.
pserver.client.remote decides which calls are made, and to which shards.
"""

from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from millrace import retry
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.retry import Backoff
from millrace.rpc import channels
from pserver.errors import (
    InvalidShardCall,
    MessageTooLarge,
    OutOfMemory,
    ShardUnavailable,
    StaleGeneration,
    StepTimedOut,
    StoreDamaged,
    StoreFailed,
)
from pserver.protocol import messages
from pserver.protocol.messages import MessageWithArrays

BACKOFF = Backoff((0.05, 0.1, 0.2, 0.4, 0.8))
"""Between tries of one call; after the sixth the shard counts as unavailable."""

Reply = TypeVar("Reply", bound=Message)


class ShardConnection:
    """A channel to one shard. Any thread may call."""

    def __init__(self, shard: int, address: str, secret: str, max_message_bytes: int) -> None:
        self.name = f"shard {shard} at {address}"
        self._metadata = channels.metadata(secret)
        self._channel = channels.open_channel(address, max_message_bytes=max_message_bytes)
        self._methods = {
            method.name: self._channel.unary_unary(
                channels.path_of(messages.SERVICE, method.name),
                request_serializer=messages.encoded,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            for method in messages.SERVICE.methods
        }

    def call(
        self, method: str, request: Message | MessageWithArrays[Message], reply: type[Reply], deadline: Deadline
    ) -> Reply:
        """The reply, of the type `reply`, to a message, plain or Loaded.

        Raises every error of pserver.errors.
        """

        def act(attempt: int) -> Reply:
            deadline.check(f"calling {self.name}")
            try:
                answer = self._methods[method](request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                raise error_of_call(error, self.name, attempt) from error
            assert isinstance(answer, reply), f"{method} answers {type(answer).__name__}"
            return answer

        return retry.call(act, BACKOFF, lambda error: isinstance(error, ShardUnavailable), deadline=deadline)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def error_of_call(error: grpc.RpcError, peer: str, attempts: int) -> MillraceError:
    """Our error for a failed call."""
    code, details = error.code(), str(error.details())
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ShardUnavailable(peer, attempts, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # A shard that could still answer names the ranks it waits for.
            return StepTimedOut(details if "waited" in details else f"{peer} did not answer in time")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return StaleGeneration(details)
        case grpc.StatusCode.ABORTED:
            return StoreFailed(f"{peer}: {details}")
        case grpc.StatusCode.DATA_LOSS:
            return StoreDamaged(f"{peer}: {details}")
        case grpc.StatusCode.OUT_OF_RANGE:
            return OutOfMemory(f"{peer}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageTooLarge(peer, details)
        case _:
            return InvalidShardCall(f"{peer} refused a call: {details} ({code.name})")
