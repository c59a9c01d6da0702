"""One shard as a server: commands by gRPC, the calls of every step by the data plane.

pserver.server.shard_host runs commands, pserver.server.data_server has the calls of every step.
"""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Protocol, TypeVar

from grpc import ServicerContext as Context

from headrace import codec
from headrace.address import LOOPBACK, address_of
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerName, PeerRole, PeerRule
from headrace.pserver.config import ShardProcess
from headrace.pserver.consistency.policy import policy_of
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed import feed_server
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol import messages, statuses
from headrace.pserver.server.commands import command_from
from headrace.pserver.server.data_server import DataServer
from headrace.pserver.server.pass_state import PassState
from headrace.pserver.server.rank_memories import RankMemories
from headrace.pserver.server.shard import Shard
from headrace.pserver.server.shard_host import ShardHost
from headrace.pserver.server.step_calls import StepCalls
from headrace.pserver.server.step_floats import PlacedShard
from headrace.rpc import refusals
from headrace.rpc.data_sockets import DataListener, MemoryOffer
from headrace.rpc.refusals import RefusalReason
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint


class _HasCaller(Protocol):
    """Every request of shard.proto."""

    @property
    def caller(self) -> pb.Caller: ...


Request = TypeVar("Request", bound=_HasCaller)
Reply = TypeVar("Reply")


def _guarded(
    call: Callable[["_Servicer", Request, Context], Reply],
) -> Callable[["_Servicer", Request, Context], Reply]:
    """Decorator of a call: refuses callers of another generation, and turns our errors into status codes."""

    @wraps(call)
    def answer(self: "_Servicer", request: Request, context: Context) -> Reply:
        try:
            self.steps.check_caller(request.caller.generation, request.caller.rank)
            _check_rank(self.peer_of(context), request.caller.rank)
            return call(self, request, context)
        except HeadraceError as error:
            context.abort(statuses.status_of(error), str(error))

    return answer


class _Servicer:
    """The calls of shard.proto, each on a thread of the server."""

    def __init__(
        self, config: ShardProcess, listener: DataListener, identity: Identity | None, placed: PlacedShard | None
    ) -> None:
        self._config, self._identity = config, identity
        self._shard = Shard(config) if placed is None else Shard(config, placed=placed.makers)
        state = PassState(config.num_ranks, policy_of(config.mode, merge=config.merge, max_ahead=config.max_ahead))
        feed_at = partial(feed_server.endpoint_of, config.interface, identity)
        self.host = ShardHost(self._shard, state, feed_at, config.shard, config.max_message)
        floats = None if placed is None else placed.floats
        self.steps = StepCalls(config, self._shard, state, self.host.turn, floats)
        """The calls that do not come by gRPC."""
        self.memories = RankMemories(config.num_ranks)
        self._listener = listener
        self.peer_of: Callable[[Context], PeerName | None] = lambda context: None
        """The name that a caller's certificate proves."""

    @_guarded
    def Hello(self, request: pb.HelloRequest, _context: Context) -> pb.HelloReply:
        config = self._config
        if request.format != messages.FORMAT:
            raise InvalidShardCall(
                f"the caller speaks format {request.format}, shard {config.shard} format {messages.FORMAT}"
            )
        theirs = request.shard, request.num_shards, request.num_ranks
        ours = config.shard, config.num_shards, config.num_ranks
        if theirs != ours:
            raise InvalidShardCall(f"(shard, shards, trainers) are {ours} here, the caller expects {theirs}")
        if request.tables_json != messages.tables_json(config.tables, config.wire):
            raise InvalidShardCall(f"shard {config.shard} has other tables or settings than the caller")
        try:
            self._listener.allow(request.data_key)
        except ValueError as error:
            raise InvalidShardCall(str(error)) from error
        at = self._listener.address
        return pb.HelloReply(
            data_address=at.address,
            data_ticket=at.ticket,
            data_key=at.key,
            max_message_bytes=config.max_message,
            opened_memory=self._opened_memory(request),
        )

    def _opened_memory(self, request: pb.HelloRequest) -> bool:
        """Open the caller's memory, if it offers one and messages come at a unix socket."""
        offered = request.memory
        if not request.HasField("memory") or self._listener.address.key:
            return False
        return self.memories.open(request.caller.rank, MemoryOffer(offered.process, offered.descriptor, offered.number))

    @_guarded
    def Call(self, request: pb.CommandRequest, context: Context) -> pb.CommandReply:
        command = command_from(request.name, request.fields)
        reply = self.host.run(command, request.caller.rank, _deadline_of(context))
        return pb.CommandReply(value=codec.packed(reply))

    def close(self) -> None:
        """Close the files, and let go of memories; after the last call."""
        self.memories.forget()
        self._shard.close()


def _check_rank(peer: PeerName | None, rank: int) -> None:
    """Raise InvalidShardCall where a trainer claims to be another one."""
    if peer is not None and peer.number != rank:
        why = f"it claims to be rank {rank}"
        refusals.PROCESS.note(RefusalReason.OTHER_PEER, str(peer), why)
        raise InvalidShardCall(f"the caller is {peer} by its certificate, and {why}")


def _deadline_of(context: Context) -> Deadline:
    left_s = context.time_remaining()
    if left_s is None:
        raise InvalidShardCall("a call without a deadline")
    return Deadline.after(left_s)


def _endpoint(config: ShardProcess, identity: Identity | None) -> TlsEndpoint | None:
    """Where a shard with an identity listens, and for whom: the trainers of its generation."""
    if identity is None:
        return None
    mine, ranks = identity.current.name, range(config.num_ranks)
    accepts = PeerRule(mine.job, mine.generation, {PeerRole.TRAINER: ranks, PeerRole.PREDICTOR: ranks})
    return TlsEndpoint(address_of(config.interface), identity, accepts)


class ShardServer:
    """A shard that is served. Call `close`, or use it as a context."""

    def __init__(
        self,
        config: ShardProcess,
        socket: Path | None = None,
        failed: Callable[[], None] = lambda: None,
        identity: Identity | None = None,
        placed: PlacedShard | None = None,
    ) -> None:
        """Bind the unix socket `socket`, or else a free port of loopback, and serve; see RpcServer.

        `failed` is called if it can serve no more; then `check` raises the reason. `identity`: of this process, where
        its credentials are renewed. `placed`: of a shard in a trainer's process whose rows learn on its device.

        With credentials in `config`, its interface is bound instead. The number of threads: each rank waits in at most
        one call of its loop and one for histories, announces a few batches at a time and may repeat a call, while rank
        0 has a snapshot written.
        """
        identity = identity or config.credentials
        tls = _endpoint(config, identity)
        self._server = RpcServer(
            config.secret,
            max_workers=2 * config.num_ranks + 6,
            max_message_bytes=config.max_message,
            socket=socket,
            tls=tls,
        )
        self.address = self._server.address
        data_socket = None if socket is None or tls is not None else socket.with_suffix(".data") / "socket"
        listener = DataListener(
            data_socket, config.max_message, LOOPBACK if tls is None else tls.host, silent_s=config.node_timeout
        )
        self._servicer = _Servicer(config, listener, identity, placed)
        self._data = DataServer(self._servicer.steps, listener, self._servicer.memories, failed)
        self._servicer.host.closed, self._servicer.host.figures = self._data.wake, self._data.figures
        self._servicer.peer_of = self._server.peer_of
        self._server.add_service(messages.SERVICE, self._servicer)
        self._server.start()

    def check(self) -> None:
        """Raise the error that keeps this shard from serving, if there is one."""
        self._data.check()

    def close(self, grace_s: float = 1.0) -> None:
        """Stop serving and free the address. Calls in flight have `grace_s` to end."""
        self._servicer.host.stop()
        self._data.close()
        self._server.close(grace_s)
        self._servicer.close()

    def __enter__(self) -> "ShardServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
