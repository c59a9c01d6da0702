"""The replay log: rank 0's source of passes. It logs the close of each pass, or compares it with the logged one.

After a restart the logged passes come first, exactly as logged, and their closes are compared. The planner's passes
follow. Writing the log's files is left to trainer.journal.log, the choice of the commit to trainer.rank0.recovery.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Literal

from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.retry import Retrier
from headrace.trainer.journal.job_history import ReplayedPass
from headrace.trainer.journal.log import Log, LogFull
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import ActingOperation, GapOperation, Operation, PartitionsOperation, PassClose
from headrace.trainer.rank0.planner import LOG_WAITS, Planner, StreamEnded

COMPARED = ("events", "samples", "rejected", "day", "left_out")
"""These, and the digests, must be the same again when a pass is replayed."""

log = logging.getLogger(__name__)


class ReplayDiffers(HeadraceError):
    """A replayed pass differs from the logged one: its result depends on more than the log."""


def differences(logged: PassClose, found: PassClose) -> list[str]:
    """The differences between two closes, in words."""
    words = [
        f"{name} were {before}, are {now}"
        for name in COMPARED
        if (before := getattr(logged, name)) != (now := getattr(found, name))
    ]
    digests = [name for name, digest in found.digests.items() if logged.digests.get(name) != digest]
    return [*words, f"digests differ in {', '.join(digests)}"] if digests else words


class LogPlanJournal:
    """Writes the planner's records to the log, on the planner's thread. See planner.PlanJournal."""

    def __init__(self, joblog: Log) -> None:
        self._log = joblog
        self.planned_at: dict[int, int] = {}
        """Record number of each open plan, by pass."""

    def operation(self, operation: PartitionsOperation | GapOperation) -> None:
        """Log an operation."""
        self._log.append(operation)

    def plan(self, plan: PassPlan) -> None:
        """Log a plan."""
        self.planned_at[plan.number] = self._log.append(plan).number
        failpoint(Failpoint.PLAN_LOGGED)


class ReplayLog:
    """The replay log. Calls come from one thread, except where stated."""

    def __init__(
        self,
        joblog: Log | None,
        journal: LogPlanJournal | None,
        replay: Iterable[ReplayedPass],
        planner: Planner | None,
        on_mismatch: Literal["fail", "warn"],
        max_full_s: float,
        unlike: Sequence[str] = (),
    ) -> None:
        """Without `joblog` nothing is written (a rerun). Without `planner` no passes follow the logged ones.

        Training waits up to `max_full_s` while the log's disk is full. `unlike`: why replayed passes with a close
        differ from what exports may hold, although their closes are equal.
        """
        self._log, self._journal, self._planner, self._on_mismatch = joblog, journal, planner, on_mismatch
        self._unlike = unlike
        self._retrier = Retrier(LogFull, LOG_WAITS, max_full_s)
        self._ahead = deque(replay)
        self._open: dict[int, ReplayedPass] = {}
        self._unwritten = count(1)
        self._planned_at = {} if journal is None else journal.planned_at
        self._planned_at |= {logged.plan.number: logged.planned_at for logged in self._ahead}
        self.needed_from = 0
        """First log record that a replay after the last close needs."""
        self.compared: list[tuple[int, list[str]]] = []
        """Replayed passes, each with its differences."""

    @property
    def replaying(self) -> bool:
        """True if a logged close is still to be replayed."""
        return any(logged.close is not None for logged in (*self._open.values(), *self._ahead))

    @property
    def forked(self) -> bool:
        """True if a replayed pass differed."""
        return any(found for _, found in self.compared)

    @property
    def paused(self) -> bool:
        """True if the job is paused, so no new passes are planned. Any thread."""
        return self._planner is not None and not self._ahead and self._planner.paused

    @property
    def trouble(self) -> str:
        """The reason why training waits, for a status; empty if it does not. Any thread."""
        waits = self._retrier.trouble or ("" if self._log is None else self._log.trouble)
        return waits if waits or self._planner is None else self._planner.trouble

    @property
    def missing(self) -> Sequence[str]:
        """Things that the source does not find, for a status; see Planner. Any thread."""
        return () if self._planner is None else self._planner.missing

    def request(self, number: int, positions: Mapping[str, int], num_positions: int) -> None:
        """Request the next pass; see Planner."""
        if not self._ahead and self._planner is not None:
            self._planner.request(number, positions, num_positions)

    def take(self, wait_s: float) -> PassPlan | StreamEnded | None:
        """The next pass, if it is ready; see Planner."""
        if self._ahead:
            logged = self._ahead.popleft()
            self._open[logged.plan.number] = logged
            return logged.plan
        return StreamEnded() if self._planner is None else self._planner.take(wait_s)

    def carry(self, number: int, num_ranks: int, learn: bool) -> PassPlan | None:
        """At the stream's end: an empty, logged pass for operations. None where no new passes may be planned."""
        journal = self._journal
        if journal is None or self._planner is None or self._ahead:
            return None
        plan = PassPlan(number, ((),) * num_ranks, learn, last=True)
        self._retrier.call(lambda: journal.plan(plan))
        return plan

    def operations(self, number: int) -> Sequence[Operation] | None:
        """The operations at the close of a replayed pass, in order; None: the pass has no logged close."""
        logged = self._open.get(number)
        return None if logged is None or logged.close is None else logged.operations

    def note(self, operation: ActingOperation) -> int:
        """Log an operation, from any thread; returns the number of its record. Raises as `Log.append`.

        Where nothing is written, only the deciders of a trial note any; a rerun has those of its log."""
        if self._log is None:
            return next(self._unwritten)
        number = self._log.append(operation).number
        failpoint(Failpoint.OPERATION_LOGGED)
        return number

    def operate(self, operation: ActingOperation) -> int:
        """Like `note`, on the loop's thread; a full log is tried again."""
        return self._retrier.call(lambda: self.note(operation))

    def close(self, close: PassClose) -> None:
        """A pass ended: log its close, or compare it with the logged one.

        Raises ReplayDiffers where the spec asks for it.
        """
        number = close.number
        logged = self._open.pop(number, None)
        if logged is None or logged.close is None:
            joblog = self._log
            write = None if joblog is None else partial(joblog.append, close)
            closed_at = 0 if write is None else self._retrier.call(write).number
            failpoint(Failpoint.CLOSED)
        else:
            closed_at = logged.closed_at
            found = differences(logged.close, close)
            self.compared.append((number, [*found, *self._unlike]))
            if found:
                self._report(number, found)
            failpoint(Failpoint.REPLAYED)
        self._planned_at.pop(number, None)
        self.needed_from = min([*list(self._planned_at.values()), closed_at + 1])

    def _report(self, number: int, found: list[str]) -> None:
        text = (
            f"the replay of pass {number} differs from the log: {'; '.join(found)}. The same events gave another "
            f"result: the output of a pipe command depends on more than its input (time, randomness, state "
            f"carried between segments), or libraries or hardware have changed"
        )
        if self._on_mismatch == "fail":
            raise ReplayDiffers(f'{text}; fix the cause, or continue from here with commit.on_replay_mismatch = "warn"')
        log.warning("%s; the job continues, forked", text)
