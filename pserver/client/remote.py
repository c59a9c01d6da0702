"""The client of shards that are processes of their own: implements pserver.protocol.shards.Shards.

Keys are split by shard, all shards are called at the same time, and their rows are put together. The keys of a batch
are announced when it is prepared, so that shards find row numbers while the trainer computes. An exchange then names
its batches by number only. These calls go over the data plane, all others by gRPC.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import codec
from headrace.deadline import Deadline
from headrace.identity.credentials import Identity
from headrace.pserver.client.connection import ShardConnection
from headrace.pserver.client.data_plane import Call, DataPlane, Greeting
from headrace.pserver.config import DENSE_SLICES, TableSection, Wire
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol import frames, history_messages, join_messages, messages
from headrace.pserver.protocol.frames import DataCall, DataRequest, TableNumbers
from headrace.pserver.protocol.histories import Answers, Questions
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents
from headrace.pserver.protocol.parts import WHOLE, Part, Split
from headrace.pserver.protocol.placement import Placement, RoutedKeys, put_rows, take_push
from headrace.pserver.protocol.shard_command import CallerThread, ShardCommand, reply_from
from headrace.pserver.protocol.shards import (
    F32,
    Gradients,
    Keys,
    Prepared,
    StepScale,
)
from headrace.pserver.protocol.wire import wires_of
from headrace.pserver.rows.arrays import Empty, empty_floats, frozen
from headrace.pserver.server.commands import ClosePass, OpenPass, ReadJoinAnswers, Recall, SendJoinEvents
from headrace.retry import Backoff
from headrace.rpc.data_sockets import SILENT_S, DataAddress, KeyPair, MemoryOffer
from headrace.timeline import Span, recorded, span
from headrace.traffic import Links, links_of

Result = TypeVar("Result")
Reply = TypeVar("Reply")

ANNOUNCE_S = 120.0
"""Longest time for a shard to find the rows of a batch; it does not wait for ranks."""
MAX_ANNOUNCING = 32
"""Most announcements to all shards without a reply; `prepare` waits until there are fewer."""
MAX_OPEN_PARTS = 32
"""Most parts of an exchange on their way to all shards; the next one leaves when there are fewer."""
MAX_SLICES = 1 << 40
"""More slices than there are."""
NO_RETRY = Backoff(())
POOLS = {CallerThread.LOOP: "calls", CallerThread.COMMIT: "commit", CallerThread.READER: "recall"}
"""The threads that call shards at the same time, for each thread that sends commands."""
GREETING_S = 1.0
"""Longest time for a shard of this machine to tell again where its data plane is."""
FIRST_BATCH = 1 << 32
"""Numbers of batches begin here. `look` uses lower ones, since a pull makes a shard forget all lower numbers."""
MAX_MESSAGE_BYTES = 256 << 20
"""Largest message. A step that needs more is refused with a hint at train.batch_size."""


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """A batch whose keys are announced to the shards."""

    number: int
    learn: bool
    routed: Mapping[str, Sequence[RoutedKeys]]
    """By table: the keys of each shard."""
    num_keys: Mapping[str, int]
    calls: Sequence[Call]
    """The announcement to each shard, which must end before the batch is used."""


@dataclass(slots=True)
class _LateSlices:
    """The dense slices of the last exchange that are still on their way."""

    calls: Sequence[Call]
    batch: AnnouncedBatch
    rows: Mapping[str, F32]

    def first_of(self, call: Call) -> int:
        """The first slice that a call brings."""
        return int(self.batch.routed[DENSE_SLICES][call.shard].position_P[call.request.part.begin])


class RemoteShards:
    """Implements pserver.protocol.shards.Shards with processes.

    One thread calls `prepare`, one `recall` and `join`, one writes and settles snapshots, one makes the other calls.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Mapping[str, TableSection],
        *,
        rank: int,
        world: int,
        generation: int,
        secret: str,
        deadline: Deadline,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        identity: Identity | None = None,
        wire: Wire = Wire.FLOAT32,
        silent_s: float = SILENT_S,
    ) -> None:
        """Connect to every shard, in the order of their numbers, and check that it belongs to this job.

        `identity`: for addresses off loopback. `wire`: as the shards have it. A shard on another machine that is silent
        for `silent_s` counts as unavailable.
        """
        self._caller, self._max_message_bytes = pb.Caller(generation=generation, rank=rank), max_message_bytes
        self._silent_s = silent_s
        self._sections, self._wire, self._wires = tables, wire, wires_of(tables, wire)
        self._widths = {name: int(section.first_order) + section.dim for name, section in tables.items()}
        self._placement = Placement.even(len(addresses))
        self._connections = [
            ShardConnection(shard, address, secret, max_message_bytes, identity)
            for shard, address in enumerate(addresses)
        ]
        self._pools = {
            thread: ThreadPoolExecutor(max(len(addresses) - 1, 1), thread_name_prefix=name)
            for thread, name in POOLS.items()
        }
        self._late: _LateSlices | None = None
        self._early_calls: Sequence[Call] = ()
        """Those of the step in progress."""
        self._messages: Sequence[tuple[int, Part]] = [(shard, WHOLE) for shard in range(len(addresses))]
        """(shard, part) of each message of an exchange, in the order in which they leave."""
        self._slices_later = False
        """Whether `exchange` returns before all slices are here."""
        self._num_announced = 0
        self._num_looks = 0
        self._pass_number = 0
        self._replied: dict[ShardCommand[Any, Any], list[Any]] = {}
        """The replies so far to a command on which some shards still work."""
        self._unanswered: set[int] = set()
        self._waiting: Sequence[Call] = ()
        self._world, self._keys, self._context = world, KeyPair.make(), zmq.Context()
        names = [connection.name for connection in self._connections]
        tables_of = TableNumbers(self._widths)
        # Steps have sockets of their own, so they never wait behind announcements.
        self._announcements, self._steps = (
            DataPlane(
                self._context,
                names,
                self._greet,
                tables_of,
                self._keys,
                max_message_bytes,
                shares_memory=shares_memory,
                silent_s=silent_s,
            )
            for shares_memory in (False, True)
        )
        try:
            self._each(lambda shard: self._hello(shard, deadline, None))
        except BaseException:
            self.close()
            raise

    def _hello(
        self, shard: int, deadline: Deadline, backoff: Backoff | None, memory: MemoryOffer | None = None
    ) -> pb.HelloReply:
        request = pb.HelloRequest(
            caller=self._caller,
            format=messages.FORMAT,
            shard=shard,
            num_shards=len(self._connections),
            num_ranks=self._world,
            tables_json=messages.tables_json(self._sections, self._wire),
            data_key=self._keys.public,
        )
        if memory is not None and self._connections[shard].is_here:
            offered = pb.Memory(process=memory.process, descriptor=memory.descriptor, number=memory.number)
            request.memory.CopyFrom(offered)
        return self._connections[shard].call("Hello", request, pb.HelloReply, deadline, backoff)

    def _greet(self, shard: int, deadline: Deadline, memory: MemoryOffer | None) -> Greeting:
        longest_s = GREETING_S if self._connections[shard].is_here else self._silent_s
        reply = self._hello(shard, deadline.at_most(longest_s), NO_RETRY, memory)
        at = DataAddress(reply.data_address, reply.data_ticket, reply.data_key)
        return Greeting(at, reply.max_message_bytes, reply.opened_memory)

    def _each(self, act: Callable[[int], Result], thread: CallerThread = CallerThread.LOOP) -> list[Result]:
        """Call `act` with the number of each shard, all at the same time. The last call runs on this thread.

        Returns or raises only when all calls have ended.
        """
        last = len(self._connections) - 1
        unanswered = self._unanswered if thread is CallerThread.LOOP else set[int]()
        unanswered.update(range(last + 1))

        def answered(shard: int) -> Result:
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

    def links(self) -> Links:
        pairs = zip(self._announcements.traffic(), self._steps.traffic(), strict=True)
        return links_of({f"shard-{shard}": one.plus(other) for shard, (one, other) in enumerate(pairs)})

    def unanswered(self) -> list[int]:
        return sorted(self._unanswered.copy() | {call.shard for call in self._waiting if not call.done})

    # --- steps

    def open_pass(self, pass_number: int, deadline: Deadline) -> None:
        self.call(OpenPass(pass_number), deadline)
        self._pass_number = pass_number

    def split(self, slices: Keys, slices_each: int, *, rows_first: bool) -> None:
        counts = [len(routed.position_P) for routed in self._placement.route(slices)]
        self._messages, self._slices_later = list(Split(counts, slices_each, rows_first)), rows_first

    def await_slices(self, num_slices: int) -> None:
        late = self._late
        if late is None:
            return
        wanted = [call for call in late.calls if late.first_of(call) < num_slices]
        late.calls = [call for call in late.calls if late.first_of(call) >= num_slices]
        if not late.calls:
            self._late = None
        self._waiting = wanted
        for call in self._steps.wait(wanted):
            self._put(late.rows, late.batch, call, {})

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> AnnouncedBatch:
        self._num_announced += 1
        return self._announce(FIRST_BATCH + self._num_announced, tables, learn=learn)

    @recorded(Span.LOOKUP)
    def _announce(self, number: int, tables: Mapping[str, Keys], *, learn: bool) -> AnnouncedBatch:
        self._announcements.make_room(MAX_ANNOUNCING)
        routed = {name: self._placement.route(keys) for name, keys in tables.items()}
        calls = []
        for shard in range(len(self._connections)):
            part = {name: parts[shard].keys for name, parts in routed.items()}
            sizes = tuple((name, len(keys.keys_U)) for name, keys in part.items())
            request = self._request(DataCall.ANNOUNCE, batch=number, learn=learn, parts=sizes)
            calls.append(self._announcements.send(shard, request, frames.key_frames(part), Deadline.after(ANNOUNCE_S)))
        num_keys = {name: len(keys.keys_U) for name, keys in tables.items()}
        return AnnouncedBatch(number, learn, routed, num_keys, calls)

    def _request(self, call: DataCall, **more: Any) -> DataRequest:
        """A call of this rank; the data plane gives it its number and the time left."""
        rank, generation = self._caller.rank, self._caller.generation
        return DataRequest(call, generation, rank, 0, 0.0, pass_number=self._pass_number, **more)

    def pull(self, batch: Prepared, deadline: Deadline) -> dict[str, F32]:
        mine = self._ready(batch)
        request = self._request(DataCall.PULL, batch=mine.number)
        calls = [self._steps.send(shard, request, (), deadline) for shard in range(len(self._connections))]
        return self._rows(calls, mine) or {}

    def look(self, tables: Mapping[str, Keys], deadline: Deadline) -> dict[str, F32]:
        self._num_looks += 1
        return self.pull(self._announce(self._num_looks, tables, learn=False), deadline)

    def ask_early(self, step: int, batch: Prepared | None, following: Prepared | None, deadline: Deadline) -> None:
        learnt, wanted = (None if each is None else self._ready(each).number for each in (batch, following))
        self._early_calls = [
            self._steps.send(
                shard, self._request(DataCall.EARLY, step=step, batch=learnt, following=wanted), (), deadline
            )
            for shard in range(len(self._connections))
        ]

    def exchange(
        self,
        step: int,
        batch: Prepared | None,
        gradients: Mapping[str, Gradients] | None,
        following: Prepared | None,
        scale: StepScale,
        deadline: Deadline,
    ) -> dict[str, F32] | None:
        self.await_slices(MAX_SLICES)
        learnt = None if batch is None else self._ready(batch)
        wanted = None if following is None else self._ready(following)
        with span(Span.PUSH):
            calls = self._push(step, learnt, gradients or {}, wanted, scale, deadline)
        if wanted is None or not self._slices_later:
            return self._rows(calls, wanted)
        rows = self._rows([call for call in calls if not call.request.part.number], wanted)
        late = [call for call in calls if call.request.part.number]
        self._late = _LateSlices(late, wanted, rows) if late and rows is not None else None
        return rows

    def _push(
        self,
        step: int,
        learnt: AnnouncedBatch | None,
        gradients: Mapping[str, Gradients],
        wanted: AnnouncedBatch | None,
        scale: StepScale,
        deadline: Deadline,
    ) -> list[Call]:
        """Send every shard its parts of an exchange."""
        calls: list[Call] = []
        for shard, part in self._messages:
            if part.number:
                self._steps.make_room(MAX_OPEN_PARTS)
            # Memory is for one call at a time, so parts beside others do not lie in it.
            empty = empty_floats if part.number else self._steps.empty(shard)
            mine = {} if learnt is None else _gradients_part(learnt, gradients, shard, part, empty)
            request = self._request(
                DataCall.EXCHANGE,
                step=step,
                batch=None if learnt is None else learnt.number,
                following=None if wanted is None else wanted.number,
                batch_samples=scale.batch_samples,
                parts=tuple((name, len(push.show_U)) for name, push in mine.items()),
                part=part,
            )
            arrays = frames.gradient_frames(mine, self._wires, empty)
            calls.append(self._steps.send(shard, request, arrays, deadline))
        return calls

    def _ready(self, batch: Prepared) -> AnnouncedBatch:
        """The batch, once every shard has found its rows."""
        if not isinstance(batch, AnnouncedBatch):
            raise InvalidShardCall("the batch was prepared by other shards than these")
        self._waiting = batch.calls
        for _ in self._announcements.wait(batch.calls):
            pass
        return batch

    @recorded(Span.PULL)
    def _rows(self, calls: Sequence[Call], batch: AnnouncedBatch | None) -> dict[str, F32] | None:
        """Wait for the replies; the rows of a batch, if one was requested."""
        self._waiting, rows = calls, None
        if batch is not None:
            counts = batch.num_keys.items()
            rows = {name: np.empty((count, self._widths[name]), np.float32) for name, count in counts}
        early_calls, self._early_calls = self._early_calls, ()
        masks: dict[int, Mapping[str, NDArray[np.bool_]]] = {}
        for call in self._steps.wait(early_calls):
            if batch is not None and rows is not None:
                masks[call.shard] = self._put_early(rows, batch, call)
        for call in self._steps.wait(calls):
            if batch is not None and rows is not None:
                self._put(rows, batch, call, masks.get(call.shard, {}))
        return rows

    def _put_early(self, rows: Mapping[str, F32], batch: AnnouncedBatch, call: Call) -> dict[str, NDArray[np.bool_]]:
        """Write the early rows of one shard to the positions of their keys; which ones they are."""
        assert call.reply is not None, "it is done"
        counts = {name: len(routed[call.shard].position_P) for name, routed in batch.routed.items()}
        early = frames.early_from(call.reply, call.rows, counts, self._widths, self._wires)
        for name, (mask_P, rows_ED) in early.items():
            put_rows(rows_ED, batch.routed[name][call.shard].position_P[mask_P], rows[name])
        return {name: mask_P for name, (mask_P, _) in early.items()}

    def _put(
        self, rows: Mapping[str, F32], batch: AnnouncedBatch, call: Call, early: Mapping[str, NDArray[np.bool_]]
    ) -> None:
        """Write the rows of one shard to the positions of its keys, but for `early` ones."""
        assert call.reply is not None, "it is done"
        parts = frames.rows_from(call.reply, call.rows, self._widths, self._wires)
        for name, rows_UD in rows.items():
            places = call.request.part.of(name)
            if places is None:
                continue
            position_P = batch.routed[name][call.shard].position_P[places]
            if name in early:
                position_P = position_P[~early[name]]
            if name not in parts or len(parts[name]) != len(position_P):
                found = len(parts.get(name, ()))
                raise InvalidShardCall(f"a shard sent {found} rows of {name!r} for {len(position_P)} keys")
            put_rows(parts[name], position_P, rows_UD)

    def recall(self, pass_number: int, questions: Questions, deadline: Deadline) -> Answers:
        of_shards, places = history_messages.route(questions, self._placement)
        answers = self._each(
            lambda shard: self._send(shard, Recall(pass_number, of_shards[shard]), deadline), CallerThread.READER
        )
        return history_messages.gathered(answers, places)

    def join(self, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        of_shards, places = join_messages.route(events, self._placement)
        answers = self._each(lambda shard: self._join(shard, of_shards[shard], deadline), CallerThread.READER)
        return join_messages.gathered(answers, places)

    def _join(self, shard: int, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        """Send a rank's events of one shard, and read the answer, in as many messages as their largest size allows."""
        cut = join_messages.cut(events, self._max_message_bytes)
        sent = [self._send(shard, SendJoinEvents(part, number, len(cut)), deadline) for number, part in enumerate(cut)]
        parts = [each for each in sent if each is not None][-1:]
        for number in range(1, parts[0].num_parts):
            parts.append(self._send(shard, ReadJoinAnswers(events.pass_number, number), deadline))
        return join_messages.whole_of(parts)

    def close_pass(self, day: int, deadline: Deadline) -> dict[str, str]:
        return self.call(ClosePass(self._pass_number, day), deadline)

    # --- commands

    def call(self, command: ShardCommand[Any, Result], deadline: Deadline) -> Result:
        request = self._request_of(command)
        ask: Callable[[int], Any] = lambda shard: self._reply(shard, command, request, deadline)  # noqa: E731
        if (key := command.key()) is not None:
            return command.combine([ask(int(self._placement.shard_of(np.array([key], np.uint64))[0]))])
        thread = command.gate.thread
        return command.combine(
            self._one_by_one(command, ask) if thread is CallerThread.ANY else self._each(ask, thread)
        )

    def _send(self, shard: int, command: ShardCommand[Reply, Any], deadline: Deadline) -> Reply:
        """Send a command to one shard; its reply."""
        return self._reply(shard, command, self._request_of(command), deadline)

    def _request_of(self, command: ShardCommand[Any, Any]) -> pb.CommandRequest:
        return pb.CommandRequest(caller=self._caller, name=type(command).__name__, fields=codec.packed(command))

    def _reply(
        self, shard: int, command: ShardCommand[Reply, Any], request: pb.CommandRequest, deadline: Deadline
    ) -> Reply:
        return reply_from(command, self._connections[shard].call("Call", request, pb.CommandReply, deadline).value)

    def _one_by_one(self, command: ShardCommand[Any, Any], ask: Callable[[int], Any]) -> list[Any]:
        """The replies of all shards, None of those that still work; the others are kept until the next call."""
        replies = self._replied.pop(command, None) or [None] * len(self._connections)
        replies = [ask(shard) if reply is None else reply for shard, reply in enumerate(replies)]
        if None in replies:
            self._replied[command] = replies
        return replies

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for plane in (self._announcements, self._steps):
            plane.close()
        self._context.term()
        for connection in self._connections:
            connection.close()


def _gradients_part(
    batch: AnnouncedBatch, gradients: Mapping[str, Gradients], shard: int, part: Part, empty: Empty
) -> dict[str, Gradients]:
    """The part of a push for one shard, in arrays made by `empty`."""
    parts = {}
    for name, push in gradients.items():
        places = part.of(name)
        if places is None:
            continue
        position_P = batch.routed[name][shard].position_P[places]
        if len(position_P) == len(push.show_U) and empty is empty_floats:  # all are this shard's, in their order
            parts[name] = push
            continue
        count, width = len(position_P), push.grads_UD.shape[1]
        chosen = Gradients(empty(count, width), empty(count), empty(count))
        given = frozen(push.grads_UD), frozen(push.show_U), frozen(push.click_U)
        take_push(*given, position_P, chosen.grads_UD, chosen.show_U, chosen.click_U)
        parts[name] = chosen
    return parts
