"""Calls to shards by gRPC: greetings and commands, to one shard or to all at the same time.

Each has a deadline, a bounded size, bounded retries, and our errors instead of gRPC's. Every call of the protocol is
idempotent, so a call that found no peer is retried within its deadline. The calls of every step go over the data plane
(pserver.client.data_plane).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace import codec, retry
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole
from headrace.pserver.client.data_plane import Greeting
from headrace.pserver.config import TableSection, Wire
from headrace.pserver.errors import InvalidShardCall, ShardUnavailable
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol import join_messages, messages, statuses
from headrace.pserver.protocol.frames import DataCall, DataRequest
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents
from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shard_command import CallerThread, ShardCommand, reply_from
from headrace.pserver.server.commands import ReadJoinAnswers, SendJoinEvents
from headrace.retry import Backoff
from headrace.rpc import channels, unix_sockets
from headrace.rpc.channels import RenewedChannel, TlsPeer
from headrace.rpc.data_sockets import SILENT_S, DataAddress, KeyPair, MemoryOffer

BACKOFF = Backoff((0.05, 0.1, 0.2, 0.4, 0.8))
"""Between tries of one call; after the sixth the shard counts as unavailable."""
NO_RETRY = Backoff(())
GREETING_S = 1.0
"""Longest time for a shard of this machine to tell again where its data plane is."""
MAX_MESSAGE_BYTES = 256 << 20
"""Largest message. A step that needs more is refused with a hint at train.batch_size."""
POOLS = {CallerThread.LOOP: "calls", CallerThread.COMMIT: "commit", CallerThread.READER: "recall"}
"""The threads that call shards at the same time, for each thread that sends commands."""
_PATHS = {method.name: channels.path_of(messages.SERVICE, method.name) for method in messages.SERVICE.methods}
_REPLIES = {method.name: GetMessageClass(method.output_type).FromString for method in messages.SERVICE.methods}

Reply = TypeVar("Reply", bound=Message)
Answer = TypeVar("Answer")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCaller:
    """A rank as the shards know it, and how it reaches them."""

    rank: int
    world: int
    generation: int
    secret: str = field(repr=False)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    identity: Identity | None = None
    """For addresses off loopback."""
    wire: Wire = Wire.FLOAT32
    """As the shards have it."""
    silent_s: float = SILENT_S
    """A shard on another machine that is silent for longer counts as unavailable."""
    greeting_s: float = GREETING_S
    """The same on this machine, while it tells where its data plane is."""

    def request(self, call: DataCall, pass_number: int, **more: Any) -> DataRequest:
        """A call of this rank; the data plane gives it its number and the time left."""
        return DataRequest(call, self.generation, self.rank, 0, 0.0, pass_number=pass_number, **more)


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


class ShardCalls:
    """The calls of one rank to all shards. Threads are as those of RemoteShards."""

    def __init__(self, addresses: Sequence[str], tables: Mapping[str, TableSection], me: ShardCaller) -> None:
        self._me, self._caller = me, pb.Caller(generation=me.generation, rank=me.rank)
        self._tables_json = messages.tables_json(tables, me.wire)
        self._connections = [
            ShardConnection(shard, address, me.secret, me.max_message_bytes, me.identity)
            for shard, address in enumerate(addresses)
        ]
        self.names = [connection.name for connection in self._connections]
        """For messages."""
        self.keys = KeyPair.make()
        """Of this rank's data plane."""
        self.unanswered: set[int] = set()
        """The shards that have not answered the calls of the loop's thread."""
        self._pools = {
            thread: ThreadPoolExecutor(max(len(addresses) - 1, 1), thread_name_prefix=name)
            for thread, name in POOLS.items()
        }
        self._replied: dict[ShardCommand[Any, Any], list[Any]] = {}
        """The replies so far to a command on which some shards still work."""

    def begin(self, deadline: Deadline) -> None:
        """Greet every shard. Raises InvalidShardCall for one of another job."""
        self.each(lambda shard: self._hello(shard, deadline, None))

    def greet(self, shard: int, deadline: Deadline, memory: MemoryOffer | None) -> Greeting:
        """Begin a connection of the data plane."""
        longest_s = self._me.greeting_s if self._connections[shard].is_here else self._me.silent_s
        reply = self._hello(shard, deadline.at_most(longest_s), NO_RETRY, memory)
        at = DataAddress(reply.data_address, reply.data_ticket, reply.data_key)
        return Greeting(at, reply.max_message_bytes, reply.opened_memory)

    def _hello(
        self, shard: int, deadline: Deadline, backoff: Backoff | None, memory: MemoryOffer | None = None
    ) -> pb.HelloReply:
        request = pb.HelloRequest(
            caller=self._caller,
            format=messages.FORMAT,
            shard=shard,
            num_shards=len(self._connections),
            num_ranks=self._me.world,
            tables_json=self._tables_json,
            data_key=self.keys.public,
        )
        if memory is not None and self._connections[shard].is_here:
            offered = pb.Memory(process=memory.process, descriptor=memory.descriptor, number=memory.number)
            request.memory.CopyFrom(offered)
        return self._connections[shard].call("Hello", request, pb.HelloReply, deadline, backoff)

    def each(self, act: Callable[[int], Answer], thread: CallerThread = CallerThread.LOOP) -> list[Answer]:
        """Call `act` with the number of each shard, all at the same time. The last call runs on this thread.

        Returns or raises only when all calls have ended.
        """
        last = len(self._connections) - 1
        unanswered = self.unanswered if thread is CallerThread.LOOP else set[int]()
        unanswered.update(range(last + 1))

        def answered(shard: int) -> Answer:
            try:
                return act(shard)
            finally:
                unanswered.discard(shard)

        others = [self._pools[thread].submit(answered, shard) for shard in range(last)]
        try:
            result = answered(last)
        finally:
            wait(others)
        return [*(other.result() for other in others), result]

    def call(self, command: ShardCommand[Any, Result], placement: Placement, deadline: Deadline) -> Result:
        """Send a command to all shards, or to the one that has its key; the whole answer."""
        request = self._request_of(command)
        ask: Callable[[int], Any] = lambda shard: self._reply(shard, command, request, deadline)  # noqa: E731
        if (key := command.key()) is not None:
            return command.combine([ask(int(placement.shard_of(np.array([key], np.uint64))[0]))])
        thread = command.gate.thread
        return command.combine(self._one_by_one(command, ask) if thread is CallerThread.ANY else self.each(ask, thread))

    def send(self, shard: int, command: ShardCommand[Answer, Any], deadline: Deadline) -> Answer:
        """Send a command to one shard; its reply."""
        return self._reply(shard, command, self._request_of(command), deadline)

    def join(self, shard: int, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        """Send a rank's events of one shard, and read the answer, in as many messages as their largest size allows."""
        cut = join_messages.cut(events, self._me.max_message_bytes)
        sent = [self.send(shard, SendJoinEvents(part, number, len(cut)), deadline) for number, part in enumerate(cut)]
        parts = [each for each in sent if each is not None][-1:]
        for number in range(1, parts[0].num_parts):
            parts.append(self.send(shard, ReadJoinAnswers(events.pass_number, number), deadline))
        return join_messages.whole_of(parts)

    def _request_of(self, command: ShardCommand[Any, Any]) -> pb.CommandRequest:
        return pb.CommandRequest(caller=self._caller, name=type(command).__name__, fields=codec.packed(command))

    def _reply(
        self, shard: int, command: ShardCommand[Answer, Any], request: pb.CommandRequest, deadline: Deadline
    ) -> Answer:
        return reply_from(command, self._connections[shard].call("Call", request, pb.CommandReply, deadline).value)

    def _one_by_one(self, command: ShardCommand[Any, Any], ask: Callable[[int], Any]) -> list[Any]:
        """The replies of all shards, None of those that still work; the others are kept until the next call."""
        replies = self._replied.pop(command, None) or [None] * len(self._connections)
        replies = [ask(shard) if reply is None else reply for shard, reply in enumerate(replies)]
        if None in replies:
            self._replied[command] = replies
        return replies

    def stop(self) -> None:
        """Begin no further call."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
