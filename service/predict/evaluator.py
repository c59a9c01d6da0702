"""The evaluator's process: `python -m headrace.service.predict.evaluator --config FILE`.

It measures versions of a job that trains, as `headrace evaluate` does, and appends a line for each to the scores in the
store (trainer.exports.scores). service.cluster.evaluating starts it, and starts it again after a death: parts of the
version that was in progress stay, and its line is written once.
"""

import json
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace import documents, worker_process
from headrace.config import Section
from headrace.deadline import Deadline
from headrace.durable import REAL, locked, write_whole, writing
from headrace.errors import HeadraceError, Unwritable
from headrace.lifecycle import ExitCode, on_stop_signal
from headrace.secrets import without_keys
from headrace.service.cluster.evaluating import unscored
from headrace.service.predict.prediction import OF_A_RUN, metrics_line, predict
from headrace.service.predict.worker_group import PredictionCancelled
from headrace.service.spec.job import LoadedJob, job_of
from headrace.trainer.checkpoint.commits import Commits, order_of
from headrace.trainer.exports.scores import EVALUATOR, Score, Scores
from headrace.trainer.predict.config import EvaluatorSection, InputSection
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.prediction_plan import OutputTaken, newest_ranges

LOCK_S = 60.0
"""Longest wait at the start for an evaluator that was killed to be gone."""
LOOK_S = 0.5
"""Interval at which commits are looked at."""
LOCK, WORK, INPUT = "lock", "work", "input.json"
"""In the store's folder of the evaluator: its lock, and versions in progress, each with its output and its input."""


class EvaluatorConfig(Section):
    """Configuration of the process, as JSON."""

    spec: dict[str, Any] = Field(repr=False)
    """The spec as it was written, with its secrets."""
    folder: Path
    """Folder of the job file."""
    private: Path
    """Folder for configurations of workers, which hold secrets."""


class Evaluator:
    """Scores one version after another. One thread."""

    def __init__(self, job: LoadedJob, section: EvaluatorSection, private: Path, cancelled: threading.Event) -> None:
        self._job, self._section, self._private, self._cancelled = job, section, private, cancelled
        self._scores = Scores(job.store)

    def run(self) -> None:
        """Score versions until the process is asked to stop. Raises what may pass, such as Unavailable."""
        with writing(self._scores.folder):
            (self._scores.folder / WORK).mkdir(parents=True, exist_ok=True)
        with locked(self._scores.folder / LOCK, Deadline.after(LOCK_S)):
            for left in self._private.glob(f"{OF_A_RUN}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            while not self._cancelled.is_set():
                if found := unscored(self._job, self._scores):
                    self._score(found[0])
                else:
                    self._cancelled.wait(LOOK_S)

    def _score(self, commit: str) -> None:
        """1. Fix the input. 2. Predict, or go on with it. 3. Append the line: from here on the version is scored.
        4. Remove the output; those of versions in progress stay.
        """
        work = self._scores.folder / WORK
        print(f"scoring {commit}", flush=True)
        started_s = time.monotonic()
        try:
            manifest, metrics = self._measured(commit, work / commit)  # 1, 2
        except PredictionCancelled:
            return
        except HeadraceError as error:
            if error.exit_code not in (ExitCode.FAILED, ExitCode.BAD_CONFIG) or isinstance(error, Unwritable):
                raise
            if commit not in Commits(self._job.store).names():
                print(f"{commit} was removed before it was scored", flush=True)
                return
            score = self._line(commit, error=str(error))
        else:
            score = self._line(commit, events=manifest["events"], samples=manifest["samples"], metrics=metrics)
        self._scores.add(score, Commits(self._job.store).names())  # 3
        self._clear()  # 4
        told = "; ".join(f"{task} {metrics_line(found)}" for task, found in score.tasks.items())
        print(f"scored {commit} in {time.monotonic() - started_s:.1f} s: {score.error or told}", flush=True)

    def _clear(self) -> None:
        """Remove the outputs of versions that are scored, or whose commits are gone."""
        scored, commits = self._scores.by_commit(), Commits(self._job.store).names()
        for path in (self._scores.folder / WORK).iterdir():
            if path.name in scored or path.name not in commits:
                shutil.rmtree(path, ignore_errors=True)

    def _measured(self, commit: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        request = self._section.request_of(commit, folder / "predictions", self._input(folder))
        beside = self._section.priority == "low"
        for again in (True, False):
            try:
                manifest = predict(
                    self._job, request, _quiet, self._cancelled, _print_line, beside=beside, private=self._private
                )
            except OutputTaken:  # begun under another spec
                if not again:
                    raise
                shutil.rmtree(Path(request.output))
            else:
                return manifest, PredictionOutput(Path(request.output)).metrics() or {}
        raise AssertionError("returned or raised")

    def _input(self, folder: Path) -> InputSection:
        """The input of a version, which a kill does not change, but a change of the job file does."""
        if self._section.last is None:
            return self._section.input
        kafka, path = self._section.input.kafka, folder / INPUT
        assert kafka is not None, "checked"
        of = without_keys(self._section.model_dump(mode="json", include={"input", "last"}))
        told = documents.read_object(path) if path.exists() else {}
        if told.get("of") != of:
            fixed = newest_ranges(self._section.input, self._job.spec, self._job.folder, self._section.last)
            told = {"of": of, "ranges": {name: list(each) for name, each in fixed.items()}}
            with writing(path):
                folder.mkdir(exist_ok=True)
                write_whole(REAL, path, json.dumps(told).encode())
        ranges = {name: tuple(each) for name, each in told["ranges"].items()}
        return InputSection(kafka=kafka.model_copy(update={"ranges": ranges}))

    @staticmethod
    def _line(commit: str, **found: Any) -> Score:
        version = order_of(commit)[1]
        return Score(version=version, commit=commit, at=datetime.now(UTC).isoformat(timespec="seconds"), **found)


def _quiet(_share: float | None, _text: str) -> None:
    """Progress within a version is not told."""


def _print_line(worker: str, text: str) -> None:
    print(f"{worker}: {text}", flush=True)


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = worker_process.config_of(path, EvaluatorConfig)
    worker_process.begin(EVALUATOR)
    cancelled = threading.Event()
    with on_stop_signal(cancelled.set):
        job = job_of(config.spec, config.folder)
        assert job.spec.evaluator is not None, "its job has an evaluator"
        Evaluator(job, job.spec.evaluator, config.private, cancelled).run()


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
