"""The prediction that `[predict]` of a job file requests, made once the job's stream is drained.

It is made by service.predict.prediction, as any other. After a kill at any point, a repeated run trains nothing new and
continues the prediction; where _DONE exists, it does nothing.

Most jobs request none, so what predicts is imported by the functions that need it: it brings kernels and stores.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headrace.blob.store_address import parse
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode, on_stop_signal
from headrace.service.cluster.generation_plans import in_force
from headrace.service.cluster.job_run import JobRun
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.trainer.job_status import Status
from headrace.trainer.predict.after_training import SECTION, check_outputs
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.prediction_plan import error_at, fingerprint_of, with_absolute_paths

if TYPE_CHECKING:
    from headrace.service.predict.hosts import OpenLauncher


def request_of(job: LoadedJob) -> PredictionRequest | None:
    """The prediction at the job's end, on all cores unless the job file says otherwise; None: there is none."""
    section = job.spec.predict
    if section is None:
        return None
    share = (section.share or 1.0) if section.on == "here" else None
    return with_absolute_paths(section, job.folder).model_copy(update={"share": share})


def check_before(job: LoadedJob, *, fresh: bool = False, tensors: bool = True) -> None:
    """Raise SpecError, before anything starts, where the request of `[predict]` is impossible.

    `tensors`: build the model to check that it has the requested outputs.
    """
    if (request := request_of(job)) is None:
        return
    if request.input.kafka is not None:
        require("kafka", "input from Kafka", f"{SECTION}.input.kafka")
    if request.on == "cluster":
        _check_hosts(job, request, fresh=fresh)
    if tensors or parse(request.output).is_folder:  # a check of the spec asks no object store
        _check_output(job, request, fresh=fresh)
    if tensors:
        check_outputs(request, job.spec, job.full, job.folder)


def _check_hosts(job: LoadedJob, request: PredictionRequest, *, fresh: bool) -> None:
    """Raise SpecError unless the machines of the job can predict."""
    from headrace.service.predict.hosts import check_statistics, with_numbers_of

    try:
        with_numbers_of(request, job if fresh else in_force(job))
        check_statistics(request, job)
    except SpecError as error:
        raise error_at(error, f"{SECTION}.{error.path}") from None


def _check_output(job: LoadedJob, request: PredictionRequest, *, fresh: bool) -> None:
    """Raise SpecError unless the output is empty, or of the same request."""
    from headrace.trainer.predict.output_files import PredictionOutput

    output, at = PredictionOutput(request.output), f"{SECTION}.output"
    output.check_place(at)
    place = output.place
    if place.is_empty():
        return
    if fresh:
        raise SpecError(f"{place.address} holds a prediction of the run that --fresh removes; remove it, too", at)
    manifest = output.manifest()
    if manifest is None and not place.has_begun():
        raise SpecError(output.holds_none, at)
    if manifest is not None and manifest["fingerprint"] != fingerprint_of(request, job.spec):
        raise SpecError(output.holds_another, at)


class RunThenPredict:
    """A run followed by the prediction of its job. It has the interface of Run."""

    def __init__(self, run: JobRun, job: LoadedJob, on_line: OnLine) -> None:
        self._run, self._job, self._on_line = run, job, on_line
        self._cancelled = threading.Event()
        self._predicting = ""
        """The progress of the prediction."""
        self.predicted: Mapping[str, Any] | None = None
        """The prediction as the report has it."""

    def run(self) -> RunOutcome:
        """Run the job to its end; then predict, if its stream is drained. Main thread only."""
        request = request_of(self._job)
        if request is not None and request.on == "cluster":  # before the agents hear that the job has ended
            self._run.launcher.then = partial(self._then_on_cluster, request)
            return self._run.run()
        with on_stop_signal(self._cancelled.set):  # during training the launcher handles signals
            outcome = self._run.run()
            drained = outcome.code == ExitCode.DRAINED and not self._run.launcher.stopped
            if request is None or not drained or self._cancelled.is_set():
                return outcome
            return self._then(request)

    def status(self) -> Status:
        """A job that predicts is still "draining"."""
        status = self._run.status()
        return replace(status, state="draining", predicting=self._predicting) if self._predicting else status

    def lacks(self) -> str:
        """The things that it lacks to be ready, in words; "" while it runs a worker."""
        return self._run.launcher.lacks()

    def drain(self) -> None:
        """Stop after the pass in training, or after the part that is being predicted. Any thread."""
        self._cancelled.set()
        self._run.drain()

    def _then_on_cluster(
        self, request: PredictionRequest, outcome: RunOutcome, launcher: Launcher, number: int
    ) -> RunOutcome:
        """Predict on the launcher of the run, unless nothing was learnt."""
        from headrace.service.predict.hosts import OpenLauncher

        outcome = self._run.judged(outcome)
        return self._then(request, OpenLauncher(launcher, number)) if outcome.code == ExitCode.DRAINED else outcome

    def _then(self, request: PredictionRequest, launcher: "OpenLauncher | None" = None) -> RunOutcome:
        from headrace.service.predict.worker_group import PredictionCancelled

        try:
            with on_stop_signal(self._cancelled.set):
                return self._predict(request, launcher)
        except PredictionCancelled:
            self._run.launcher.stopped = True
            return RunOutcome(ExitCode.DRAINED, "stopped while it predicted; the next run continues")
        except HeadraceError as error:
            return RunOutcome(error.exit_code, f"the stream is drained, but its prediction failed: {error}")
        finally:
            self._predicting = ""

    def _predict(self, request: PredictionRequest, launcher: "OpenLauncher | None") -> RunOutcome:
        """1. Predict, up to _DONE. 2. Add the prediction to the report."""
        from headrace.service.cluster.store_defaults import with_store_defaults
        from headrace.service.predict.prediction import predict
        from headrace.trainer.predict.output_files import PredictionOutput

        job = with_store_defaults(self._job)  # a new one may have chosen its settings meanwhile
        self._notify(None, f"the stream is drained; predicting into {request.output}")
        beside = (request.share or 1.0) < 1  # nothing trains in the store, though it is locked
        manifest = predict(
            job, request, self._notify, self._cancelled, self._on_line, beside=beside, launcher=launcher
        )  # 1
        self.predicted = {
            "output": request.output,
            **{name: manifest[name] for name in ("version", "events", "samples", "rejected")},
            "metrics": PredictionOutput(request.output).metrics(),
        }
        self._run.add_to_report(SECTION, self.predicted)  # 2
        return RunOutcome(
            ExitCode.DRAINED, f"the stream is drained, and {count(manifest['samples'])} samples predicted"
        )

    def _notify(self, _share: float | None, text: str) -> None:
        self._predicting = text
        self._on_line(LAUNCHER, f"predicting: {text}")


def prediction_lines(predicted: Mapping[str, Any]) -> list[str]:
    """The prediction of a finished run as lines for people."""
    from headrace.service.predict.prediction import summary_of_prediction

    head = f"predicted {count(predicted['samples'])} samples of {count(predicted['events'])} events: "
    return [head + str(predicted["output"]), *summary_of_prediction(predicted, predicted["metrics"])]
