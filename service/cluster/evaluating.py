"""The evaluator of a job, as its launcher sees it: a process beside the workers that never stops them.

service.predict.evaluator is the process. It is started again after each death, at growing intervals.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.durable import writing
from headrace.lifecycle import ExitCode, error_in
from headrace.retry import Backoff
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.local import LocalWorker
from headrace.service.cluster.run_folder import write_private
from headrace.service.cluster.runtime import LAUNCHER, PYTHON, OnLine
from headrace.service.cluster.supervision import format_exit
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.checkpoint.rewind import Lineage, claims
from headrace.trainer.exports.destination import HOLDER
from headrace.trainer.exports.scores import EVALUATOR, Score, Scores
from headrace.trainer.job_status import EvaluatorStatus
from headrace.trainer.predict.after_training import gated_streams

COMMAND = (*PYTHON, "headrace.service.predict.evaluator")
PAUSES = Backoff.doubling(1.0, 120.0)
"""Between a death and the next start; deaths in a row are counted anew once a version is scored after them."""
STOP_S = 5.0
"""Longest time for the process to end after SIGTERM; then it is killed. The next run goes on with its version."""
FINISH_DEATHS = 5
"""At the end of a job the rest is not waited for after so many deaths in a row."""
FINISH_LOOK_S = 0.2


class Evaluating:
    """The process and what is known of it. `run` has a thread of its own; the rest is for any thread."""

    def __init__(self, job: LoadedJob, folder: Path, on_line: OnLine) -> None:
        """`folder`: for its private files, new."""
        self._job, self._folder, self._on_line = job, folder, on_line
        self._scores = Scores(job.store)
        self._ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._worker: LocalWorker | None = None
        self._restarts = 0
        self._deaths, self._scored_before = 0, frozenset(self._scores.by_commit())  # in a row, and at the last of them
        self._trouble = ""

    def run(self) -> None:
        """Keep the process running until `stop`."""
        while not self._stopping.is_set():
            try:
                code = self._run_once()
            except OSError as error:
                code, why = ExitCode.RETRY, f"it cannot be started: {error}"
            else:
                why = self._last_words(code)
            if self._stopping.is_set():
                return
            self._deaths = self._deaths_in_row() + 1
            self._scored_before = frozenset(self._scores.by_commit())
            self._restarts += 1
            self._trouble = why
            pause_s = PAUSES.pause_s(self._deaths)
            self._on_line(LAUNCHER, f"the evaluator ended: {why}; starting it again in {pause_s:g} s; the job goes on")
            self._stopping.wait(pause_s)

    def _run_once(self) -> int:
        """The exit code of one process."""
        child = Spawner().start((*COMMAND, "--config", str(self._folder / "evaluator.json")), self._job.folder)
        worker = LocalWorker(EVALUATOR, child, self._on_line, lambda _name, code: self._ends.put(code))
        self._worker = worker
        code = self._ends.get()
        if code is None:  # asked to stop
            worker.terminate()
            try:
                code = self._ends.get(timeout=STOP_S)
            except queue.Empty:
                worker.kill()
                code = self._ends.get()
        assert code is not None, "of the process"
        worker.kill()  # it is gone; this waits for its last lines
        return code

    def _last_words(self, code: int) -> str:
        lines = self._worker.last_lines() if self._worker is not None else []
        error = error_in(lines).partition("\n")[0]
        return f"{format_exit(code)}{error and f': {error}'}"

    def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        self._ends.put(None)

    def hurry(self) -> None:
        """End a wait of `finish`."""
        self._hurry.set()

    def finish(self) -> None:
        """Wait until all versions are scored, at the end of the job; not where the process dies again and again."""
        told = False
        while not self._hurry.is_set() and self._deaths_in_row() < FINISH_DEATHS:
            left = unscored(self._job, self._scores)
            if not left:
                return
            if not told:
                self._on_line(LAUNCHER, f"waiting for the evaluator: {len(left)} versions are not scored yet")
                told = True
            self._hurry.wait(FINISH_LOOK_S)
        self._on_line(LAUNCHER, "the rest is not scored; the next run goes on with it")

    def status(self) -> EvaluatorStatus:
        """Its newest score, and how it fares."""
        return status_of(self._scores.newest(), len(self._scores.by_commit()), self._restarts, self._trouble_now())

    def _trouble_now(self) -> str:
        """Why it does not run; "" once it has scored a version since."""
        return self._trouble if self._deaths_in_row() > 1 else ""

    def _deaths_in_row(self) -> int:
        """0 once a version is scored after them."""
        return self._deaths if self._scores.by_commit().keys() <= self._scored_before else 0


def unscored(job: LoadedJob, scores: Scores) -> list[str]:
    """The commits that are to be scored, the next one first: those whose exports wait for a score, then the newest.

    Commits that the present state does not come from are left out.
    """
    section, commits, done = job.spec.evaluator, Commits(job.store), scores.by_commit()
    assert section is not None, "the job has an evaluator"
    left = [name for name in reversed(commits.names()) if name not in done]
    if not left:
        return []
    holders, gated = commits.holders(), {HOLDER + stream for stream in gated_streams(job.spec)}
    waiting = [name for name in left if not gated.isdisjoint(holders.get(name, ()))]
    if section.of == "exports":
        return waiting
    past = Lineage.of(claims(job.store / "log"))
    return [*waiting, *(name for name in left if name not in waiting and past.holds(name))]


def status_of(newest: Score | None, num_scored: int, restarts: int, trouble: str) -> EvaluatorStatus:
    """The status of an evaluator, from its newest score."""
    if newest is None:
        return EvaluatorStatus(restarts=restarts, trouble=trouble)
    tasks = {
        task: {name: value for name, value in found.items() if not isinstance(value, dict)}
        for task, found in newest.tasks.items()
    }
    return EvaluatorStatus(
        version=newest.version,
        commit=newest.commit,
        at=newest.at,
        samples=newest.samples,
        tasks=tasks,
        error=newest.error,
        scored=num_scored,
        restarts=restarts,
        trouble=trouble,
    )


@contextmanager
def evaluating(job: LoadedJob, folder: Path, on_line: OnLine) -> Iterator[Evaluating | None]:
    """The evaluator of a job that has one, running while the context lasts; None: it has none.

    `folder`: the private folder of the run.
    """
    if job.spec.evaluator is None:
        yield None
        return
    own = folder / EVALUATOR
    with writing(own):
        own.mkdir(mode=0o700)
    write_private(own / "evaluator.json", {"spec": job.whole(), "folder": str(job.folder), "private": str(own)})
    running = Evaluating(job, own, on_line)
    thread = threading.Thread(target=running.run, name=EVALUATOR, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join()
