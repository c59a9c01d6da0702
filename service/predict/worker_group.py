"""The processes of one prediction: shards that hold the rows, workers that predict.

They are started, watched and ended here. None is left when the context ends. Their plan is in
service.cluster.worker_plan.
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, SpecError, Unavailable
from headrace.lifecycle import ExitCode, error_in
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.server.commands import RestoreCommit
from headrace.service.cluster.elastic import ElasticLauncher, ElasticRules, GoOn, GoOnWith, decide
from headrace.service.cluster.runtime import KILL_S, LAUNCHER, CannotStart, Launcher, OnLine, WorkerHandle, WorkerSpec
from headrace.service.cluster.supervision import format_exit
from headrace.service.cluster.worker_plan import PredictionWorkers
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import read_commit
from headrace.trainer.spec.history_tables import history_tables

START_S, RESTORE_S = 120.0, 3600.0
"""Longest time for the shards to start, and to read the rows."""
POLL_S = 0.1
"""Interval at which a wait checks for cancellation."""


class PredictionFailed(HeadraceError):
    """A worker ended on an error that would come again."""


class PredictionCancelled(HeadraceError):
    """The prediction was cancelled. Its finished parts stay, and a rerun continues from them."""

    def __init__(self) -> None:
        super().__init__("the prediction was cancelled; a rerun continues from the parts that are there")


class WorkerDied(Unavailable):
    """A worker ended for a reason that may pass."""


@dataclass(frozen=True, slots=True)
class ElasticPrediction:
    """A prediction that takes the workers that are there."""

    least: int
    """It waits while fewer could predict."""
    plan_of: Callable[[int], PredictionWorkers]
    """Plans for so many that predict."""


class WorkerGroup:
    """One thread; `on_line` is called on others."""

    def __init__(self, job: LoadedJob, launcher: Launcher, on_line: OnLine, check: Callable[[], None]) -> None:
        """`check` raises where the prediction was cancelled."""
        self._job, self._launcher, self._on_line, self._check = job, launcher, on_line, check
        self._workers: dict[str, WorkerHandle] = {}
        self._shards: set[str] = set()
        self._ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill(within_s=0)  # all at once
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.kill(deadline.left_s())

    def run(
        self,
        plan: PredictionWorkers,
        commit: Path,
        tick: Callable[[], None],
        elastic: "ElasticPrediction | None" = None,
    ) -> None:
        """Predict to the end, with the rows of `commit`. `tick` is called meanwhile.

        Raises SpecError, PredictionFailed or WorkerDied for the end of a worker, one that cannot be started or a shard
        that does not answer, and what `check` raises.
        """
        plan = self._placed(plan, elastic)
        with self._deaths_of_shards():
            addresses = self._start_shards(plan, commit) if plan.shards else []
        self._start([replace(spec, config={**spec.config, "shards": addresses}) for spec in plan.predictors], plan)
        left = {spec.name for spec in plan.predictors}
        while left:
            left -= self._take_end()
            tick()

    def _placed(self, plan: PredictionWorkers, elastic: "ElasticPrediction | None") -> PredictionWorkers:
        """Wait until there is a place for each worker, for as long as it takes; the plan, or one with fewer."""
        self._launcher.prepare([*plan.shards, *plan.predictors], plan.generation)
        said = ""
        while (waits := self._launcher.waits_for()) is not None:
            self._check()
            if elastic is not None and isinstance(found := self._decided(plan, elastic.least), GoOnWith):
                self._on_line(LAUNCHER, f"the prediction {found.reason}")
                return self._placed(elastic.plan_of(found.trainers), elastic)
            if waits != said:
                self._on_line(LAUNCHER, f"the prediction {waits}")
            said = waits
            time.sleep(POLL_S)
        return plan

    def _decided(self, plan: PredictionWorkers, least: int) -> GoOn | GoOnWith:
        now, timeout_s = len(plan.predictors), self._job.spec.cluster.node_timeout
        assert isinstance(self._launcher, ElasticLauncher), "the check of the job has refused any other"
        rules = ElasticRules(least=least, most=now, node_timeout_s=timeout_s, settle_s=0.0)
        return decide(now, self._launcher.attendance(), rules, runs=False)

    @contextmanager
    def _deaths_of_shards(self) -> Iterator[None]:
        """A shard that does not answer has died, perhaps with its machine: raise WorkerDied, or what its end tells."""
        try:
            yield
        except WorkerDied:
            raise
        except (Unavailable, DeadlineExceeded) as error:
            self._take_end()
            raise WorkerDied(f"the shards have not read the rows: {error}") from error

    def _start_shards(self, plan: PredictionWorkers, commit: Path) -> list[str]:
        """Start them and have them read the rows of the commit; their addresses."""
        self._shards = {spec.name for spec in plan.shards}
        self._start(plan.shards, plan)
        addresses = self._addresses(plan.shards)
        found = read_commit(commit)
        cluster = self._job.spec.cluster
        shards = RemoteShards(
            addresses,
            {**self._job.spec.tables, **history_tables(Schema.of(self._job.spec.slots))},
            ShardCaller(
                rank=0,
                world=len(plan.predictors),
                generation=plan.generation,
                secret=plan.secret,
                max_message_bytes=cluster.max_message,
                identity=plan.head,
                wire=plan.wire,
                silent_s=cluster.node_timeout,
            ),
            Deadline.after(START_S),
        )
        try:
            shards.call(RestoreCommit(found.folder, found.shards, found.version), Deadline.after(RESTORE_S))
        finally:
            shards.close()
        return addresses

    def _addresses(self, shards: Sequence[WorkerSpec]) -> list[str]:
        """Wait until all shards listen."""
        deadline = Deadline.after(START_S)
        while None in (found := [self._launcher.rendezvous.address(spec) for spec in shards]):
            self._take_end()
            if deadline.passed():
                raise DeadlineExceeded(f"shards did not come up within {START_S:g} s")
        return [address for address in found if address is not None]

    def _start(self, specs: Sequence[WorkerSpec], plan: PredictionWorkers) -> None:
        try:
            handles = self._launcher.start(
                specs, plan.generation, on_line=self._on_line, on_exit=lambda name, code: self._ends.put((name, code))
            )
        except CannotStart as error:
            raise WorkerDied(str(error)) from error
        self._workers |= {handle.name: handle for handle in handles}

    def _take_end(self) -> set[str]:
        """Wait a moment for a worker's end; the name of one that ended well. Raises for any other end."""
        self._check()
        try:
            name, code = self._ends.get(timeout=POLL_S)
        except queue.Empty:
            return set()
        worker = self._workers[name]
        worker.kill()  # it is gone; this waits for its last lines
        if code == ExitCode.DRAINED and name not in self._shards:
            return {name}
        raise error_of(name, code, worker.last_lines())


def error_of(worker: str, code: int, last_lines: Sequence[str]) -> HeadraceError:
    """The error for the end of a worker, from its exit code and its last lines of output."""
    message = error_in(last_lines)
    if code == ExitCode.BAD_CONFIG:
        return SpecError(message or f"{worker}: {format_exit(code)}")
    if code == ExitCode.FAILED:
        return PredictionFailed(message or f"{worker}: {format_exit(code)}")
    shown = message or "\n".join(last_lines) or "(none)"
    return WorkerDied(f"{worker} ended first: {format_exit(code)}; its last words:\n{shown}")
