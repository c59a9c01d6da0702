"""One prediction job, from its request to its _DONE, on the caller's thread.

service.predict.versions finds the rows, service.predict.worker_group runs the processes, trainer.predict makes parts
and metrics. A rerun of the same request continues where the first one stopped, however that ended.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.config import validate
from headrace.dataset.loader.dead_letters import BadFraction
from headrace.dataset.pipe.command import check_pipe
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.durable import locked, writing
from headrace.errors import DeadlineExceeded, SpecError
from headrace.extras import require
from headrace.private_folder import private_folder
from headrace.secrets import check_shown
from headrace.service.cluster.generation_plans import in_force
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.runtime import Launcher, OnLine
from headrace.service.cluster.store import in_use
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.cluster.worker_plan import PredictionFolders, PredictionHosts, PredictionWorkers, plan_prediction
from headrace.service.history.commit_lookup import reader
from headrace.service.history.commit_lookup import scratch as scratch_of
from headrace.service.monitor.lines import count
from headrace.service.predict.hosts import (
    OpenLauncher,
    check_statistics,
    elastic_range,
    hosts_of,
    launched,
    store_is_shared,
    with_numbers_of,
)
from headrace.service.predict.versions import PredictionVersion, version_of
from headrace.service.predict.worker_group import ElasticPrediction, PredictionCancelled, WorkerDied, WorkerGroup
from headrace.service.spec.config import TrainerRange
from headrace.service.spec.job import JobFile, LoadedJob, with_defaults
from headrace.service.spec.left_out import without_left_out
from headrace.service.spec.references import check_references
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.own_metrics import RESERVED
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.fixed_batches import shuffled_slots
from headrace.trainer.predict.joined_labels import JoinedLabels
from headrace.trainer.predict.metric_inputs import compute_metrics, summed
from headrace.trainer.predict.output_files import METRICS, PartMark, PredictionOutput, part_name
from headrace.trainer.predict.output_place import FolderPlace
from headrace.trainer.predict.own_values import own_values
from headrace.trainer.predict.prediction_plan import (
    OutputTaken,
    PredictionPlan,
    fingerprint_of,
    segments_of,
    with_absolute_paths,
)

# Measures the worth of slots: what a holdout's metrics lose when the model gets other samples' values of a slot.

LOSSES = {"auc": 1, "gauc": 1, "logloss": -1, "rmse": -1}
"""Metrics that are compared, and the sign of a loss."""


def losses_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By task and slot: the losses, the greatest first, of the metrics of a request with `worth`."""
    lines = [
        {"task": task, "slot": name, **_losses(before, without[task])}
        for task, before in found.get("tasks", {}).items()
        for name, without in found.get("worth", {}).items()
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
    own = [name for name in found if name not in RESERVED]
    shown = [f"{name} {found[name]:.6g}" for name in (*SHOWN, *own) if isinstance(found.get(name), int | float)]
    return f"{count(found['count'])} samples  " + "  ".join(shown)


FORMAT = 1
"""Number of the manifest's layout."""
TRIES = 3
"""Most starts of the workers: they start again after a death. Finished parts are not made again."""
BESIDE_SHARE = 0.5
"""The share of the cores of a prediction while the job trains, unless the request sets it."""
LOCK_S = 0.2
OF_A_RUN = "headrace-predict-"
"""Begins the name of a run's folder below the private folder of its caller, who removes those of killed runs."""
UNLIMITED_CORES = float(1 << 19)
"""For all workers of a prediction on the launcher, whose machines are for the job."""

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
    beside: bool | None = None,
    private: Path | None = None,
    check_files: CheckFiles = lambda files: None,
    launcher: OpenLauncher | None = None,
) -> dict[str, Any]:
    """Carry out `request`; its manifest. `job` is None where the request brings the spec.

    `beside`: whether others have priority; None: while the job trains in its store, or with a share below 1.
    Configurations of workers, which hold secrets, lie in a folder below `private`; where that is None, below the folder
    for temporary files. `check_files` takes the files of the input, relative to the job's folder, before any is read,
    and raises where one is not allowed. `launcher`: that of the run whose stream has ended, for `on = "cluster"`.

    Raises SpecError, PredictionFailed, PredictionCancelled, OutputTaken, Unavailable. Finished parts stay.

    1. Claim the output, which is empty or of the same request. 2. Hold the version. 3. Fix the plan. 4. Workers make
    the missing parts. 5. Metrics over all parts. 6. Manifest, then _DONE.
    """
    if request.on == "here":
        require("torch", "a prediction")
    job = with_store_defaults(job) if job else job_of(request)
    elastic = elastic_range(request, job.spec.cluster)
    request = with_numbers_of(with_absolute_paths(request, job.folder), in_force(job))
    check_statistics(request, job)
    check_pipe(job.spec.pipe, Schema.of(job.spec.slots), job.folder)
    fingerprint = fingerprint_of(request, job.spec)

    def check() -> None:
        if cancelled.is_set():
            raise PredictionCancelled

    with ExitStack() as held:
        mine = held.enter_context(_folder_of_run(private))
        output = PredictionOutput(request.output, mine / "output")
        done = claim_output(output, fingerprint, held)  # 1
        if done is not None:
            progress(1.0, f"{output.place.address} is done already")
            return done
        progress(None, "looking for the version and the input")
        before = PredictionPlan.read(output.place)
        folder = held.enter_context(run_folder(output.work / "run"))
        opened, here = held.enter_context(launched(job, request, launcher)), store_is_shared(request, job)
        export = folder / "export" if request.on == "here" else held.enter_context(scratch_of(job.store, reader()))
        version = held.enter_context(
            version_of(job, request.version, None if before is None else before.version, export, here=here)
        )  # 2
        plan = before or fix_plan(request, job, fingerprint, version, output)  # 3
        if request.input.paths is not None and request.input.root is None:
            check_files(dict.fromkeys(segment.partition for segment in plan.segments))
        trains = request.on == "here" and in_use(job.store)
        share = request.share or (BESIDE_SHARE if trains else 1.0)
        beside = trains or share < 1 if beside is None else beside
        hosts = held.enter_context(hosts_of(job, request, output, version.commit, opened.generation))
        prediction = PlannedPrediction(job, request, output, plan, progress, check, elastic)
        cores = share * (os.cpu_count() or 1) if request.on == "here" else UNLIMITED_CORES
        prediction.make_parts(version, folder, mine, on_line, opened.launcher, hosts, cores=cores, beside=beside)  # 4
        return prediction.complete()  # 5, 6


@contextmanager
def _folder_of_run(private: Path | None) -> Iterator[Path]:
    """A new folder for secrets, and for what an object store does not have yet."""
    if private is None:
        with private_folder("prediction") as folder:
            yield folder
        return
    with TemporaryDirectory(prefix=OF_A_RUN, dir=private) as name:
        yield Path(name)


def job_of(request: PredictionRequest) -> LoadedJob:
    """The job of a request that brings its own spec. Raises SpecError."""
    if request.spec is None:
        raise SpecError(
            "an export does not say how events are parsed, nor of which class its model is: give the job file, or its "
            "sections as `spec`",
            "spec",
        )
    raw = without_left_out({"store": {"path": "none"}, **request.spec})
    spec = validate(JobFile, raw)
    check_shown(raw)
    check_references(spec)
    folder = Path(request.base or ".").absolute()
    loaded = LoadedJob.of(spec, raw, folder, folder / spec.store.path)
    return with_defaults(loaded, spec.defaults or NEWEST_DEFAULTS)


def claim_output(output: PredictionOutput, fingerprint: str, held: ExitStack) -> dict[str, Any] | None:
    """Step 1; the manifest, where the prediction is complete. Raises SpecError, OutputTaken."""
    output.check_place()
    place = output.place
    if (manifest := output.manifest()) is not None:
        if manifest["fingerprint"] != fingerprint:
            raise OutputTaken(output.holds_another)
        place.remove_work()
        return manifest
    plan = PredictionPlan.read(place)
    if plan is None and not place.has_begun() and not place.is_empty():
        raise SpecError(output.holds_none, "output")
    with writing(output.work):
        output.work.mkdir(parents=True, exist_ok=True)
    if isinstance(place, FolderPlace):
        _lock(output, held)
        plan = PredictionPlan.read(place)
    if plan is not None and plan.fingerprint != fingerprint:
        if output.num_finished() or not isinstance(place, FolderPlace):  # in an object store it may still be running
            raise OutputTaken(output.holds_another)
        plan.forget(place)  # it has no parts yet
        output.remove_unmarked()
    output.remove_unfinished()
    return None


def _lock(output: PredictionOutput, held: ExitStack) -> None:
    """Hold a folder against other predictions. Raises SpecError where one writes into it now."""
    try:
        held.enter_context(locked(output.work / "lock", Deadline.after(LOCK_S)))
    except DeadlineExceeded:
        raise SpecError(f"{output.place.address} is being written by another prediction", "output") from None
    output.rename_old()


def fix_plan(
    request: PredictionRequest, job: LoadedJob, fingerprint: str, version: PredictionVersion, output: PredictionOutput
) -> PredictionPlan:
    """Step 3."""
    segments = segments_of(request.input, job.spec, job.folder, request.segment_events)
    plan = PredictionPlan(fingerprint, version.description, segments)
    plan.write(output.place)
    if PredictionPlan.read(output.place) != plan:
        raise OutputTaken(
            f"another prediction into {output.place.address} has begun meanwhile; once it has ended, a rerun of the "
            "same request does nothing, or continues it"
        )
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
    elastic: TrainerRange | None = None
    """The bounds of the number of trainers, where as many predict as there are workers for."""

    def make_parts(
        self,
        version: PredictionVersion,
        folder: Path,
        private: Path,
        on_line: OnLine,
        launcher: Launcher,
        hosts: PredictionHosts,
        *,
        cores: float,
        beside: bool,
    ) -> None:
        """Step 4. After a death that may not come again, the workers are started again.

        `folder`: for files of the run. `private`: for configurations of workers. `cores`: for its workers.
        `beside`: whether every other process has priority.
        """
        total = len(self.plan.segments)
        last, pause = -1, Deadline.after(0)

        def tick() -> None:
            nonlocal last, pause
            if not pause.passed():
                return
            pause = Deadline.after(self.output.place.look_s)
            if (now := self.output.num_finished()) != last:
                last = now
                self.progress(now / total if total else 1.0, f"{now} of {total} parts")

        for attempt in range(1, TRIES + 1):
            tick()
            if len(self.output.marks(range(total))) == total or self.output.manifest() is not None:
                return
            with (
                run_folder(folder / f"try-{attempt}") as live,
                run_folder(private / f"try-{attempt}") as run_private,
                WorkerGroup(self.job, launcher, on_line, self.check) as crew,
            ):
                folders = PredictionFolders(
                    output=self.output.place.address, commit=version.commit, live=live, private=run_private
                )
                now_at = replace(hosts, generation=hosts.generation + attempt - 1)
                plan_of = partial(self._processes, folders, cores, beside, now_at)
                elastic = None if self.elastic is None else ElasticPrediction(self.elastic.min, plan_of)
                try:
                    crew.run(plan_of(self.request.trainers), version.commit, tick, elastic)
                except WorkerDied as error:
                    if attempt == TRIES:
                        raise
                    on_line("launcher", f"{error}; starting again ({attempt} of {TRIES - 1})")

    def _processes(
        self, folders: PredictionFolders, cores: float, beside: bool, hosts: PredictionHosts, trainers: int
    ) -> PredictionWorkers:
        request = self.request.model_copy(update={"trainers": trainers})
        return plan_prediction(self.job, request, folders, cores, beside=beside, hosts=hosts)

    def complete(self) -> dict[str, Any]:
        """Steps 5 and 6; the manifest. Raises TooManyBadEvents."""
        if self.output.manifest() is None:
            try:
                self._end()
            except FileNotFoundError:
                if self.output.manifest() is None:
                    raise
        self.output.place.remove_work()  # another run of this request may have been quicker, in an object store
        self.progress(1.0, f"{len(self.plan.segments)} parts")
        return self.output.manifest() or {}

    def _end(self) -> None:
        """Raises FileNotFoundError where the work files are gone: another run has ended meanwhile."""
        numbers = range(len(self.plan.segments))
        found = self.output.marks(numbers)
        if len(found) < len(numbers):
            raise FileNotFoundError(f"{self.output.place.address} lacks parts that were made")
        marks = [found[number] for number in numbers]
        bad = BadFraction(self.job.spec.pipe.max_bad_fraction)
        for mark in marks:
            bad.add(mark.num_judged, mark.rejected)
        if self.request.metrics:
            self.progress(None, "measuring")
            self.output.put(METRICS, self._measures(marks))
        self.output.end(self._manifest(marks))

    def _measures(self, marks: Sequence[PartMark]) -> dict[str, Any]:
        """Step 5."""
        spec, numbers = self.job.spec, range(len(marks))
        joined, label = self._joined(numbers), "" if spec.join is None else spec.join.label
        tensors = [mark.tensors for mark in marks]

        def measured(files: Iterable[AbstractContextManager[Path]], without: str | None = None) -> dict[str, Any]:
            given = tensors if without is None else ()
            return compute_metrics(spec.metrics, spec.tasks, files, given, self.check, joined, label, without)

        if self.request.worth:
            slots = [name for name in shuffled_slots(Schema.of(spec.slots)) if name not in self.request.shuffle]
            with ExitStack() as held:  # fetched once for all slots
                paths = [held.enter_context(self.output.observed(number)) for number in numbers]
                found = measured(map(nullcontext, paths))
                found["worth"] = {slot: measured(map(nullcontext, paths), slot)["tasks"] for slot in slots}
        else:
            found = measured(map(self.output.observed, numbers))
        if joined is not None:
            found["join"] = {"clicks": joined.clicks, "joined": joined.joined}
        own = own_values(spec.metrics.own, self.job.folder, summed(mark.own for mark in marks))
        tasks = {name: {**measures, **own.get(name, {})} for name, measures in found["tasks"].items()}
        return {**found, "tasks": tasks}

    def _joined(self, numbers: Sequence[int]) -> JoinedLabels | None:
        """The labels of a job with a join."""
        if (join := self.job.spec.join) is None:
            return None
        observed, clicks = (map(each, numbers) for each in (self.output.observed, self.output.clicks))
        return JoinedLabels.of(observed, clicks, join.window, self.check)

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
        stored = self.output.others()
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
