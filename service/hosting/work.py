"""Operations: long work that somebody asked for, its progress, and how it ended.

A few threads do it, one operation each, in the order asked for. What runs when the service dies is "interrupted" when
it is started again: what an operation asks of a job is logged by the job, or is made again by asking again.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from sqlalchemy import select, update

from millrace.errors import MillraceError
from service.hosting.errors import Cancelled, TooMany, UnknownOperation
from service.records.database import Records, utc_now
from service.records.tables import OperationRow, of_row

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long operations may take to end when the service does."""
MAX_LISTED = 201
"""Operations of one list: a page, and one that says that there are more."""


class State(StrEnum):
    """Where an operation stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """The service died, or was ended, while it ran."""

    @property
    def over(self) -> bool:
        """Whether it stays as it is."""
        return self not in (State.WAITING, State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Long work that somebody asked for."""

    id: str
    kind: str
    job: str | None
    who: str
    state: State
    progress: float | None = None
    """From 0 to 1, where that can be said."""
    said: str = ""
    """What it is doing, in words."""
    result: Any = None
    """JSON, once it is done."""
    problem: dict[str, Any] | None = None
    """Why it failed: a problem as RFC 9457 has it."""
    created: datetime
    ended: datetime | None = None


class Progress(Protocol):
    """Takes how far an operation is: from 0 to 1, or None, and in words. Raises Cancelled where it is to end."""

    def __call__(self, progress: float | None, said: str, /) -> None:
        """See above."""
        ...


Act = Callable[[Progress, threading.Event], Any]
"""Does the work on a thread of its own; returns JSON. The event says that it is to end: it may raise Cancelled."""
ProblemOf = Callable[[Exception], dict[str, Any]]


def plain_problem(error: Exception) -> dict[str, Any]:
    """An error as a problem: what it says where it is for people, else that it is a bug."""
    if isinstance(error, MillraceError):
        return {"type": "about:blank", "title": type(error).__name__, "detail": str(error)}
    return {"type": "about:blank", "title": "a bug", "detail": f"{type(error).__name__}: {error}"}


@dataclass(slots=True)
class _Asked:
    """An operation that is not over."""

    operation: Operation
    act: Act
    cancelled: threading.Event


class Work:
    """See module docstring. Any thread."""

    def __init__(
        self,
        records: Records,
        *,
        max_operations: int = 64,
        threads: int = 4,
        problem_of: ProblemOf = plain_problem,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`threads` operations at a time; with those that wait `max_operations`, three quarters of one caller."""
        self._max_each = max_operations - max_operations // 4
        self._records, self._max_operations, self._problem_of, self._now = records, max_operations, problem_of, now
        self._lock = threading.Lock()
        self._going: dict[str, _Asked] = {}
        self._queue: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._closing = False
        self.on_end: Callable[[str], object] = lambda _job: None
        """Told the job of an operation that has ended, before anybody else is: who is told looks at the job next."""
        self._interrupt_left_over()
        # Daemons: an act that waits for a chief that never answers must not keep the service from ending.
        self._threads = [threading.Thread(target=self._run, name=f"work-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, kind: str, job: str | None, who: str, act: Act) -> Operation:
        """Have `act` done soon. Raises TooMany."""
        with self._lock:
            if self._closing or len(self._going) >= self._max_operations:
                raise TooMany(
                    f"{len(self._going)} operations wait or run, at most {self._max_operations} may; "
                    "ask again when some have ended"
                )
            if (theirs := sum(asked.operation.who == who for asked in self._going.values())) >= self._max_each:
                told = f"{theirs} operations of {who!r} wait or run, three quarters of limits.max_operations"
                raise TooMany(f"{told}; ask again when some have ended")
            operation = Operation(
                id=f"{int(time.time() * 1000):011x}-{secrets.token_hex(6)}",
                kind=kind,
                job=job,
                who=who,
                state=State.WAITING,
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
        """How it stands. Raises UnknownOperation."""
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
        """The newest operations, the last one first, of all jobs or one, of all kinds or one; `after` that id's."""
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
        """Ask that it end; one that waits never begins, one that runs ends as soon as it can, one that is over stays.

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
        """Ask all to end, wait a little, and call interrupted what still runs."""
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
            except MillraceError as error:  # the records cannot be written
                log.error("operation %s: how it ended cannot be written down: %s", asked.operation.id, error)
            finally:
                with self._lock:
                    self._going.pop(asked.operation.id, None)

    def _do(self, asked: _Asked) -> None:
        if asked.cancelled.is_set():
            self._end(asked, state=self._given_up())
            return
        self._set(asked, state=State.RUNNING)
        self._update(asked.operation)

        def progress(done: float | None, said: str) -> None:
            self._set(asked, progress=done, said=said)
            if asked.cancelled.is_set():
                raise Cancelled

        try:
            result = asked.act(progress, asked.cancelled)
        except Cancelled:
            self._end(asked, state=self._given_up())
        except Exception as error:  # the rim of an operation: nothing is swallowed, its problem says what it was
            if isinstance(error, MillraceError) and asked.cancelled.is_set():
                self._end(asked, state=self._given_up(), said=str(error))
                return
            if not isinstance(error, MillraceError):
                log.exception("operation %s (%s)", asked.operation.id, asked.operation.kind)
            self._end(asked, state=State.FAILED, problem=self._problem_of(error))
        else:
            self._end(asked, state=State.DONE, result=result)

    def _given_up(self) -> State:
        return State.INTERRUPTED if self._closing else State.CANCELLED

    def _set(self, asked: _Asked, **changes: Any) -> None:
        with self._lock:
            asked.operation = replace(asked.operation, **changes)

    def _end(self, asked: _Asked, **changes: Any) -> None:
        """Written first: who reads in between reads it as still running, never as gone."""
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
        left = (State.WAITING.value, State.RUNNING.value)
        with self._records.session() as session:
            session.execute(
                update(OperationRow)
                .where(OperationRow.state.in_(left))
                .values(state=State.INTERRUPTED.value, ended_at=self._now())
            )


@of_row
def _operation(row: OperationRow) -> Operation:
    return Operation(
        id=row.id,
        kind=row.kind,
        job=row.job,
        who=row.who,
        state=State(row.state),
        progress=row.progress,
        said=row.said,
        result=row.result,
        problem=row.problem,
        created=row.created_at,
        ended=row.ended_at,
    )
