"""Train, then predict: what `[predict]` of a job file asks for, once the job's stream is drained.

The prediction is service.predicting.running's, as any other: killed at any point, a run that is repeated trains nothing
new and goes on with it; where its _DONE is there, it does nothing.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.durable import REAL, write_whole, writing
from millrace.errors import MillraceError, SpecError
from millrace.lifecycle import ExitCode, on_stop_signal
from service.launcher.local import LAUNCHER
from service.launcher.running import Run
from service.launcher.runtime import OnLine
from service.launcher.supervision import Outcome
from service.lines import count
from service.predicting.crew import PredictionCancelled
from service.predicting.running import predict
from service.predicting.wording import lines_of
from service.spec import LoadedJob
from service.store import REPORT
from trainer.predict.after import SECTION, names_tensors, try_outputs
from trainer.predict.config import PredictionRequest
from trainer.predict.parts import Output
from trainer.predict.plan import fingerprint_of

PREDICTED = SECTION
"""What is said of it in the report."""


def request_of(job: LoadedJob) -> PredictionRequest | None:
    """What the job predicts at its end, on all cores unless it says otherwise; None: nothing."""
    asked = job.spec.predict
    if asked is None:
        return None
    output = str((job.folder / asked.output).resolve())
    return asked.model_copy(update={"output": output, "share": asked.share or 1.0})


def check_before(job: LoadedJob, *, fresh: bool = False, tensors: bool = True) -> None:
    """Raise SpecError, before anything starts, where `[predict]` asks for what cannot be done.

    `tensors`: the model is built to see whether it has the outputs asked for.
    """
    if (request := request_of(job)) is None:
        return
    folder, at = Path(request.output), f"{SECTION}.output"
    output = Output(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if fresh:
            raise SpecError(f"{folder} holds what the run that --fresh removes has predicted; remove it, too", at)
        manifest = output.manifest()
        if manifest is None and not output.work.exists():
            raise SpecError(f"{folder} is not empty, and what it holds is no prediction; choose another", at)
        if manifest is not None and manifest["fingerprint"] != fingerprint_of(request, job.spec):
            raise SpecError(f"{folder} holds another prediction; choose another folder, or remove it", at)
    if tensors and names_tensors(request, job.spec):
        try_outputs(job.full, job.folder, request)


class ThenPredict:
    """A run, and behind it the prediction that its job asks for: in the place of the run. See Run."""

    def __init__(self, run: Run, job: LoadedJob, on_line: OnLine) -> None:
        self._run, self._job, self._on_line = run, job, on_line
        self._cancelled = threading.Event()
        self._said: Mapping[str, Any] = {}
        self.predicted: Mapping[str, Any] | None = None
        """What the report says of the prediction."""

    def run(self) -> Outcome:
        """Run the job to its end; then predict, if its stream is. Main thread only."""
        with on_stop_signal(self._cancelled.set):  # while it trains, signals are the launcher's
            outcome = self._run.run()
            drained = outcome.code == ExitCode.DRAINED and not self._run.launcher.stopped
            request = request_of(self._job)
            if request is None or not drained or self._cancelled.is_set():
                return outcome
            try:
                return self._predict(request)
            except PredictionCancelled:
                return Outcome(ExitCode.DRAINED, "stopped while it predicted; the next run goes on with that")
            except MillraceError as error:
                return Outcome(error.exit_code, f"the stream is drained, but its prediction failed: {error}")
            finally:
                self._said = {}

    def status(self) -> Mapping[str, Any]:
        """See Run.status; a job that predicts is still "draining"."""
        return {**self._run.status(), **self._said}

    def drain(self) -> None:
        """Have it end soon: after the pass in training, or the part that is being predicted. Any thread."""
        self._cancelled.set()
        self._run.launcher.drain()

    def _predict(self, request: PredictionRequest) -> Outcome:
        """1. The prediction, to its _DONE. 2. The report tells of it."""
        self._tell(None, f"the stream is drained; predicting into {request.output}")
        manifest = predict(self._job, request, self._tell, self._cancelled, self._on_line, alone=True)  # 1
        self.predicted = {
            "output": request.output,
            **{name: manifest[name] for name in ("version", "events", "samples", "rejected")},
            "metrics": Output(Path(request.output)).metrics(),
        }
        self._report(self.predicted)  # 2
        return Outcome(ExitCode.DRAINED, f"the stream is drained, and {count(manifest['samples'])} samples predicted")

    def _report(self, predicted: Mapping[str, Any]) -> None:
        path = self._run.store / REPORT
        self._run.report = {**self._run.report, PREDICTED: predicted}
        with writing(path):
            write_whole(REAL, path, json.dumps(self._run.report, indent=2, allow_nan=False).encode())

    def _tell(self, _share: float | None, text: str) -> None:
        self._said = {"state": "draining", "predicting": text}
        self._on_line(LAUNCHER, f"predicting: {text}")


def told(predicted: Mapping[str, Any]) -> list[str]:
    """The prediction of a finished run, in lines."""
    head = f"predicted {count(predicted['samples'])} samples of {count(predicted['events'])} events: "
    return [head + str(predicted["output"]), *lines_of(predicted, predicted["metrics"])]
