"""Operations: long actions that callers requested, their progress and their results.

A few threads carry them out in the order of the requests, one operation each. If the service dies, its next start marks
the running operations "interrupted". A request that reached the job is in the job's log; others must be repeated.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from sqlalchemy import select, update

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.jobs.errors import Cancelled, LimitReached, UnknownOperation
from headrace.service.records.database import Records, utc_now
from headrace.service.records.schema import OperationRow, of_row

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long operations may take to end when the service ends."""
MAX_LISTED = 201
"""Most operations of one list: a page, and one that shows that there are more."""


class OperationState(StrEnum):
    """The state of an operation."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """The service ended while it ran."""

    @property
    def over(self) -> bool:
        """Whether this state is final."""
        return self not in (OperationState.WAITING, OperationState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A long action that a caller requested."""

    id: str
    kind: str
    job: str | None
    who: str
    state: OperationState
    progress: float | None = None
    """From 0 to 1, if known."""
    said: str = ""
    """Its present step, as text."""
    result: Any = None
    """JSON, once it is done."""
    problem: dict[str, Any] | None = None
    """Why it failed: a problem as RFC 9457 has it."""
    created: datetime
    ended: datetime | None = None


class ReportProgress(Protocol):
    """Reports the progress of an operation: from 0 to 1 or None, and a text. Raises Cancelled after a cancellation."""

    def __call__(self, progress: float | None, said: str, /) -> None: ...


Act = Callable[[ReportProgress, threading.Event], Any]
"""The work of an operation, on a thread; returns JSON. The event is set on cancellation; it may raise Cancelled."""
ProblemOf = Callable[[Exception], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class UntilCancelled(Deadline):
    """A deadline that also passes when an operation is cancelled."""

    cancelled: threading.Event

    @classmethod
    def within(cls, seconds: float, cancelled: threading.Event) -> "UntilCancelled":
        """A deadline in so many seconds, or at `cancelled`."""
        return cls(Deadline.after(seconds).at_s, cancelled)

    def left_s(self) -> float:
        return 0.0 if self.cancelled.is_set() else Deadline.left_s(self)

    def passed(self) -> bool:
        return self.cancelled.is_set() or Deadline.passed(self)


def one_step(words: str, within_s: float, work: Callable[[Deadline], Any]) -> Act:
    """An operation of one step, described by `words`: `work` until its deadline or its cancellation."""

    def act(progress: ReportProgress, cancelled: threading.Event) -> Any:
        progress(None, words)
        with as_cancelled(cancelled):
            return work(UntilCancelled.within(within_s, cancelled))

    return act


@contextmanager
def as_cancelled(cancelled: threading.Event) -> Iterator[None]:
    """Raise Cancelled in place of any error of ours once the operation is cancelled."""
    try:
        yield
    except HeadraceError:
        if cancelled.is_set():
            raise Cancelled from None
        raise


def plain_problem(error: Exception) -> dict[str, Any]:
    """An error as a problem: its message if it is an error of ours, else that it is a bug."""
    if isinstance(error, HeadraceError):
        return {"type": "about:blank", "title": type(error).__name__, "detail": str(error)}
    return {"type": "about:blank", "title": "a bug", "detail": f"{type(error).__name__}: {error}"}


@dataclass(slots=True)
class _Asked:
    """An operation that has not ended."""

    operation: Operation
    act: Act
    cancelled: threading.Event


class OperationQueue:
    """Any thread."""

    def __init__(
        self,
        records: Records,
        *,
        max_operations: int = 64,
        threads: int = 4,
        problem_of: ProblemOf = plain_problem,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Run `threads` operations at a time. At most `max_operations` wait or run, three quarters for one caller."""
        self._max_each = max_operations - max_operations // 4
        self._records, self._max_operations, self._problem_of, self._now = records, max_operations, problem_of, now
        self._lock = threading.Lock()
        self._going: dict[str, _Asked] = {}
        self._queue: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._closing = False
        self.on_end: Callable[[str], object] = lambda _job: None
        """Called with the job of an operation that has ended, before the operation shows its end."""
        self._interrupt_left_over()
        # Daemons: an operation that waits for a rank 0 that never answers must not keep the service from exiting.
        self._threads = [threading.Thread(target=self._run, name=f"work-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, kind: str, job: str | None, who: str, act: Act) -> Operation:
        """Queue an operation. Raises LimitReached."""
        with self._lock:
            if self._closing or len(self._going) >= self._max_operations:
                raise LimitReached(
                    f"{len(self._going)} operations wait or run, at most {self._max_operations} may; "
                    "retry when some have ended"
                )
            if (theirs := sum(asked.operation.who == who for asked in self._going.values())) >= self._max_each:
                reason = f"{theirs} operations of {who!r} wait or run, three quarters of limits.max_operations"
                raise LimitReached(f"{reason}; retry when some have ended")
            operation = Operation(
                id=f"{int(time.time() * 1000):011x}-{secrets.token_hex(6)}",
                kind=kind,
                job=job,
                who=who,
                state=OperationState.WAITING,
                created=self._now(),
            )
            self._going[operation.id] = asked = _Asked(operation, act, threading.Event())
        try:
            self._insert(operation)
        except BaseException:
            with self._lock:
                del self._going[operation.id]
            raise
        self._queue.put(asked)
        return operation

    def get(self, id: str) -> Operation:
        """An operation by id. Raises UnknownOperation."""
        with self._lock:
            if id in self._going:
                return self._going[id].operation
        with self._records.reading() as session:
            row = session.get(OperationRow, id)
            if row is None:
                raise UnknownOperation(id)
            return _operation(row)

    def list(
        self, *, job: str | None = None, kind: str | None = None, after: str | None = None, limit: int = 50
    ) -> list[Operation]:
        """Operations, newest first, of all jobs or one and all kinds or one, older than the id `after`."""
        newest = select(OperationRow).order_by(OperationRow.id.desc()).limit(min(limit, MAX_LISTED))
        if job is not None:
            newest = newest.where(OperationRow.job == job)
        if kind is not None:
            newest = newest.where(OperationRow.kind == kind)
        if after is not None:
            newest = newest.where(OperationRow.id < after)
        with self._records.reading() as session:
            found = [_operation(row) for row in session.scalars(newest)]
        with self._lock:
            return [self._going[each.id].operation if each.id in self._going else each for each in found]

    def cancel(self, id: str) -> Operation:
        """Cancel an operation. A waiting one never starts, a running one ends soon, one that is over stays as it is.

        Raises UnknownOperation.
        """
        with self._lock:
            asked = self._going.get(id)
            if asked is not None:
                asked.cancelled.set()
        return self.get(id)

    def going(self, job: str) -> bool:
        """Whether an operation on `job` waits or runs."""
        with self._lock:
            return any(asked.operation.job == job for asked in self._going.values())

    def close(self) -> None:
        """Cancel all operations, wait a little, and mark those that still run as interrupted."""
        with self._lock:
            self._closing = True
            for asked in self._going.values():
                asked.cancelled.set()
        for _ in self._threads:
            self._queue.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._interrupt_left_over()

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            try:
                self._do(asked)
            except HeadraceError as error:  # the records cannot be written
                log.error("operation %s: its result cannot be stored: %s", asked.operation.id, error)
            finally:
                with self._lock:
                    self._going.pop(asked.operation.id, None)

    def _do(self, asked: _Asked) -> None:
        if asked.cancelled.is_set():
            self._end(asked, state=self._given_up())
            return
        self._set(asked, state=OperationState.RUNNING)
        self._update(asked.operation)

        def progress(done: float | None, said: str) -> None:
            self._set(asked, progress=done, said=said)
            if asked.cancelled.is_set():
                raise Cancelled

        try:
            result = asked.act(progress, asked.cancelled)
        except Cancelled:
            self._end(asked, state=self._given_up())
        except Exception as error:  # the top of an operation: its problem has the error
            if isinstance(error, HeadraceError) and asked.cancelled.is_set():
                self._end(asked, state=self._given_up(), said=str(error))
                return
            if not isinstance(error, HeadraceError):
                log.exception("operation %s (%s)", asked.operation.id, asked.operation.kind)
            self._end(asked, state=OperationState.FAILED, problem=self._problem_of(error))
        else:
            self._end(asked, state=OperationState.DONE, result=result)

    def _given_up(self) -> OperationState:
        return OperationState.INTERRUPTED if self._closing else OperationState.CANCELLED

    def _set(self, asked: _Asked, **changes: Any) -> None:
        with self._lock:
            asked.operation = replace(asked.operation, **changes)

    def _end(self, asked: _Asked, **changes: Any) -> None:
        """Store the end first: a reader in between sees the operation as running, and never misses it."""
        ended = replace(asked.operation, ended=self._now(), **changes)
        self._update(ended)
        if ended.job is not None:
            self.on_end(ended.job)
        self._set(asked, **changes, ended=ended.ended)

    def _insert(self, operation: Operation) -> None:
        with self._records.session() as session:
            session.add(
                OperationRow(
                    id=operation.id,
                    kind=operation.kind,
                    job=operation.job,
                    who=operation.who,
                    state=operation.state.value,
                    progress=None,
                    said="",
                    created_at=operation.created,
                )
            )

    def _update(self, operation: Operation) -> None:
        with self._records.session() as session:
            row = session.get_one(OperationRow, operation.id)
            row.state, row.progress, row.said = operation.state.value, operation.progress, operation.said
            row.result, row.problem, row.ended_at = operation.result, operation.problem, operation.ended

    def _interrupt_left_over(self) -> None:
        left = (OperationState.WAITING.value, OperationState.RUNNING.value)
        with self._records.session() as session:
            session.execute(
                update(OperationRow)
                .where(OperationRow.state.in_(left))
                .values(state=OperationState.INTERRUPTED.value, ended_at=self._now())
            )


@of_row
def _operation(row: OperationRow) -> Operation:
    return Operation(
        id=row.id,
        kind=row.kind,
        job=row.job,
        who=row.who,
        state=OperationState(row.state),
        progress=row.progress,
        said=row.said,
        result=row.result,
        problem=row.problem,
        created=row.created_at,
        ended=row.ended_at,
    )
