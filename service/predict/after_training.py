"""The prediction that `[predict]` of a job file requests, made once the job's stream is drained.

It is made by service.predict.prediction, as any other. After a kill at any point, a repeated run trains nothing new and
continues the prediction; where _DONE exists, it does nothing.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.durable import REAL, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode, on_stop_signal
from headrace.service.cluster.job_run import JobRun
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.cluster.store import REPORT
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.monitor.lines import count
from headrace.service.predict.prediction import predict, summary_of_prediction
from headrace.service.predict.worker_group import PredictionCancelled
from headrace.service.spec.job import LoadedJob
from headrace.trainer.job_status import Status
from headrace.trainer.predict.after_training import SECTION, check_outputs
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.prediction_plan import fingerprint_of


def request_of(job: LoadedJob) -> PredictionRequest | None:
    """The prediction at the job's end, on all cores unless the job file says otherwise; None: there is none."""
    section = job.spec.predict
    if section is None:
        return None
    output = str((job.folder / section.output).resolve())
    return section.model_copy(update={"output": output, "share": section.share or 1.0})


def check_before(job: LoadedJob, *, fresh: bool = False, tensors: bool = True) -> None:
    """Raise SpecError, before anything starts, where the request of `[predict]` is impossible.

    `tensors`: build the model to check that it has the requested outputs.
    """
    if (request := request_of(job)) is None:
        return
    if request.input.kafka is not None:
        require("kafka", "input from Kafka", f"{SECTION}.input.kafka")
    folder, at = Path(request.output), f"{SECTION}.output"
    output = PredictionOutput(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if fresh:
            raise SpecError(f"{folder} holds a prediction of the run that --fresh removes; remove it, too", at)
        manifest = output.manifest()
        if manifest is None and not output.work.exists():
            raise SpecError(f"{folder} is not empty and holds no prediction; choose another", at)
        if manifest is not None and manifest["fingerprint"] != fingerprint_of(request, job.spec):
            raise SpecError(f"{folder} holds another prediction; choose another folder, or remove it", at)
    if tensors:
        check_outputs(request, job.spec, job.full, job.folder)


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
        with on_stop_signal(self._cancelled.set):  # during training the launcher handles signals
            outcome = self._run.run()
            drained = outcome.code == ExitCode.DRAINED and not self._run.launcher.stopped
            request = request_of(self._job)
            if request is None or not drained or self._cancelled.is_set():
                return outcome
            try:
                return self._predict(request)
            except PredictionCancelled:
                return RunOutcome(ExitCode.DRAINED, "stopped while it predicted; the next run continues")
            except HeadraceError as error:
                return RunOutcome(error.exit_code, f"the stream is drained, but its prediction failed: {error}")
            finally:
                self._predicting = ""

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
        self._run.launcher.drain()

    def _predict(self, request: PredictionRequest) -> RunOutcome:
        """1. Predict, up to _DONE. 2. Add the prediction to the report."""
        self._notify(None, f"the stream is drained; predicting into {request.output}")
        manifest = predict(self._job, request, self._notify, self._cancelled, self._on_line, alone=True)  # 1
        self.predicted = {
            "output": request.output,
            **{name: manifest[name] for name in ("version", "events", "samples", "rejected")},
            "metrics": PredictionOutput(Path(request.output)).metrics(),
        }
        self._report(self.predicted)  # 2
        return RunOutcome(
            ExitCode.DRAINED, f"the stream is drained, and {count(manifest['samples'])} samples predicted"
        )

    def _report(self, predicted: Mapping[str, Any]) -> None:
        path = self._run.store / REPORT
        self._run.report = {**self._run.report, SECTION: predicted}
        with writing(path):
            write_whole(REAL, path, json.dumps(self._run.report, indent=2, allow_nan=False).encode())

    def _notify(self, _share: float | None, text: str) -> None:
        self._predicting = text
        self._on_line(LAUNCHER, f"predicting: {text}")


def prediction_lines(predicted: Mapping[str, Any]) -> list[str]:
    """The prediction of a finished run as lines for people."""
    head = f"predicted {count(predicted['samples'])} samples of {count(predicted['events'])} events: "
    return [head + str(predicted["output"]), *summary_of_prediction(predicted, predicted["metrics"])]
