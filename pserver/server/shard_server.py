"""One shard behind gRPC: holds the pushes of ranks, waits for the consistency policy, and answers.

pserver.server.pass_state decides what a call means; pserver.server.shard changes rows. This module has the lock, the
waiting, the batches that ranks announced, and the translation of our errors into status codes.
"""

import json
import threading
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
from grpc import ServicerContext as Context

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, Unavailable
from millrace.failpoints import Failpoint, failpoint
from millrace.rpc import channels
from pserver.config import ShardProcess
from pserver.consistency.modes import policy_of
from pserver.errors import InvalidShardCall, OutOfMemory, StaleGeneration, StepTimedOut, StoreDamaged, StoreFailed
from pserver.proto import shard_pb2 as pb
from pserver.protocol import messages
from pserver.protocol.messages import MessageWithArrays
from pserver.protocol.placement import Placement
from pserver.protocol.table_operations import ShrinkRows
from pserver.server.pass_state import CallVerdict, PassState
from pserver.server.shard import Push, ResolvedBatch, Shard

MAX_BATCHES_AHEAD = 2048
"""Most batches that a rank may have announced and not used; one more is refused."""
ANSWER_S = 0.5
"""Part of a caller's deadline reserved to name the late ranks; at most a tenth of the time left."""


class _HasCaller(Protocol):
    """Every request of shard.proto."""

    @property
    def caller(self) -> pb.Caller: ...


Request = TypeVar("Request", bound=_HasCaller)
Reply = TypeVar("Reply")


def _status_of(error: MillraceError) -> grpc.StatusCode:
    match error:
        case StaleGeneration():
            return grpc.StatusCode.FAILED_PRECONDITION
        case StoreFailed():
            return grpc.StatusCode.ABORTED
        case StoreDamaged():
            return grpc.StatusCode.DATA_LOSS
        case OutOfMemory():
            return grpc.StatusCode.OUT_OF_RANGE
        case DeadlineExceeded():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INVALID_ARGUMENT


def _guarded(
    call: Callable[["_Servicer", Request, Context], Reply],
) -> Callable[["_Servicer", Request, Context], Reply]:
    """Decorator of a call: refuses callers of another generation, and turns our errors into status codes."""

    @wraps(call)
    def answer(self: "_Servicer", request: Request, context: Context) -> Reply:
        try:
            self.check_caller(request.caller)
            return call(self, request, context)
        except MillraceError as error:
            context.abort(_status_of(error), str(error))

    return answer


class _Servicer:
    """The calls of shard.proto, each on a thread of the server."""

    def __init__(self, config: ShardProcess) -> None:
        self._config = config
        self._shard = Shard(
            config.tables,
            config.seed,
            number=config.shard,
            placement=Placement.even(config.num_shards),
            live=config.live,
            groups=config.groups,
            generation=config.generation,
        )
        self._widths = {name: table.num_weights for name, table in self._shard.tables.items()}
        self._turn = threading.Condition()
        self._ledger = PassState(config.num_ranks, policy_of(config.mode))
        self._pushes: dict[tuple[int, int], Push | None] = {}  # by step and rank: accepted, and not applied yet
        self._close_digest, self._num_taken = "", 0
        self._stopping = False
        self._announcing = threading.Lock()
        self._batches: dict[int, dict[int, ResolvedBatch]] = {rank: {} for rank in range(config.num_ranks)}

    def check_caller(self, caller: pb.Caller) -> None:
        """Raise for a caller of another generation, or with a rank that the job does not have."""
        config = self._config
        if caller.generation != config.generation:
            raise StaleGeneration(
                f"shard {config.shard} is of generation {config.generation} of the job's workers, "
                f"the caller of {caller.generation}"
            )
        if caller.rank >= config.num_ranks:
            raise InvalidShardCall(f"rank {caller.rank} of a job with {config.num_ranks} trainers")

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
        if request.tables_json != messages.tables_json(config.tables):
            raise InvalidShardCall(f"shard {config.shard} has other tables or settings than the caller")
        return pb.HelloReply()

    @_guarded
    def OpenPass(self, request: pb.PassRequest, _context: Context) -> pb.Empty:
        with self._turn:
            if self._ledger.open_pass(request.pass_number) is CallVerdict.ACT:
                self._shard.open_pass()
        return pb.Empty()

    @_guarded
    def Announce(self, request: pb.AnnounceRequest, _context: Context) -> pb.Empty:
        batch = self._shard.resolve(messages.keys_from(request), learn=request.learn)
        with self._announcing:
            mine = self._batches[request.caller.rank]
            if request.batch in mine:  # repeated
                self._shard.release(batch)
            elif len(mine) >= MAX_BATCHES_AHEAD:
                raise InvalidShardCall(
                    f"rank {request.caller.rank} announced {len(mine)} batches and used none of them"
                )
            else:
                mine[request.batch] = batch
        return pb.Empty()

    def _batch(self, rank: int, number: int) -> ResolvedBatch:
        """The batch that a rank announced under this number."""
        with self._announcing:
            if number not in self._batches[rank]:
                raise InvalidShardCall(f"rank {rank} never announced batch {number} to shard {self._config.shard}")
            return self._batches[rank][number]

    def _release_before(self, rank: int, number: int) -> None:
        """Release the batches that a rank does not use any more."""
        with self._announcing:
            mine = self._batches[rank]
            # The rank may have stopped waiting for a push that is not applied yet: that batch is kept.
            pushes = [push for (_, other), push in list(self._pushes.items()) if other == rank and push is not None]
            for older in [other for other in mine if other < number]:
                if not any(mine[older] is push.batch for push in pushes):
                    self._shard.release(mine.pop(older))

    @_guarded
    def Pull(self, request: pb.PullRequest, _context: Context) -> MessageWithArrays[pb.RowsReply]:
        self._release_before(request.caller.rank, request.batch)
        return messages.with_rows(self._shard.rows(self._batch(request.caller.rank, request.batch)))

    @_guarded
    def Exchange(self, request: pb.ExchangeRequest, context: Context) -> pb.RowsReply | MessageWithArrays[pb.RowsReply]:
        rank = request.caller.rank
        push = None
        if request.HasField("batch"):
            batch = self._batch(rank, request.batch)
            self._release_before(rank, request.batch)
            if gradients := messages.gradients_from(request, self._widths):
                push = Push(batch, gradients, request.batch_samples)
                self._shard.check(push)
        self._take_push(request.pass_number, request.step, rank, push, _deadline_of(context))
        if not request.HasField("following"):
            return pb.RowsReply()
        # The policy changes no row of this rank's next step before its next push, so reading needs no lock.
        return messages.with_rows(self._shard.rows(self._batch(rank, request.following)))

    def _take_push(self, pass_number: int, step: int, rank: int, push: Push | None, deadline: Deadline) -> None:
        """Accept the push of a rank; return once the policy allows an answer."""
        with self._turn:
            same_step = (other for (at, _), other in self._pushes.items() if at == step)
            samples = {other.batch_samples for other in (push, *same_step) if other is not None}
            if len(samples) > 1:
                raise InvalidShardCall(f"ranks disagree on the samples of step {step}: {sorted(samples)}")
            verdict = self._ledger.push(pass_number, step, rank)
            if verdict is CallVerdict.REPEAT:
                return
            self._pushes[step, rank] = push
            if verdict is CallVerdict.ACT:
                self._apply_due(pass_number)
            else:
                failpoint(Failpoint.PARTLY_PUSHED)
            answerable = partial(self._ledger.may_answer, pass_number, step, rank)
            self._wait(answerable, f"step {step}", pass_number, deadline)

    def _apply_due(self, pass_number: int) -> None:
        """Apply the pushes that are due."""
        pushes = [self._pushes.pop(key, None) for key in self._ledger.steps.due()]
        self._shard.apply([push for push in pushes if push is not None], pass_number)
        if self._config.num_ranks == 1:
            failpoint(Failpoint.PARTLY_PUSHED)
        self._ledger.steps.applied()
        self._turn.notify_all()

    def _wait(self, done: Callable[[], bool], what: str, pass_number: int, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        over = self._turn.wait_for(lambda: done() or self._stopping, left_s - min(ANSWER_S, left_s / 10))
        if self._stopping and not done():
            raise Unavailable(f"shard {self._config.shard} is stopping")
        if not over:
            raise StepTimedOut(
                f"shard {self._config.shard} waited {left_s:.1f} s in {what} of pass {pass_number} "
                f"for {self._ledger.missing()}: is that trainer alive, or much slower than the others?"
            )

    @_guarded
    def ClosePass(self, request: pb.ClosePassRequest, context: Context) -> pb.ClosePassReply:
        pass_number = request.pass_number
        with self._turn:
            verdict = self._ledger.close_pass(pass_number, request.caller.rank, request.day)
            if verdict is CallVerdict.WAIT:
                deadline = _deadline_of(context)
                self._wait(lambda: self._ledger.has_closed(pass_number), "the close", pass_number, deadline)
            elif verdict is CallVerdict.ACT:
                self._close_digest = self._shard.close_pass(request.day, pass_number)
                self._ledger.closed()
                self._turn.notify_all()
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
    def Survey(self, request: pb.SurveyRequest, _context: Context) -> pb.JsonReply:
        _check_rank_0(request)
        (shrink,) = messages.operations_from(request.shrink_json)
        if not isinstance(shrink, ShrinkRows):
            raise InvalidShardCall(f"a survey of {shrink.op!r}; only a shrink can be surveyed")
        return pb.JsonReply(json=messages.survey_json(self._shard.survey(shrink)))

    @_guarded
    def Explain(self, request: pb.ExplainRequest, _context: Context) -> pb.JsonReply:
        _check_rank_0(request)
        found = self._shard.explain(request.table, request.key, request.group)
        return pb.JsonReply(json=json.dumps(found).encode())

    @_guarded
    def Feed(self, request: pb.FeedRequest, _context: Context) -> pb.FeedReply:
        _check_rank_0(request)
        with self._announcing:  # opening a port takes a moment, so not under the lock of steps
            return pb.FeedReply(address=self._shard.feed(request.secret))

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
        return messages.with_stats(self._shard.stats())

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

    def close(self) -> None:
        """Close the files; after the last call."""
        self._shard.close()


def _check_rank_0(request: _HasCaller) -> None:
    if request.caller.rank != 0:
        raise InvalidShardCall(f"rank {request.caller.rank} makes a call that only rank 0 may make")


def _deadline_of(context: Context) -> Deadline:
    left_s = context.time_remaining()
    if left_s is None:
        raise InvalidShardCall("a call without a deadline")
    return Deadline.after(left_s)


class ShardServer:
    """A shard that is served. Call `close`, or use it as a context."""

    def __init__(self, config: ShardProcess, socket: Path | None = None) -> None:
        """Bind the unix socket `socket`, or else a free port of loopback, and serve; see
        millrace.rpc.channels.local_server.

        The number of threads: each rank waits in at most one call, announces a few batches at a time and may repeat a
        call, while rank 0 has a snapshot written.
        """
        self._server, self.address = channels.local_server(
            config.secret, max_workers=2 * config.num_ranks + 6, max_message_bytes=config.max_message, socket=socket
        )
        self._servicer = _Servicer(config)
        channels.add_service(self._server, messages.SERVICE, self._servicer, messages.encoded)
        self._server.start()

    def close(self, grace_s: float = 1.0) -> None:
        """Stop serving and free the address. Calls in flight have `grace_s` to end."""
        self._servicer.stop()
        self._server.stop(grace_s).wait()
        self._servicer.close()

    def __enter__(self) -> "ShardServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
