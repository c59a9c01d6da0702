"""The client of shards that are processes of their own: implements pserver.protocol.shards.Shards.

Keys are split by shard, all shards are called at the same time, and their rows are put together. The keys of a batch
are announced when it is prepared, so that shards find row numbers while the trainer computes. An exchange then names
its batches by number only. These calls go over the data plane, all others by gRPC.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.pserver.client.connection import ShardCaller, ShardCalls
from headrace.pserver.client.data_plane import Call, DataPlane
from headrace.pserver.config import DENSE_SLICES, TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol import frames, history_messages, join_messages
from headrace.pserver.protocol.frames import DataCall, TableNumbers
from headrace.pserver.protocol.histories import Answers, Questions
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents
from headrace.pserver.protocol.parts import WHOLE, Part, Split
from headrace.pserver.protocol.placement import Placement, RoutedKeys, put_rows, take_push
from headrace.pserver.protocol.shard_command import CallerThread, ShardCommand
from headrace.pserver.protocol.shards import (
    F32,
    Gradients,
    Keys,
    Prepared,
    StepScale,
)
from headrace.pserver.protocol.wire import TableWire, wires_of
from headrace.pserver.rows.arrays import Empty, empty_floats, frozen
from headrace.pserver.server.commands import ClosePass, OpenPass, Recall
from headrace.timeline import Span, recorded, span
from headrace.traffic import Links, links_of

Result = TypeVar("Result")

ANNOUNCE_S = 120.0
"""Longest time for a shard to find the rows of a batch; it does not wait for ranks."""
MAX_ANNOUNCING = 32
"""Most announcements to all shards without a reply; `prepare` waits until there are fewer."""
MAX_OPEN_PARTS = 32
"""Most parts of an exchange on their way to all shards; the next one leaves when there are fewer."""
MAX_SLICES = 1 << 40
"""More slices than there are."""
NONE_EARLY: Mapping[str, NDArray[np.bool_]] = {}
FIRST_BATCH = 1 << 32
"""Numbers of batches begin here. `look` uses lower ones, since a pull makes a shard forget all lower numbers."""


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


class _BatchRows:
    """The rows of a batch, put together from the replies of shards."""

    def __init__(
        self,
        batch: AnnouncedBatch,
        widths: Mapping[str, int],
        wires: Mapping[str, TableWire],
        without: Collection[str],
    ) -> None:
        """`without`: tables whose rows do not come."""
        self.batch, self._widths, self._wires = batch, widths, wires
        counts = {name: count for name, count in batch.num_keys.items() if name not in without}
        self.rows = {name: np.empty((count, widths[name]), np.float32) for name, count in counts.items()}

    def put_early(self, call: Call) -> dict[str, NDArray[np.bool_]]:
        """Write the early rows of one shard to the positions of their keys; which ones they are."""
        assert call.reply is not None, "it is done"
        routed = {name: parts[call.shard].position_P for name, parts in self.batch.routed.items()}
        counts = {name: len(position_P) for name, position_P in routed.items()}
        early = frames.early_from(call.reply, call.rows, counts, self._widths, self._wires)
        for name, (mask_P, rows_ED) in early.items():
            put_rows(rows_ED, routed[name][mask_P], self.rows[name])
        return {name: mask_P for name, (mask_P, _) in early.items()}

    def put(self, call: Call, early: Mapping[str, NDArray[np.bool_]] = NONE_EARLY) -> None:
        """Write the rows of one shard to the positions of its keys, but for `early` ones."""
        assert call.reply is not None, "it is done"
        parts = frames.rows_from(call.reply, call.rows, self._widths, self._wires)
        for name, rows_UD in self.rows.items():
            places = call.request.part.of(name)
            if places is None:
                continue
            position_P = self.batch.routed[name][call.shard].position_P[places]
            if name in early:
                position_P = position_P[~early[name]]
            if name not in parts or len(parts[name]) != len(position_P):
                found = len(parts.get(name, ()))
                raise InvalidShardCall(f"a shard sent {found} rows of {name!r} for {len(position_P)} keys")
            put_rows(parts[name], position_P, rows_UD)

    def first_slice(self, call: Call) -> int:
        """The first dense slice that a call brings."""
        return int(self.batch.routed[DENSE_SLICES][call.shard].position_P[call.request.part.begin])


class RemoteShards:
    """Implements pserver.protocol.shards.Shards with processes.

    One thread calls `prepare`, one `recall` and `join`, one writes and settles snapshots, one makes the other calls.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Mapping[str, TableSection],
        me: ShardCaller,
        deadline: Deadline,
        placed: Collection[str] = (),
    ) -> None:
        """Connect to every shard, in the order of their numbers, and check that it belongs to this job.

        `placed`: tables whose floats do not travel with exchanges.
        """
        self._placed = placed
        self._me, self._wires = me, wires_of(tables, me.wire)
        self._widths = {name: section.num_weights for name, section in tables.items()}
        self._pulled = {name: section.num_pulled for name, section in tables.items()}
        self._placement = Placement.even(len(addresses))
        self._calls, self._context = ShardCalls(addresses, tables, me), zmq.Context()
        self._late: tuple[Sequence[Call], _BatchRows] | None = None
        """The calls of the last exchange that bring dense slices later, and where they go."""
        self._early_calls: Sequence[Call] = ()
        """Those of the step in progress."""
        self._messages: Sequence[tuple[int, Part]] = [(shard, WHOLE) for shard in range(len(addresses))]
        """(shard, part) of each message of an exchange, in the order in which they leave."""
        self._slices_later = False
        """Whether `exchange` returns before all slices are here."""
        self._num_announced = 0
        self._num_looks = 0
        self._pass_number = 0
        self._waiting: Sequence[Call] = ()
        # Steps have sockets of their own, so they never wait behind announcements.
        self._announcements, self._steps = (
            DataPlane(
                self._context,
                self._calls.names,
                self._calls.greet,
                TableNumbers(self._widths),
                self._calls.keys,
                me.max_message_bytes,
                shares_memory=shares_memory,
                silent_s=me.silent_s,
            )
            for shares_memory in (False, True)
        )
        try:
            self._calls.begin(deadline)
        except BaseException:
            self.close()
            raise

    def links(self) -> Links:
        pairs = zip(self._announcements.traffic(), self._steps.traffic(), strict=True)
        return links_of({f"shard-{shard}": one.plus(other) for shard, (one, other) in enumerate(pairs)})

    def unanswered(self) -> list[int]:
        return sorted(self._calls.unanswered.copy() | {call.shard for call in self._waiting if not call.done})

    # --- steps

    def open_pass(self, pass_number: int, deadline: Deadline, samples: int = 0) -> None:
        self.call(OpenPass(pass_number, samples), deadline)
        self._pass_number = pass_number

    def split(self, slices: Keys, slices_each: int, *, rows_first: bool) -> None:
        counts = [len(routed.position_P) for routed in self._placement.route(slices)]
        self._messages, self._slices_later = list(Split(counts, slices_each, rows_first)), rows_first

    def await_slices(self, num_slices: int) -> None:
        if self._late is None:
            return
        calls, rows = self._late
        wanted = [call for call in calls if rows.first_slice(call) < num_slices]
        left = [call for call in calls if rows.first_slice(call) >= num_slices]
        self._late = (left, rows) if left else None
        self._waiting = wanted
        for call in self._steps.wait(wanted):
            rows.put(call)

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> AnnouncedBatch:
        self._num_announced += 1
        return self._announce(FIRST_BATCH + self._num_announced, tables, learn=learn)

    @recorded(Span.LOOKUP)
    def _announce(self, number: int, tables: Mapping[str, Keys], *, learn: bool) -> AnnouncedBatch:
        self._announcements.make_room(MAX_ANNOUNCING)
        routed = {name: self._placement.route(keys) for name, keys in tables.items()}
        calls = []
        for shard in range(len(self._calls.names)):
            part = {name: parts[shard].keys for name, parts in routed.items()}
            sizes = tuple((name, len(keys.keys_U)) for name, keys in part.items())
            request = self._me.request(DataCall.ANNOUNCE, self._pass_number, batch=number, learn=learn, parts=sizes)
            calls.append(self._announcements.send(shard, request, frames.key_frames(part), Deadline.after(ANNOUNCE_S)))
        num_keys = {name: len(keys.keys_U) for name, keys in tables.items()}
        return AnnouncedBatch(number, learn, routed, num_keys, calls)

    def pull(self, batch: Prepared, deadline: Deadline) -> dict[str, F32]:
        mine = self._ready(batch)
        request = self._me.request(DataCall.PULL, self._pass_number, batch=mine.number)
        calls = [self._steps.send(shard, request, (), deadline) for shard in range(len(self._calls.names))]
        rows = self._rows_of(mine)
        self._await(calls, rows)
        return rows.rows

    def _rows_of(self, batch: AnnouncedBatch, without: Collection[str] = ()) -> _BatchRows:
        return _BatchRows(batch, self._pulled if batch.learn else self._widths, self._wires, without)

    def look(self, tables: Mapping[str, Keys], deadline: Deadline) -> dict[str, F32]:
        self._num_looks += 1
        return self.pull(self._announce(self._num_looks, tables, learn=False), deadline)

    def ask_early(self, step: int, batch: Prepared | None, following: Prepared | None, deadline: Deadline) -> None:
        learnt, wanted = (None if each is None else self._ready(each).number for each in (batch, following))
        self._early_calls = [
            self._steps.send(
                shard,
                self._me.request(DataCall.EARLY, self._pass_number, step=step, batch=learnt, following=wanted),
                (),
                deadline,
            )
            for shard in range(len(self._calls.names))
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
        rows = None if wanted is None else self._rows_of(wanted, self._placed)
        if rows is None or not self._slices_later:
            self._await(calls, rows)
            return None if rows is None else rows.rows
        self._await([call for call in calls if not call.request.part.number], rows)
        late = [call for call in calls if call.request.part.number]
        self._late = (late, rows) if late else None
        return rows.rows

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
            request = self._me.request(
                DataCall.EXCHANGE,
                self._pass_number,
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
    def _await(self, calls: Sequence[Call], rows: _BatchRows | None) -> None:
        """Wait for the replies, and take the rows of a batch from them, if one was requested."""
        self._waiting = calls
        early_calls, self._early_calls = self._early_calls, ()
        early = {call.shard: rows.put_early(call) for call in self._steps.wait(early_calls) if rows is not None}
        for call in self._steps.wait(calls):
            if rows is not None:
                rows.put(call, early.get(call.shard, NONE_EARLY))

    def recall(self, pass_number: int, questions: Questions, deadline: Deadline) -> Answers:
        of_shards, places = history_messages.route(questions, self._placement)
        answers = self._calls.each(
            lambda shard: self._calls.send(shard, Recall(pass_number, of_shards[shard]), deadline), CallerThread.READER
        )
        return history_messages.gathered(answers, places)

    def join(self, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        of_shards, places = join_messages.route(events, self._placement)
        answers = self._calls.each(
            lambda shard: self._calls.join(shard, of_shards[shard], deadline), CallerThread.READER
        )
        return join_messages.gathered(answers, places)

    def close_pass(self, day: int, deadline: Deadline) -> dict[str, str]:
        return self.call(ClosePass(self._pass_number, day), deadline)

    def call(self, command: ShardCommand[Any, Result], deadline: Deadline) -> Result:
        return self._calls.call(command, self._placement, deadline)

    def close(self) -> None:
        self._calls.stop()
        for plane in (self._announcements, self._steps):
            plane.close()
        self._context.term()
        self._calls.close()


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
