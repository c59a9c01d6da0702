"""Calls to one shard by gRPC, with a deadline, a bounded size, bounded retries, and our errors instead of gRPC's.

Every call of the protocol is idempotent, so a call that found no peer is retried within its deadline.
pserver.client.remote decides which calls are made, and to which shards.
"""

from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace import retry
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole
from headrace.pserver.errors import InvalidShardCall, ShardUnavailable
from headrace.pserver.protocol import messages, statuses
from headrace.retry import Backoff
from headrace.rpc import channels, unix_sockets
from headrace.rpc.channels import RenewedChannel, TlsPeer

BACKOFF = Backoff((0.05, 0.1, 0.2, 0.4, 0.8))
"""Between tries of one call; after the sixth the shard counts as unavailable."""
_PATHS = {method.name: channels.path_of(messages.SERVICE, method.name) for method in messages.SERVICE.methods}
_REPLIES = {method.name: GetMessageClass(method.output_type).FromString for method in messages.SERVICE.methods}

Reply = TypeVar("Reply", bound=Message)


class ShardConnection:
    """A channel to one shard. Any thread may call."""

    def __init__(
        self, shard: int, address: str, secret: str, max_message_bytes: int, identity: Identity | None = None
    ) -> None:
        """`identity`: for an address off loopback. Raises Refused without one, Unavailable."""
        self.name = f"shard {shard} at {address}"
        self.is_here = address.startswith(unix_sockets.SCHEME)
        """Whether the shard is on this machine for sure."""
        self._metadata = channels.metadata(secret)
        self._tls = None if identity is None else TlsPeer(identity, identity.current.peer(PeerRole.SHARD, shard))
        self._channel = RenewedChannel(address, max_message_bytes=max_message_bytes, tls=self._tls)

    def call(
        self, method: str, request: Message, reply: type[Reply], deadline: Deadline, backoff: Backoff | None = None
    ) -> Reply:
        """The reply, of the type `reply`, to a message. Raises every error of pserver.errors."""

        def act(attempt: int) -> Reply:
            deadline.check(f"calling {self.name}")
            try:
                with self._channel.for_call() as channel:
                    found = channel.unary_unary(_PATHS[method], channels.serialize, _REPLIES[method])
                    answer = found(request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                raise self._translated(error, attempt) from error
            assert isinstance(answer, reply), f"{method} answers {type(answer).__name__}"
            return answer

        return retry.call(act, backoff or BACKOFF, lambda error: isinstance(error, ShardUnavailable), deadline=deadline)

    def _translated(self, error: grpc.RpcError, attempt: int) -> HeadraceError:
        code, details = error.code(), str(error.details())
        if self._tls is not None and code is grpc.StatusCode.UNAVAILABLE:
            if channels.is_distrust(details):
                return InvalidShardCall(channels.distrust(self.name, details, self._tls))
            details += channels.hint(details, self._tls)
        return statuses.error_of_status(code, details, self.name, attempt)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
