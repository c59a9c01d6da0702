"""One prediction job, from its request to its _DONE, on the caller's thread.

service.predict.versions finds the rows, service.predict.worker_group runs the processes, trainer.predict makes parts
and metrics. A rerun of the same request continues where the first one stopped, however that ended.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.config import validate
from headrace.dataset.loader.dead_letters import BadFraction
from headrace.dataset.pipe.command import check_pipe
from headrace.dataset.spec.config import SlotEntry, SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.durable import locked, writing
from headrace.errors import DeadlineExceeded, SpecError
from headrace.extras import require
from headrace.secrets import check_shown
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.runtime import OnLine
from headrace.service.cluster.store import in_use
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.cluster.worker_plan import PredictionFolders, plan_prediction
from headrace.service.monitor.lines import count
from headrace.service.predict.versions import PredictionVersion, version_of
from headrace.service.predict.worker_group import PredictionCancelled, WorkerDied, WorkerGroup
from headrace.service.spec.job import Job, LoadedJob, with_defaults
from headrace.service.spec.left_out import without_left_out
from headrace.service.spec.references import check_references
from headrace.trainer.checkpoint.commits import hash_of
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.metric_inputs import compute_metrics
from headrace.trainer.predict.output_files import DEAD_LETTERS, METRICS, PartMark, PredictionOutput, part_name
from headrace.trainer.predict.prediction_plan import (
    OutputTaken,
    PredictionPlan,
    fingerprint_of,
    segments_of,
    with_absolute_paths,
)
from headrace.trainer.spec.history_tables import check_no_statistics
from headrace.trainer.spec.join_tables import check_no_join

# Measures the worth of slots: what a holdout's metrics lose when the model gets other samples' values of a slot.

LOSSES = {"auc": 1, "gauc": 1, "logloss": -1, "rmse": -1}
"""Metrics that are compared, and the sign of a loss."""

Metrics = Mapping[str, Any]


def measure(
    slots: Sequence[SlotEntry], fixed: Sequence[str], found: Metrics, measured: Callable[[Sequence[str]], Metrics]
) -> list[dict[str, Any]]:
    """By task and slot: the losses, the greatest first. `found`: metrics with only the slots `fixed` shuffled."""
    names = [slot.name for slot in Schema.of(slots).slots if slot.kind is not SlotKind.META and slot.name not in fixed]
    without = {name: measured([*fixed, name]) for name in names}
    lines = [
        {"task": task, "slot": name, **_losses(before, without[name]["tasks"][task])}
        for task, before in found.get("tasks", {}).items()
        for name in names
    ]
    return sorted(lines, key=lambda line: (line["task"], -next((line[each] for each in LOSSES if each in line), 0.0)))


def _losses(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    pairs = {name: (before.get(name), after.get(name)) for name in LOSSES}
    return {name: LOSSES[name] * (a - b) for name, (a, b) in pairs.items() if a is not None and b is not None}


def format_losses(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table for people."""
    named = [name for name in LOSSES if any(name in line for line in lines)]
    yield f"{'task':<12} {'slot':<24}" + "".join(f"{name:>10}" for name in named) + "   lost without the slot's values"
    for line in lines:
        yield f"{line['task']:<12} {line['slot']:<24}" + "".join(f"{line.get(name, 0.0):>+10.5f}" for name in named)


# A prediction and its metrics as lines for people.

SHOWN = ("auc", "gauc", "logloss", "normalized_entropy", "calibration", "mse", "mae", "mean_label", "mean_prediction")


def summary_of_prediction(manifest: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> Iterator[str]:
    """The version, the rejected events by reason, and a line of metrics for each task and slice."""
    version = manifest["version"]
    what = version.get("commit") or version.get("export")
    yield f"version {version['version']} of {version['job']}, {what}"
    for reason, number in manifest["rejected"].items():
        yield f"rejected: {count(number)} {reason}"
    for task, found in (metrics or {}).get("tasks", {}).items():
        yield f"{task}: {metrics_line(found)}"
        for slot, values in found.get("slices", {}).items():
            for value, sliced in values.items():
                if sliced["count"]:
                    yield f"  {slot} {value}: {metrics_line(sliced)}"


def metrics_line(found: Mapping[str, Any]) -> str:
    """The metrics that are defined, in one line."""
    shown = [f"{name} {found[name]:.6g}" for name in SHOWN if found.get(name) is not None]
    return f"{count(found['count'])} samples  " + "  ".join(shown)


FORMAT = 1
"""Number of the manifest's layout."""
TRIES = 3
"""Most starts of the workers: they start again after a death. Finished parts are not made again."""
BESIDE_SHARE = 0.5
"""The share of the cores of a prediction while the job trains, unless the request sets it."""
LOCK_S = 0.2

Progress = Callable[[float | None, str], None]
CheckFiles = Callable[[Iterable[str]], None]

log = logging.getLogger(__name__)


def _logged(worker: str, text: str) -> None:
    log.info("%s: %s", worker, text)


def predict(
    job: LoadedJob | None,
    request: PredictionRequest,
    progress: Progress,
    cancelled: threading.Event,
    on_line: OnLine = _logged,
    *,
    alone: bool = False,
    private: Path | None = None,
    check_files: CheckFiles = lambda files: None,
) -> dict[str, Any]:
    """Carry out `request`; its manifest. `job` is None where the request brings the spec.

    `alone`: nothing trains in the job's store, though the store may be locked. Configurations of workers, which hold
    secrets, lie in a folder below `private`; where that is None, below the folder for temporary files. `check_files`
    takes the files of the input, relative to the job's folder, before any is read, and raises where one is not allowed.

    Raises SpecError, PredictionFailed, PredictionCancelled, OutputTaken, Unavailable. Finished parts stay.

    1. Claim the output, which is empty or of the same request. 2. Hold the version. 3. Fix the plan. 4. Workers make
    the missing parts. 5. Metrics over all parts. 6. Manifest, then _DONE.
    """
    require("torch", "a prediction")
    job = with_store_defaults(job) if job else job_of(request)
    check_no_statistics(job.spec, "slots")
    check_no_join(job.spec, "join")
    request = with_absolute_paths(request, job.folder)
    check_pipe(job.spec.pipe, Schema.of(job.spec.slots), job.folder)
    output = PredictionOutput(Path(request.output).absolute())
    fingerprint = fingerprint_of(request, job.spec)

    def check() -> None:
        if cancelled.is_set():
            raise PredictionCancelled

    with ExitStack() as held:
        done = _claim(output, fingerprint, held)  # 1
        if done is not None:
            progress(1.0, f"{output.folder} is done already")
            return done
        progress(None, "looking for the version and the input")
        before = PredictionPlan.read(output.work)
        folder = held.enter_context(run_folder(output.work / "run"))
        version = held.enter_context(
            version_of(job, request.version, None if before is None else before.version, folder / "export")
        )  # 2
        plan = before or _fix(request, job, fingerprint, version, output)  # 3
        if request.input.paths is not None:
            check_files(dict.fromkeys(segment.partition for segment in plan.segments))
        secret = Path(held.enter_context(TemporaryDirectory(prefix="headrace-predict-", dir=private)))
        trains = not alone and in_use(job.store)
        prediction = PlannedPrediction(job, request, output, plan, progress, check)
        prediction.make_parts(version, folder, secret, on_line, trains=trains)  # 4
        return prediction.complete()  # 5, 6


def job_of(request: PredictionRequest) -> LoadedJob:
    """The job of a request that brings its own spec. Raises SpecError."""
    if request.spec is None:
        raise SpecError(
            "an export does not say how events are parsed, nor of which class its model is: give the job file, or its "
            "sections as `spec`",
            "spec",
        )
    raw = without_left_out({"store": {"path": "none"}, **request.spec})
    spec = validate(Job, raw)
    check_shown(raw)
    check_references(spec)
    folder = Path(request.base or ".").absolute()
    loaded = LoadedJob.of(spec, raw, folder, folder / spec.store.path)
    return with_defaults(loaded, spec.defaults or NEWEST_DEFAULTS)


def _claim(output: PredictionOutput, fingerprint: str, held: ExitStack) -> dict[str, Any] | None:
    """Step 1; the manifest, where the prediction is complete. Raises SpecError, OutputTaken."""
    other = f"{output.folder} holds another prediction; choose another folder, or remove it"
    if (manifest := output.manifest()) is not None:
        if manifest["fingerprint"] != fingerprint:
            raise OutputTaken(other)
        shutil.rmtree(output.work, ignore_errors=True)
        return manifest
    with writing(output.folder):
        output.folder.mkdir(parents=True, exist_ok=True)
        if not output.work.exists() and any(output.folder.iterdir()):
            raise SpecError(f"{output.folder} is not empty and holds no prediction; choose another", "output")
        output.work.mkdir(exist_ok=True)
    try:
        held.enter_context(locked(output.work / "lock", Deadline.after(LOCK_S)))
    except DeadlineExceeded:
        raise SpecError(f"{output.folder} is being written by another prediction", "output") from None
    output.rename_old()
    plan = PredictionPlan.read(output.work)
    if plan is not None and plan.fingerprint != fingerprint:
        if output.num_finished():
            raise OutputTaken(other)
        plan.forget(output.work)  # it has no parts yet
    for left in (*output.work.glob("part-*"), *output.work.glob("observed-*.arrow.*")):
        left.unlink()  # left by workers that were killed
    return None


def _fix(
    request: PredictionRequest, job: LoadedJob, fingerprint: str, version: PredictionVersion, output: PredictionOutput
) -> PredictionPlan:
    """Step 3."""
    segments = segments_of(request.input, job.spec, job.folder, request.segment_events)
    plan = PredictionPlan(fingerprint, version.description, segments)
    plan.write(output.work)
    return plan


@dataclass(frozen=True, slots=True)
class PlannedPrediction:
    """A prediction whose plan is fixed."""

    job: LoadedJob
    request: PredictionRequest
    output: PredictionOutput
    plan: PredictionPlan
    progress: Progress
    check: Callable[[], None]
    """It raises PredictionCancelled."""

    def make_parts(
        self, version: PredictionVersion, folder: Path, private: Path, on_line: OnLine, *, trains: bool
    ) -> None:
        """Step 4. After a death that may not come again, the workers are started again.

        `folder`: for files of the run. `private`: for configurations of workers. `trains`: whether the job trains.
        """
        total = len(self.plan.segments)
        share = self.request.share or (BESIDE_SHARE if trains else 1.0)
        beside = trains or share < 1
        last = -1

        def tick() -> None:
            nonlocal last
            if (now := self.output.num_finished()) != last:
                last = now
                self.progress(now / total if total else 1.0, f"{now} of {total} parts")

        for attempt in range(1, TRIES + 1):
            tick()
            if all(self.output.mark(number) is not None for number in range(total)):
                return
            with (
                run_folder(folder / f"try-{attempt}") as live,
                run_folder(private / f"try-{attempt}") as run_private,
                ProcessLauncher(Spawner()) as launcher,
                WorkerGroup(self.job, launcher, on_line, self.check) as crew,
            ):
                folders = PredictionFolders(
                    output=self.output.folder, commit=version.commit, live=live, private=run_private
                )
                processes = plan_prediction(
                    self.job, self.request, folders, share * (os.cpu_count() or 1), beside=beside
                )
                try:
                    crew.run(processes, version.commit, tick)
                except WorkerDied as error:
                    if attempt == TRIES:
                        raise
                    on_line("launcher", f"{error}; starting again ({attempt} of {TRIES - 1})")

    def complete(self) -> dict[str, Any]:
        """Steps 5 and 6; the manifest. Raises TooManyBadEvents."""
        marks: list[PartMark] = []
        bad = BadFraction(self.job.spec.pipe.max_bad_fraction)
        for number in range(len(self.plan.segments)):
            mark = self.output.mark(number)
            assert mark is not None, f"part {number} was made"
            marks.append(mark)
            bad.add(mark.num_judged, mark.rejected)
        if self.request.metrics:
            self.progress(None, "measuring")
            files = [self.output.observed(number) for number in range(len(marks))]
            spec = self.job.spec
            self.output.put(
                METRICS, compute_metrics(spec.metrics, spec.tasks, files, [mark.tensors for mark in marks], self.check)
            )
        self.output.end(self._manifest(marks))
        self.progress(1.0, f"{len(marks)} parts")
        return self.output.manifest() or {}

    def _manifest(self, marks: list[PartMark]) -> dict[str, Any]:
        """The manifest of the output. Nothing in it depends on when or by whom the output was made."""
        rejected: dict[str, int] = {}
        for mark in marks:
            for reason, number in mark.rejected.items():
                rejected[reason] = rejected.get(reason, 0) + number
        parts = {
            part_name(number): {
                **{"partition": segment.partition, "begin": segment.begin, "end": segment.end},
                **{
                    "events": mark.num_events,
                    "samples": mark.num_samples,
                    "sha256": mark.sha256,
                    "bytes": mark.num_bytes,
                },
            }
            for number, (segment, mark) in enumerate(zip(self.plan.segments, marks, strict=True))
        }
        others = [*self.output.folder.glob(f"{DEAD_LETTERS}/*.jsonl"), *self.output.folder.glob(METRICS)]
        stored = {path.relative_to(self.output.folder).as_posix(): hash_of(path) for path in sorted(others)}
        return {
            "format": FORMAT,
            "fingerprint": self.plan.fingerprint,
            "version": dict(self.plan.version),
            "request": self.request.what(),
            "events": sum(mark.num_events for mark in marks),
            "samples": sum(mark.num_samples for mark in marks),
            "rejected": rejected,
            "parts": parts,
            "files": {path: {"sha256": file.sha256, "bytes": file.num_bytes} for path, file in stored.items()},
        }
