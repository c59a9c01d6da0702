"""/v1/predictions and /v1/jobs/{job}/predictions: batch predictions with one version. See service.predict."""

import threading
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from headrace.errors import SpecError
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, HostOf, authorized
from headrace.service.api.operations import OperationEntry, entry
from headrace.service.api.schemas import JobName, Page, Paged, cut
from headrace.service.auth.roles import Role
from headrace.service.auth.spec_sizes import check_size
from headrace.service.jobs.background import in_background
from headrace.service.jobs.host import HostedJob
from headrace.service.jobs.operation_queue import Act, Operation, ReportProgress, as_cancelled
from headrace.service.jobs.prediction_rules import PredictionRules
from headrace.service.predict.prediction import job_of, predict
from headrace.service.spec.job import LoadedJob
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.prediction_plan import with_absolute_paths

router = APIRouter(tags=["predictions"], route_class=AuthorizedRoute)

KIND = "predict"
AUDITED = ("version", "output")


@router.get(
    "/v1/jobs/{job}/predictions",
    **authorized(Role.VIEWER, HTTPStatus.NOT_FOUND),
    operation_id="listPredictions",
    summary="List a job's predictions",
)
def list_predictions(host: HostOf, job: JobName, paging: Paged) -> Page[OperationEntry]:
    """The requested predictions of a job as operations, newest first."""
    name = host.job(job).name
    found = host.work.list(job=name, kind=KIND, after=paging.after, limit=paging.limit + 1)
    return cut([entry(each) for each in found], paging, lambda each: each.id)


@action(router, "/v1/jobs/{job}/predictions", id="predictByJob", summary="Predict with a job's model", audited=AUDITED)
def predict_by_job(call: ActionCall, asked: PredictionRequest) -> Operation:
    """Predict many events with a version of the job's model, while it trains; write Parquet to `output`.

    The result is the manifest. A repeated request continues an interrupted one.
    """
    if asked.spec is not None or asked.base is not None:
        raise SpecError("the job has a spec; leave it out, or use /v1/predictions", "spec")
    job = call.loaded
    return call.start_steps(KIND, _act(call, job, with_absolute_paths(asked, job.folder), call.job))


@action(router, "/v1/predictions", id="predictByExport", summary="Predict with an export", audited=AUDITED)
def predict_by_export(call: ActionCall, asked: PredictionRequest) -> Operation:
    """Predict many events with an export of any job. `version` is its address; `spec` defines how events are read."""
    if asked.base is None or not Path(asked.base).is_absolute():
        raise SpecError("must be an absolute path: relative paths of the spec start there", "base")
    check_size(asked.spec or {})
    job = job_of(asked)
    return call.start_steps(KIND, _act(call, job, with_absolute_paths(asked, job.folder), None))


def _act(call: ActionCall, job: LoadedJob, asked: PredictionRequest, hosted: HostedJob | None) -> Act:
    """The operation. The request is checked now, and again when the operation starts, with the files of its input.

    Raises SpecError where this service does not allow the request.
    """
    host, state = call.host, call.request.app.state
    ground: PredictionRules = state.ground
    private: Path | None = state.predicting
    in_background(lambda: ground.check(asked, job, host.jobs(), hosted))

    def act(progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
        allowed = ground.check(asked, job, host.jobs(), hosted)

        def check_files(files: Iterable[str]) -> None:
            for file in files:
                allowed.confines.check_match(file, job.folder, "input.paths")

        with as_cancelled(cancelled):
            return predict(job, asked, progress, cancelled, private=private, check_files=check_files)

    return act
