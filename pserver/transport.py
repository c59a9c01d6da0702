"""Calls to one shard: deadline, bounded size, bounded repeats, and our errors instead of gRPC's.

Every call of the protocol may be repeated, so one that found no peer is, within its deadline. What is called when,
and on which shards, is pserver.remote's work.
"""

import time
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from millrace import rpc
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from pserver import wire
from pserver.errors import (
    BadRequest,
    MessageTooLarge,
    OutOfMemory,
    ShardUnavailable,
    StaleGeneration,
    StepTimedOut,
    StoreDamaged,
    StoreFailed,
)

MAX_ATTEMPTS = 6
"""Tries of one call; then the shard counts as unavailable."""
BACKOFF_S = 0.05
"""Pause after the first failure; doubles at each further one."""


class Connection:
    """A channel to one shard. Any thread may call."""

    def __init__(self, shard: int, address: str, secret: str, max_message_bytes: int) -> None:
        self.name = f"shard {shard} at {address}"
        self._metadata = rpc.metadata(secret)
        self._channel = rpc.open_channel(address, max_message_bytes=max_message_bytes)
        self._methods = {
            name: self._channel.unary_unary(
                wire.path_of(name),
                request_serializer=wire.encoded,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            for name, method in wire.METHODS.items()
        }

    def call(self, method: str, request: Any, deadline: Deadline) -> Any:
        """The reply to a message, plain or Loaded.

        Raises every error of pserver.errors.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            deadline.check(f"calling {self.name}")
            try:
                return self._methods[method](request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                ours = translated(error, self.name, attempt)
                pause_s = BACKOFF_S * 2 ** (attempt - 1)
                last = attempt == MAX_ATTEMPTS or deadline.left_s() <= pause_s
                if last or not isinstance(ours, ShardUnavailable):
                    raise ours from error
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()


def translated(error: grpc.RpcError, peer: str, attempts: int) -> MillraceError:
    """The error of ours that a failed call stands for."""
    code, details = error.code(), str(error.details())
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ShardUnavailable(peer, attempts, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # A shard that could still answer says whom it waits for.
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
            return BadRequest(f"{peer} refused a call: {details} ({code.name})")
