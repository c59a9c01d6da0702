"""One run of a job in which one worker of each generation dies, or is taken for dead, as planned.

service.faults.deaths draws the deaths; service.faults.rounds judges the results.
"""

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from headrace.errors import HeadraceError
from headrace.failpoints import LAST_WORDS, ArmedFailpoint, Failpoint
from headrace.periodic import periodically
from headrace.service.cluster.child import Spawner, Starter, WorkerProcess, local_starter
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.cluster.store import WORKERS, claimed
from headrace.service.cluster.supervision import RestartLimits, RunOutcome
from headrace.service.cluster.worker_plan import preloaded
from headrace.service.faults.deaths import EVERYBODY, EXPORTER, OF_EXPORTERS, RANK_0, AtFailpoint, AtInstant, Death
from headrace.service.spec.job import LoadedJob
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log import read_history
from headrace.trainer.journal.log_file import AnyRecord, RecordPlace, file_name, record_of

# Workers that are stopped while their launcher takes them for dead, as on a machine that is cut off for a while.

MAX_LINES = 100
"""Lines of output kept of a process that was taken for dead."""


class _Lines:
    """The output of a process as its launcher reads it. It ends when the process is taken for dead."""

    def __init__(self) -> None:
        self.put: queue.SimpleQueue[str] = queue.SimpleQueue()  # no bound: the launcher reads it at once

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readline(self, _limit: int) -> str:
        return self.put.get()


class HeldProcess:
    """A process that its launcher may take for dead. It then lives until `end`. See WorkerProcess."""

    def __init__(self, child: WorkerProcess) -> None:
        self._child, self._lines = child, _Lines()
        self.output = cast(TextIO, self._lines)
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        """Its output after it was taken for dead."""
        self._reported: Future[int] = Future()  # the exit code for the launcher
        self._ended: Future[int] = Future()
        self._lock = threading.Lock()  # it ends first, or it is taken for dead first
        self._taken_for_dead = False
        self._reader = threading.Thread(target=self._read, name="held-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="held-wait", daemon=True).start()

    def terminate(self) -> None:
        if not self._taken_for_dead:
            self._child.terminate()

    def kill(self) -> None:
        if not self._taken_for_dead:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        self._child.signal(number)

    def wait(self) -> int:
        return self._reported.result()

    def release(self) -> None:
        if not self._taken_for_dead:
            self._child.release()

    def stop(self) -> bool:
        """Stop the process and report to its launcher that it was killed; False where it ended before."""
        with self._lock:
            if self._reported.done():
                return False
            self._child.signal(signal.SIGSTOP)
            self._taken_for_dead = True
        self._lines.put.put("")
        self._reported.set_result(-signal.SIGKILL)
        return True

    def end(self, within_s: float) -> int | None:
        """After `stop` and SIGCONT: its exit code if it ends by itself in time, else None. It is gone in any case."""
        try:
            return self._ended.result(within_s)
        except TooLate:
            self._child.kill()
            self._ended.result()
            return None
        finally:
            self._child.release()
            self._reader.join()

    def _read(self) -> None:
        with self._child.output as output:
            while line := output.readline():
                if self._taken_for_dead:
                    self.lines.append(line.rstrip("\n"))
                else:
                    self._lines.put.put(line)
        self._lines.put.put("")

    def _wait(self) -> None:
        code = self._child.wait()
        self._ended.set_result(code)
        with self._lock:
            if not self._taken_for_dead:
                self._reported.set_result(code)


class HoldingStarter:
    """A starter of such processes. It knows the newest one of each worker's name."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.children: dict[str, HeldProcess] = {}

    def start(self, command: Sequence[str], folder: Path) -> HeldProcess:
        child = HeldProcess(self._starter.start(command, folder))
        self.children[Path(command[-1]).stem] = child  # the name of its configuration file
        return child


# Finds and kills the exporter of the job that this process runs. It is a child of rank 0, so /proc is searched.

MODULE = b"headrace.trainer.exports"
"""The module that an exporter runs."""
PROC = Path("/proc")
PARENT = 1
"""Number of the field in /proc/<n>/stat, from 0 after the name."""


def kill_exporter() -> bool:
    """Kill the exporter; whether there was one."""
    found = [pid for pid in map(int, filter(str.isdecimal, os.listdir(PROC))) if _exports(pid) and _is_ours(pid)]
    with suppress(ProcessLookupError):
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return bool(found)
    return False


def _exports(pid: int) -> bool:
    try:
        return MODULE in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[PARENT])
    except OSError:
        return 0


AT_ONCE = RestartLimits(max_restarts=1_000_000, window_s=0.0)
"""Restarts without a pause and, in effect, without a limit: the deaths are wanted."""
MAX_UNASKED = 4
"""Most generations of a run that end in another way than planned; then the run is given up."""
POLL_S = 0.01
"""Interval at which the log is read for new passes."""
STOPPED_S = 3.0
"""Longest time that a worker stays stopped: it may hold the lock for which the next generation waits."""
END_S = 60.0
"""Longest time for a trainer that was taken for dead, and continues, to notice it and end: twice the polling interval
of trainer.journal.succession, and more on a loaded machine. A shard does not check."""


class TooManyDeaths(HeadraceError):
    """Workers die that no plan kills."""


@dataclass
class DeathRecord:
    """A death as it happened."""

    death: Death
    """The planned death."""
    generation: int
    point: Failpoint | None = None
    """The failpoint at which the worker died; None where it was killed or stopped at an instant."""
    at_s: float = 0.0
    recovered_s: float | None = None
    """Time from the death to the first new close, of an exporter to the first complete export; None where another death
    came first."""
    old: dict[str, HeldProcess] = field(default_factory=dict)
    """Workers that were taken for dead."""
    old_codes: dict[str, int | None] = field(default_factory=dict)
    """Their exit codes; None for those that did not end by themselves."""
    continued: bool = False
    """True if the workers in `old` run again."""

    @property
    def elsewhere(self) -> Failpoint | None:
        """The failpoint at which rank 0 died, where the planned death did not happen."""
        planned = self.death.point if isinstance(self.death, AtFailpoint) else None
        return None if self.point is planned else self.point

    def resume(self) -> None:
        """Let the workers that were taken for dead run again."""
        self.continued = True
        for child in self.old.values():
            child.signal(signal.SIGCONT)


@dataclass
class LogTail:
    """Reads the log of a generation as it grows."""

    log: Path
    generation: int
    part: int = 1
    offset: int = 0

    def new_records(self) -> list[AnyRecord]:
        """The records appended since the last call."""
        path = self.log / file_name(self.generation, self.part)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        records = [record_of(line, RecordPlace(path, 0)) for line in whole.splitlines(keepends=True)]
        if not whole and (self.log / file_name(self.generation, self.part + 1)).exists():
            self.part, self.offset = self.part + 1, 0
        return [record for record in records if record is not None]


class Deaths:
    """The deaths of one run, one per generation. After the last planned one the run continues to its end."""

    def __init__(self, store: Path, planned: Iterator[Death], fallback: ArmedFailpoint | None = None) -> None:
        """`fallback`: where rank 0 dies if the planned failpoint is not reached; that death is then tried again."""
        self.died: list[DeathRecord] = []
        self.missed: list[AtFailpoint] = []
        """Deaths at failpoints that were not reached, twice."""
        self.unasked: dict[int, str] = {}
        """Generations that ended in another way than planned, and how."""
        self.closes: dict[int, Mapping[str, Any]] = {}
        """Every close ever logged, by number."""
        self.workers = HoldingStarter(Spawner())
        self._log, self._planned, self._fallback = store / "log", planned, fallback
        self.log = store.with_name(f"{store.name}-log")
        """A folder with every record ever logged, once the run is over."""
        self._current: Death | None = None
        self._again: AtFailpoint | None = None
        self._tail = LogTail(self._log, 0)
        self._began_s = 0.0
        self._num_closes = self._num_exports = 0
        self._closed_s = 0.0
        """When the generation last closed a pass or cut an export."""
        self._acted, self._reason = False, ""
        self._lock = threading.Lock()  # for the launcher's thread, the readers of workers and the watch

    @property
    def waiting(self) -> Death | None:
        """The planned death that did not happen because the stream ended."""
        return None if self._last() else self._current

    def read_closes(self) -> None:
        """Read every close ever logged, once the run is over."""
        with self._lock:  # the watch still looks
            self._keep_log()
            self.closes = {number: record.body for number, record in read_history(self.log).closes.items()}

    def _keep_log(self) -> None:
        """Link the log's files, so that pruning does not remove them. An old rank 0 may still write to one of them."""
        self.log.mkdir(exist_ok=True)
        for path in self._log.glob("*.log"):
            with suppress(FileExistsError, FileNotFoundError):
                (self.log / path.name).hardlink_to(path)

    def faults(self, generation: int, worker: str) -> Sequence[ArmedFailpoint]:
        """The failpoints of a worker that starts now; see service.cluster.generation.Faults."""
        with self._lock:
            if generation != self._tail.generation:
                self._next(generation)
            death = self._current
        found = []
        if self._fallback is not None and isinstance(death, AtFailpoint) and worker == RANK_0:
            found.append(self._fallback)
        if isinstance(death, AtFailpoint) and worker == (RANK_0 if death.worker == EXPORTER else death.worker):
            found.append(ArmedFailpoint(point=death.point, hit=death.hit))  # the later one counts
        return found

    def on_line(self, worker: str, text: str) -> None:
        """Note the last words of workers. They arrive before the next generation starts."""
        if worker == LAUNCHER:
            self._reason = text
        if text.startswith(LAST_WORDS):
            point = Failpoint(text.removeprefix(LAST_WORDS))
            with self._lock:
                self._note(point)
                if point in OF_EXPORTERS:  # rank 0 passed them on
                    self._next_within()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Kill at instants and measure, on a thread, while the context lasts. No process is left at its end."""

        def look() -> None:
            with self._lock:
                self._look(time.monotonic())

        try:
            with periodically(look, POLL_S, "faults"):
                yield
        finally:
            self._end_old()

    def _next(self, generation: int) -> None:
        """Another generation starts: choose its death."""
        self._look(time.monotonic())
        last = self._last()
        if self._current is not None and last is None:
            self.unasked[self._tail.generation] = self._reason
            if len(self.unasked) > MAX_UNASKED:
                raise TooManyDeaths(
                    f"{len(self.unasked)} generations ended in another way than planned: {self._reason}"
                )
        missed = self._current if isinstance(self._current, AtFailpoint) else None
        if missed is not None and (last is None or last.point is not missed.point) and self._again is None:
            self._again = missed
        else:
            if self._again is not None and (last is None or last.point is not self._again.point):
                self.missed.append(self._again)
            self._again, self._current = None, next(self._planned, None)
        self._tail = LogTail(self._log, generation)
        self._reset_counts()
        self.workers.children.clear()

    def _next_within(self) -> None:
        """An exporter died and the generation continues: choose its next death."""
        self._again, self._current = None, next(self._planned, None)
        assert self._current is None or isinstance(self._current, AtInstant), "a running worker cannot be armed"
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._began_s, self._num_closes, self._num_exports, self._acted = time.monotonic(), 0, 0, False

    def _last(self) -> DeathRecord | None:
        """The present death, if it has happened."""
        last = self.died[-1] if self.died else None
        return last if last and (last.generation, last.death) == (self._tail.generation, self._current) else None

    def _look(self, now_s: float) -> None:
        self._keep_log()
        self._count(self._tail.new_records() if self._tail.generation else [], now_s)
        death = self._current
        if isinstance(death, AtInstant) and not self._acted and self._is_due(death, now_s):
            self._act(death)
        for died in (each for each in self.died if each.old and not each.continued):
            late = now_s - died.at_s > STOPPED_S or (self._num_closes and died.generation < self._tail.generation)
            if late:
                died.resume()

    def _count(self, records: Sequence[AnyRecord], now_s: float) -> None:
        """Count new closes and exports, and note recoveries."""
        contents = [record.content for record in records]
        closes = sum(isinstance(each, log_records.PassClose) for each in contents)
        exports = sum(isinstance(each, log_records.ExportOperation) for each in contents)
        if any(isinstance(each, log_records.ExportedOperation) and each.outcome == "complete" for each in contents):
            for died in self.died:
                if died.death.worker == EXPORTER and died.recovered_s is None and died.elsewhere is None:
                    died.recovered_s = now_s - died.at_s
        if closes and not self._num_closes and self.died and self.died[-1].generation == self._tail.generation - 1:
            self.died[-1].recovered_s = now_s - self.died[-1].at_s
        counted = exports if isinstance(self._current, AtInstant) and self._current.exports else closes
        self._closed_s = now_s if counted else self._closed_s
        self._num_closes, self._num_exports = self._num_closes + closes, self._num_exports + exports

    def _is_due(self, death: AtInstant, now_s: float) -> bool:
        if self._num_closes < death.closes or self._num_exports < death.exports:
            return False
        return now_s - (self._closed_s if death.closes or death.exports else self._began_s) >= death.delay_s

    def _act(self, death: AtInstant) -> None:
        if self._last() is not None:  # it has died in another way
            return
        if death.worker == EXPORTER:
            if kill_exporter():
                self._note(None)
                self._next_within()
            return
        victims = self.workers.children
        if death.worker != EVERYBODY:
            victims = {death.worker: victims[death.worker]} if death.worker in victims else {}
        if not victims:  # not started yet
            return
        self._acted = True
        self._note(None)
        if death.stopped:
            self.died[-1].old = {name: child for name, child in victims.items() if child.stop()}
            return
        for child in victims.values():
            child.kill()

    def _note(self, point: Failpoint | None) -> None:
        assert self._current is not None
        self.died.append(DeathRecord(self._current, self._tail.generation, point, time.monotonic()))

    def _end_old(self) -> None:
        for died in self.died:
            died.resume()
            trainers_first = sorted(died.old, reverse=True)
            died.old_codes = {name: died.old[name].end(end_s(name)) for name in trainers_first}


def end_s(worker: str) -> float:
    """Longest time for a worker to notice that it was replaced, and to end."""
    return END_S if worker.startswith("trainer") else 0.0


def run(job: LoadedJob, deaths: Deaths, on_line: OnLine, *, fresh: bool = True) -> RunOutcome:
    """Run `job` to its end in its store, which is emptied before if it begins `fresh`. Main thread only."""

    def both(worker: str, text: str) -> None:
        deaths.on_line(worker, text)
        on_line(worker, text)

    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=fresh))
        folder = held.enter_context(run_folder(store / WORKERS))
        starter = held.enter_context(local_starter(preloaded(job.spec.cluster)))
        held.enter_context(deaths.watching())
        deaths.workers = HoldingStarter(starter)
        workers = held.enter_context(ProcessLauncher(deaths.workers))
        launcher = JobRunner(
            job.spec.name,
            GenerationPlans(job, folder).phases(),
            both,
            launcher=workers,
            restarts=AT_ONCE,
            faults=deaths.faults,
        )
        outcome = launcher.run()
        deaths.read_closes()
        return outcome
