"""One shard as a server: the calls of passes, operations and commits by gRPC, those of every step by the data plane.

pserver.server.pass_state decides what a call means; pserver.server.shard changes rows. This module has the lock and the
waits of closes; pserver.server.data_server has the calls of every step.
"""

import threading
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Protocol, TypeVar

from grpc import ServicerContext as Context

from headrace import codec
from headrace.address import LOOPBACK
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Unavailable
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerName, PeerRole, PeerRule
from headrace.interfaces import address_of
from headrace.pserver.config import ShardProcess
from headrace.pserver.consistency.modes import policy_of
from headrace.pserver.consistency.sync import names
from headrace.pserver.errors import InvalidShardCall, StepTimedOut
from headrace.pserver.feed import feed_server
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol import history_messages, join_messages, messages, statuses
from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shards import ShardFigures
from headrace.pserver.server.commands import command_from
from headrace.pserver.server.data_server import DataServer, waiting_s
from headrace.pserver.server.pass_state import CallVerdict, PassState
from headrace.pserver.server.rank_memories import RankMemories
from headrace.pserver.server.shard import Shard
from headrace.pserver.server.shard_host import ShardHost
from headrace.pserver.server.step_calls import StepCalls
from headrace.pserver.tables.pass_clock import ClockQuestion
from headrace.pserver.tables.rank_answers import Answer, RankAnswers, Sent
from headrace.rpc import refusals
from headrace.rpc.data_sockets import DataListener
from headrace.rpc.refusals import RefusalReason
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.shared_memory import MemoryOffer
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

    def __init__(self, config: ShardProcess, listener: DataListener, identity: Identity | None) -> None:
        self._config, self._identity = config, identity
        self._shard = Shard(
            config.tables,
            config.seed,
            number=config.shard,
            placement=Placement.even(config.num_shards),
            live=config.live,
            groups=config.groups,
            generation=config.generation,
            parts=config.parts,
            histories=config.histories,
            joins=config.joins,
        )
        self._ledger = PassState(config.num_ranks, policy_of(config.mode, merge=config.merge))
        feed_at = partial(feed_server.endpoint_of, config.interface, identity)
        self._host = ShardHost(self._shard, self._ledger, feed_at, config.shard)
        self._turn = self._host.turn
        self.steps = StepCalls(config, self._shard, self._ledger, self._turn)
        """The calls that do not come by gRPC."""
        self.memories = RankMemories(config.num_ranks)
        self._listener = listener
        self._close_digest, self._num_taken = "", 0
        self._stopping = False
        self.closed: Callable[[], None] = lambda: None
        """Called when a pass has closed, which may allow answers to pushes."""
        self.figures: Callable[[], ShardFigures] = ShardFigures
        """Returns traffic and waits."""
        self.peer_of: Callable[[Context], PeerName | None] = lambda context: None
        """The name that a caller's certificate proves."""
        self._opening = threading.Lock()

    def stop(self) -> None:
        """End all waiting calls, since a process ends only after its last call."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()

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
    def OpenPass(self, request: pb.PassRequest, _context: Context) -> pb.Empty:
        with self._turn:
            if self._ledger.open_pass(request.pass_number) is CallVerdict.ACT:
                self._shard.open_pass()
        return pb.Empty()

    def _wait(
        self, done: Callable[[], bool], what: str, pass_number: int, deadline: Deadline, missing: Callable[[], str]
    ) -> None:
        left_s = deadline.left_s()
        over = self._turn.wait_for(lambda: done() or self._stopping, waiting_s(left_s))
        if self._stopping and not done():
            raise Unavailable(f"shard {self._config.shard} is stopping")
        if not over:
            raise StepTimedOut(
                f"shard {self._config.shard} waited {left_s:.1f} s in {what} of pass {pass_number} "
                f"for {missing()}: is that trainer alive, or much slower than the others?"
            )

    @_guarded
    def Recall(self, request: pb.RecallRequest, context: Context) -> pb.RecallReply:
        questions = history_messages.questions_from(request)
        answers = self._answered(self._shard.histories, questions, request, "the histories", context)
        return history_messages.reply_of(answers, self._config.max_message)

    @_guarded
    def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        joins, rank = self._shard.joins, request.caller.rank
        if request.answer:
            with self._turn:
                self._ledger.check_open(request.pass_number, rank)
                answers = joins.answers(rank)
            if answers is None:
                raise InvalidShardCall(f"part {request.answer} of an answer that rank {rank} did not get yet")
            return join_messages.reply_of(answers, self._config.max_message, request.answer)
        part = join_messages.events_from(request)
        with self._turn:
            self._ledger.check_open(request.pass_number, rank)
            events = joins.received(rank, part, request.part, request.num_parts)
        if events is None:
            return pb.JoinReply()
        answers = self._answered(joins, events, request, "the join", context)
        return join_messages.reply_of(answers, self._config.max_message)

    @_guarded
    def JoinClock(self, request: pb.JoinClockRequest, context: Context) -> pb.JoinClockReply:
        if not request.max_ahead_s > 0:
            raise InvalidShardCall("event times of a join without a bound that is above 0")
        question = ClockQuestion(request.max_ahead_s, join_messages.spans_from(request))
        bound_s = self._answered(self._shard.clock, question, request, "the clock of the join", context)
        return pb.JoinClockReply(bound_s=bound_s)

    def _answered(
        self,
        asked: RankAnswers[Sent, Answer],
        sent: Sent,
        request: pb.RecallRequest | pb.JoinRequest | pb.JoinClockRequest,
        what: str,
        context: Context,
    ) -> Answer:
        """The answer to a rank, once all ranks have asked."""
        number, rank, ranks = request.pass_number, request.caller.rank, self._config.num_ranks

        def is_answered() -> bool:
            self._ledger.check_open(number, rank)
            return asked.answers(rank) is not None

        with self._turn:
            self._ledger.check_open(number, rank)
            if asked.ask(rank, sent, ranks):
                self._turn.notify_all()
            missing = lambda: f"rank {names(asked.missing(ranks))}"  # noqa: E731
            self._wait(is_answered, what, number, _deadline_of(context), missing)
            answers = asked.answers(rank)
        assert answers is not None, "it was waited for"
        return answers

    @_guarded
    def ClosePass(self, request: pb.ClosePassRequest, context: Context) -> pb.ClosePassReply:
        pass_number = request.pass_number
        with self._turn:
            verdict = self._ledger.close_pass(pass_number, request.caller.rank, request.day)
            if verdict is CallVerdict.WAIT:
                deadline = _deadline_of(context)
                closed = lambda: self._ledger.has_closed(pass_number)  # noqa: E731
                self._wait(closed, "the close", pass_number, deadline, self._ledger.missing)
            elif verdict is CallVerdict.ACT:
                self._close_digest = self._shard.close_pass(request.day, pass_number)
                self._ledger.closed()
                self._turn.notify_all()
                self.closed()
            return pb.ClosePassReply(digest=self._close_digest)

    @_guarded
    def Operate(self, request: pb.OperateRequest, _context: Context) -> pb.Empty:
        _check_rank_0(request)
        with self._turn:
            if self._ledger.operate(request.version) is CallVerdict.ACT:
                self._shard.operate(messages.operations_from(request.operations_json), request.version)
                self._ledger.has_operated(request.version)
        return pb.Empty()

    @_guarded
    def Call(self, request: pb.CommandRequest, context: Context) -> pb.CommandReply:
        command = command_from(request.name, request.fields)
        reply = self._host.run(command, request.caller.rank, _deadline_of(context))
        return pb.CommandReply(value=codec.packed(reply))

    @_guarded
    def Feed(self, request: pb.FeedRequest, _context: Context) -> pb.FeedReply:
        _check_rank_0(request)
        with self._opening:  # opening a port takes a moment, so not under the lock of steps
            tls = feed_server.endpoint_of(self._config.interface, self._identity)
            return pb.FeedReply(address=self._shard.feed(request.secret, tls))

    @_guarded
    def Publish(self, request: pb.PublishRequest, _context: Context) -> pb.Empty:
        _check_rank_0(request)
        with self._turn:
            self._ledger.publish(request.version)
            self._shard.publish(request.version)
        return pb.Empty()

    @_guarded
    def Digest(self, _request: pb.CallerRequest, _context: Context) -> pb.DigestReply:
        with self._turn:
            tables = {name: value.to_bytes(16, "big") for name, value in self._shard.digest().items()}
        return pb.DigestReply(tables=tables)

    @_guarded
    def Stats(self, _request: pb.CallerRequest, _context: Context) -> pb.StatsReply:
        return messages.with_stats(self._shard.stats(), refusals.PROCESS.counts(), self.figures())

    @_guarded
    def Snapshot(self, request: pb.SnapshotRequest, _context: Context) -> pb.SnapshotReply:
        _check_rank_0(request)
        with self._turn:
            if self._ledger.snapshot(request.version) is CallVerdict.ACT:
                since = request.changes_since if request.HasField("changes_since") else None
                self._num_taken = self._shard.stores.snapshot(request.version, since)
                self._ledger.taken(request.version)
            return pb.SnapshotReply(num_rows=self._num_taken)

    @_guarded
    def WriteSnapshot(self, request: pb.WriteRequest, context: Context) -> pb.WriteReply:
        _check_rank_0(request)
        part = self._shard.stores.write(Path(request.folder), _deadline_of(context))
        return pb.WriteReply(part_json=messages.parts_json([part]))

    @_guarded
    def HandOver(self, request: pb.WriteRequest, context: Context) -> pb.WriteReply:
        _check_rank_0(request)
        part = self._shard.stores.hand_over(Path(request.folder), _deadline_of(context))
        return pb.WriteReply(part_json=messages.parts_json([part]))

    @_guarded
    def Settle(self, request: pb.SettleRequest, context: Context) -> pb.Empty:
        _check_rank_0(request)
        self._shard.stores.settle(request.committed, _deadline_of(context))
        with self._turn:
            self._ledger.settled()
        return pb.Empty()

    @_guarded
    def Restore(self, request: pb.RestoreRequest, _context: Context) -> pb.Empty:
        _check_rank_0(request)
        with self._turn:
            if self._ledger.restore(request.version) is CallVerdict.ACT:
                self._shard.restore(Path(request.folder), messages.parts_from(request.parts_json), request.version)
                self._ledger.has_restored(request.version)
        return pb.Empty()

    @_guarded
    def Advance(self, request: pb.RestoreRequest, _context: Context) -> pb.Empty:
        _check_rank_0(request)
        with self._turn:
            if self._ledger.advance(request.version) is CallVerdict.ACT:
                self._shard.advance(Path(request.folder), messages.parts_from(request.parts_json), request.version)
                self._ledger.has_restored(request.version)
        return pb.Empty()

    def close(self) -> None:
        """Close the files, and let go of memories; after the last call."""
        self.memories.forget()
        self._shard.close()


def _check_rank_0(request: _HasCaller) -> None:
    if request.caller.rank != 0:
        raise InvalidShardCall(f"rank {request.caller.rank} makes a call that only rank 0 may make")


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
    ) -> None:
        """Bind the unix socket `socket`, or else a free port of loopback, and serve; see RpcServer.

        `failed` is called if it can serve no more; then `check` raises the reason. `identity`: of this process, where
        its credentials are renewed.

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
        self._servicer = _Servicer(config, listener, identity)
        self._data = DataServer(self._servicer.steps, listener, self._servicer.memories, failed)
        self._servicer.closed, self._servicer.figures = self._data.wake, self._data.figures
        self._servicer.peer_of = self._server.peer_of
        self._server.add_service(messages.SERVICE, self._servicer)
        self._server.start()

    def check(self) -> None:
        """Raise the error that keeps this shard from serving, if there is one."""
        self._data.check()

    def close(self, grace_s: float = 1.0) -> None:
        """Stop serving and free the address. Calls in flight have `grace_s` to end."""
        self._servicer.stop()
        self._data.close()
        self._server.close(grace_s)
        self._servicer.close()

    def __enter__(self) -> "ShardServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
