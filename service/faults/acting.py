"""One run of a job in which one worker of each generation dies as planned.

What the deaths are is service.faults.plan's; whether the run came out as it should, service.faults.comparing's.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from millrace.points import LAST_WORDS, Fault, Point
from service.faults.plan import AtPoint, Death
from service.launcher.local import LocalLauncher
from service.launcher.nursery import Nursery, able
from service.launcher.process import OnLine
from service.launcher.restarts import RestartLimits
from service.launcher.run_folder import run_folder
from service.launcher.supervision import Outcome
from service.running import phases, preloaded
from service.spec import LoadedJob
from service.store import WORKERS, claimed
from trainer.history import History
from trainer.log import read

AT_ONCE = RestartLimits(max_restarts=1_000_000, window_s=0.0)
"""Restarts without a pause and, in effect, without a limit: deaths are what is asked for."""


class Deaths:
    """The deaths of one run: of its first generation, its second, and so on; those after the last live on."""

    def __init__(self, store: Path, planned: Iterable[Death], most: int) -> None:
        self.planned: Sequence[Death] = list(islice(planned, most))
        self.generation = 0
        self.died_at: dict[int, tuple[str, Point]] = {}
        """By generation: the worker that killed itself and the point."""
        self.closes: dict[int, Mapping[str, Any]] = {}
        """Every close that the log ever had, by number."""
        self._log = store / "log"

    def read_closes(self) -> None:
        """Take note of what the log says. A generation prunes files of those before it only: once in each will do."""
        self.closes |= {number: record.body for number, record in History.of(read(self._log)).closes.items()}

    def faults(self, generation: int, worker: str) -> Sequence[Fault]:
        """What a worker that starts now is told; see service.launcher.generation.Faults."""
        if generation != self.generation:
            self.generation = generation
            self.read_closes()
        death = self.planned[generation - 1] if generation <= len(self.planned) else None
        if isinstance(death, AtPoint) and death.worker == worker:
            return [Fault(point=death.point, hit=death.hit)]
        return []

    def on_line(self, worker: str, text: str) -> None:
        """Listen for last words, which are heard before the next generation starts."""
        if text.startswith(LAST_WORDS):
            self.died_at[self.generation] = (worker, Point(text.removeprefix(LAST_WORDS)))


def run(job: LoadedJob, deaths: Deaths, on_line: OnLine) -> Outcome:
    """Run `job` in its store, begun anew, to its end. Main thread only."""

    def heard(worker: str, text: str) -> None:
        deaths.on_line(worker, text)
        on_line(worker, text)

    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=True))
        folder = held.enter_context(run_folder(store / WORKERS))
        starter = held.enter_context(Nursery(preloaded(job.spec.cluster))) if able() else None
        launcher = LocalLauncher(
            job.spec.name, phases(job, folder), heard, starter=starter, restarts=AT_ONCE, faults=deaths.faults
        )
        outcome = launcher.run()
        deaths.read_closes()
        return outcome
