"""Calls to one shard by gRPC, with a deadline, a bounded size, bounded retries, and our errors instead of gRPC's.

Every call of the protocol is idempotent, so a call that found no peer is retried within its deadline.
pserver.client.remote decides which calls are made, and to which shards.
"""

from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from millrace import retry
from millrace.deadline import Deadline
from millrace.retry import Backoff
from millrace.rpc import channels
from pserver.errors import ShardUnavailable
from pserver.protocol import messages, statuses

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
                request_serializer=channels.serialize,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            for method in messages.SERVICE.methods
        }

    def call(
        self, method: str, request: Message, reply: type[Reply], deadline: Deadline, backoff: Backoff | None = None
    ) -> Reply:
        """The reply, of the type `reply`, to a message. Raises every error of pserver.errors."""

        def act(attempt: int) -> Reply:
            deadline.check(f"calling {self.name}")
            try:
                answer = self._methods[method](request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                raise statuses.error_of_status(error.code(), str(error.details()), self.name, attempt) from error
            assert isinstance(answer, reply), f"{method} answers {type(answer).__name__}"
            return answer

        return retry.call(act, backoff or BACKOFF, lambda error: isinstance(error, ShardUnavailable), deadline=deadline)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
