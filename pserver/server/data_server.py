"""The data plane of one shard: a thread that reads the calls of every step, acts, and answers.

The thread owns the sockets. It runs calls itself, since each hand-over between threads costs about as much as a small
call. Announcements run on a thread for each rank if they may wait for memory, or would keep other ranks waiting. A push
that others must complete is held, and answered when the consistency policy allows it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

import numpy as np
import zmq

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Unavailable
from headrace.process_usage import process_usage
from headrace.pserver.errors import InvalidShardCall, MessageTooLarge, StepTimedOut
from headrace.pserver.protocol import frames, statuses
from headrace.pserver.protocol.frames import DataCall, DataReply, DataRequest, TableNumbers
from headrace.pserver.protocol.shards import F32, ShardFigures
from headrace.pserver.rows.arrays import Empty, empty_floats
from headrace.pserver.server.pass_state import CallVerdict
from headrace.pserver.server.rank_memories import RankMemories
from headrace.pserver.server.shard_host import waiting_s
from headrace.pserver.server.step_calls import StepCalls
from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import DataListener, SharedMemory
from headrace.timeline import Span, span
from headrace.traffic import LinkTraffic, links_of

MAX_POLL_S = 3600.0
"""Longest wait of one poll, whose milliseconds are a C int; deadlines may be longer."""
LINGER_MS = 1000
"""How long the last answers may take when a shard stops."""
CLOSE_S = 5.0
"""How long announcements that run may take when a shard stops; later ones end with the process."""

ROWS = DataCall.EXCHANGE, 0
"""The kind of call whose waits are figures."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Caller:
    """Where an answer goes."""

    peer: memoryview
    request: int
    memory: SharedMemory | None = None
    """Where the arrays of the answer may lie."""
    traffic: LinkTraffic | None = None
    """Counters of its rank, once that is checked."""

    def empty(self) -> Empty:
        """Makes the arrays of the answer."""
        if self.memory is None:
            return empty_floats
        self.memory.clear()
        return self.memory.empty


@dataclass(frozen=True, slots=True)
class _Held:
    """A push whose answer waits for other ranks."""

    caller: _Caller
    request: DataRequest
    until: Deadline
    since_s: float
    """When it came, on the monotonic clock."""


class _Announcer:
    """Runs the announcements of one rank in turn, on a thread of its own: one that waits for memory delays no other."""

    def __init__(self, rank: int) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"announce-{rank}", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], None]) -> None:
        """Run `act` after those before it."""
        self._acts.put(act)

    def stop(self) -> None:
        """Start no further announcement."""
        self._stopping = True
        self._acts.put(None)

    def join(self, until: Deadline) -> bool:
        """Wait for the announcement that runs; whether it ended in time."""
        self._thread.join(until.left_s())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (act := self._acts.get()) is not None and not self._stopping:
            act()


class DataServer:
    """Serves until `close`, or until an error that no call explains: then `failed` is called, and `check` raises it."""

    def __init__(
        self,
        calls: StepCalls,
        listener: DataListener,
        memories: RankMemories,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._calls, self._listener, self._memories = calls, listener, memories
        self._failed, self._error = failed, list[Exception]()
        self._tables = TableNumbers(calls.widths)
        self._held: dict[tuple[int, int], _Held] = {}  # by rank and number of the call: a repeat takes its place
        self._answers: queue.SimpleQueue[tuple[_Caller, DataReply]] = queue.SimpleQueue()
        self.traffic = [LinkTraffic() for _ in range(calls.config.num_ranks)]
        """The counters of each rank. Any thread may read them."""
        self.waited_s = np.zeros((calls.config.num_ranks, calls.config.num_ranks))
        """[r, q]: seconds that pushes of rank r were held until a call of rank q, the last one, allowed an answer."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        num_announcers = 0 if calls.announces_at_once else calls.config.num_ranks
        self._announcers = [_Announcer(rank) for rank in range(num_announcers)]
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._thread.start()

    def figures(self) -> ShardFigures:
        """From any thread: traffic and waits since the beginning, and how far ranks are apart."""
        links = links_of({f"trainer-{rank}": link for rank, link in enumerate(self.traffic)})
        return ShardFigures(links, self.waited_s.round(6).tolist(), self._calls.apart(), process_usage())

    def wake(self) -> None:
        """From any thread: look again at what is held."""
        os.eventfd_write(self._wake, 1)

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        for error in self._error:
            raise error

    def close(self) -> None:
        """Answer all that is held, and stop. Announcements that run have CLOSE_S to end."""
        self._stopping = True
        self.wake()
        self._thread.join()
        until = Deadline.after(CLOSE_S)
        for announcer in self._announcers:
            announcer.stop()
        if all([announcer.join(until) for announcer in self._announcers]):
            os.close(self._wake)  # an announcement that ends later still writes to it
        else:
            log.warning("an announcement has not ended within %.0f s; it is given up", CLOSE_S)
        self._listener.close(LINGER_MS)

    # --- the thread

    def _run(self) -> None:
        """Serve. Without this thread no call is answered, so an error in it must end the shard."""
        try:
            self._serve()
        except Exception as error:
            log.exception("the data plane failed; the shard ends")
            self._error.append(error)
            self._failed()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._listener.router, self._listener.admission, self._listener.events, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            with span(Span.WAIT):
                ready = dict(poller.poll(self._wait_ms()))
            if self._listener.admission in ready:
                self._listener.admit()
            if self._listener.events in ready:
                self._listener.note_peers()
            if self._listener.router in ready:
                self._read()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._answers.empty():
                    self._send(*self._answers.get())
                self._answer_held()
            self._apply_late()
            self._give_up_late()
        for held in self._held.values():
            self._fail(held.caller, Unavailable(f"shard {self._calls.config.shard} is stopping"))

    def _wait_ms(self) -> int | None:
        """How long no held call is late; None: nothing is held."""
        if not self._held:
            return None
        lefts_s = [held.until.left_s() for held in self._held.values()]
        if (merge_s := self._merge_left_s()) is not None:
            lefts_s.append(max(0.0, merge_s))
        return 1 + int(1000 * min(MAX_POLL_S, *lefts_s))

    def _merge_left_s(self) -> float | None:
        """How long the first push that is held may still wait for others; None: as long as its caller."""
        wait_s = self._calls.merge_wait_s
        if wait_s is None:
            return None
        since_s = [held.since_s for held in self._held.values() if not self._calls.is_applied(held.request)]
        return min(since_s) + wait_s - time.monotonic() if since_s else None

    def _apply_late(self) -> None:
        """Apply the pushes that are held, if the first has waited long enough for others."""
        left_s = self._merge_left_s()
        if left_s is not None and left_s <= 0:
            self._calls.wait_no_longer()
            self._answer_held()

    def _read(self) -> None:
        """Act on all messages that are here."""
        for _ in range(data_sockets.MAX_QUEUED):  # then others have a turn
            if (message := data_sockets.receive(self._listener.router)) is None:
                return
            peer, *rest = message
            self._act(peer, rest)

    def _act(self, peer: memoryview, message: Sequence[memoryview]) -> None:
        header = message[0] if message else memoryview(b"")
        number = frames.request_number(header)
        if number is None:
            log.warning("a message of %d bytes is no call; it is dropped", header.nbytes)
            return
        caller = _Caller(peer, number)
        self._guarded(caller, lambda: self._call(caller, header, message[1:]))

    def _guarded(self, caller: _Caller, act: Callable[[], None]) -> None:
        """Act; answer with the error if there is one."""
        if (failure := _failure_of(caller, act)) is not None:
            self._send(caller, failure)

    def _call(self, caller: _Caller, header: memoryview, arrays: Sequence[memoryview]) -> None:
        request, in_message = frames.decode_request(header, self._tables), frames.num_bytes_of(arrays)
        self._calls.check_caller(request.generation, request.rank)
        caller.traffic, shared = self.traffic[request.rank], 0
        if request.beside:
            caller.memory, arrays = self._memories.find(request.rank, arrays)
            shared = frames.num_bytes_of(arrays)
        caller.traffic.received(len(header) + in_message, shared)
        match request.call:
            case DataCall.ANNOUNCE:
                if request.beside:
                    raise InvalidShardCall("an announcement whose keys may change while it waits")
                if request.batch is None:
                    raise InvalidShardCall("an announcement without the number of its batch")
                tables = frames.keys_from(request, arrays)
                if self._announcers:
                    self._announcers[request.rank].submit(partial(self._announce, caller, request, tables))
                else:
                    self._calls.announce(request, tables)
                    self._answer(caller, {})
            case DataCall.PULL:
                if request.batch is None:
                    raise InvalidShardCall("a pull without the number of its batch")
                empty = caller.empty()
                self._answer(caller, self._calls.pull(request.pass_number, request.rank, request.batch, empty), empty)
            case DataCall.EXCHANGE:
                self._exchange(caller, request, arrays)
            case DataCall.EARLY:
                self._hold_early(caller, request)
            case _:
                assert_never(request.call)

    def _announce(self, caller: _Caller, request: DataRequest, tables: Any) -> None:
        """On the thread of its rank; the answer is sent by the thread of the sockets."""
        failure = _failure_of(caller, lambda: self._calls.announce(request, tables))
        self._answers.put((caller, failure or DataReply(caller.request)))
        self.wake()

    def _exchange(self, caller: _Caller, request: DataRequest, arrays: Sequence[memoryview]) -> None:
        now_s, until = time.monotonic(), Deadline.after(waiting_s(request.left_s))
        gradients = frames.gradients_from(request, arrays, self._calls.widths, self._calls.wires)
        verdict = self._calls.push(request, gradients)
        if self._calls.may_answer(request):
            self._answer_push(caller, request)
        else:
            self._held[request.rank, request.request] = _Held(caller, request, until, now_s)
        if verdict is CallVerdict.ACT:
            self._answer_held(request, now_s)

    def _hold_early(self, caller: _Caller, request: DataRequest) -> None:
        """Early rows are answered when all ranks have asked."""
        now_s, until = time.monotonic(), Deadline.after(waiting_s(request.left_s))
        self._calls.ask_early(request)
        self._held[request.rank, request.request] = _Held(caller, request, until, now_s)
        if self._calls.may_answer(request):
            self._answer_held(request, now_s)

    def _answer_held(self, last: DataRequest | None = None, now_s: float = 0.0) -> None:
        """Answer every push that the policy allows to be answered by now. `last`: the call that allows it."""
        kind, longest_s = None if last is None else _kind_of(last), 0.0
        for key, held in list(self._held.items()):
            if kind not in (None, _kind_of(held.request)) or not self._calls.may_answer(held.request):
                continue
            del self._held[key]
            if last is not None and kind == ROWS:  # the waits beside it are not added to it
                self.waited_s[held.request.rank, last.rank] += now_s - held.since_s
                longest_s = max(longest_s, now_s - held.since_s)
            self._guarded(held.caller, partial(self._answer_push, held.caller, held.request))
        if last is not None:
            self.traffic[last.rank].wait_s += longest_s

    def _give_up_late(self) -> None:
        for key in [key for key, held in self._held.items() if held.until.passed()]:
            held = self._held.pop(key)
            self._fail(
                held.caller,
                StepTimedOut(
                    f"shard {self._calls.config.shard} waited {held.request.left_s:.1f} s in step {held.request.step} "
                    f"of pass {held.request.pass_number} for {self._calls.missing(held.request)}: is that trainer "
                    "alive, or much slower than the others?"
                ),
            )

    # --- answers

    def _answer_push(self, caller: _Caller, request: DataRequest) -> None:
        if request.call is DataCall.EARLY:
            early, masks = self._calls.early_rows(request.rank, request.following)
            parts = tuple((name, len(rows_ED)) for name, rows_ED in early.items())
            arrays = frames.early_frames(early, masks, self._calls.wires)
            self._send(caller, DataReply(caller.request, parts=parts), arrays)
            return
        empty = caller.empty()
        rows: dict[str, F32] = {}
        if request.following is not None:
            rows = self._calls.rows(request.rank, request.following, empty, request.part)
        self._calls.leave_rows(request)
        self._answer(caller, rows, empty)

    def _answer(self, caller: _Caller, rows: dict[str, F32], empty: Empty = empty_floats) -> None:
        parts = tuple((name, len(rows_UD)) for name, rows_UD in rows.items())
        self._send(caller, DataReply(caller.request, parts=parts), frames.row_frames(rows, self._calls.wires, empty))

    def _fail(self, caller: _Caller, error: Exception) -> None:
        self._send(caller, _failure(caller, error))

    def _send(self, caller: _Caller, reply: DataReply, arrays: Sequence[memoryview] = ()) -> None:
        most, shared = self._calls.config.max_message, 0
        if (size := frames.num_bytes_of(arrays)) > most:
            reply = _failure(caller, MessageTooLarge("the rows", f"{size} bytes, and a message has {most} at most"))
            arrays = ()
        elif not reply.status and caller.memory and (places := caller.memory.places_of(arrays)) is not None:
            reply, arrays, shared = replace(reply, beside=True), [memoryview(places)], size
        try:
            header = frames.encode_reply(reply, self._tables)
            if caller.traffic is not None:  # first, so that nobody has an answer that is not counted
                caller.traffic.sent(len(header) + frames.num_bytes_of(arrays), shared)
            data_sockets.send(self._listener.router, [caller.peer, header, *arrays])
        except zmq.ZMQError as error:
            log.info("an answer was not sent (%s); the caller will repeat its call", error)


def _kind_of(request: DataRequest) -> tuple[DataCall, int]:
    """Calls of one kind are answered together."""
    return request.call, request.part.number


def _failure_of(caller: _Caller, act: Callable[[], None]) -> DataReply | None:
    """Act; the answer that tells its error, if there is one. A bug in one call ends no thread that serves others."""
    try:
        act()
    except HeadraceError as error:
        return _failure(caller, error)
    except Exception as error:
        log.exception("a call failed")
        return _failure(caller, error)
    return None


def _failure(caller: _Caller, error: Exception) -> DataReply:
    details = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    return DataReply(caller.request, statuses.number_of(statuses.status_of(error)), details)
