"""/v1/predictions and /v1/jobs/{job}/predictions: batch predictions with one version. See service.predict."""

import threading
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from headrace.errors import SpecError
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, HostOf, authorized, note
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.jobs import JobName
from headrace.service.api.operations import OperationEntry, as_cancelled, entry, start_operation, starts_operation
from headrace.service.api.schemas import Page, Paged, cut
from headrace.service.auth.roles import Role
from headrace.service.auth.spec_sizes import check_size
from headrace.service.jobs.background import in_background
from headrace.service.jobs.host import Host, HostedJob
from headrace.service.jobs.operation_queue import Act, ReportProgress
from headrace.service.jobs.prediction_rules import PredictionRules
from headrace.service.predict.prediction import job_of, predict
from headrace.service.spec.job import LoadedJob
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.prediction_plan import with_absolute_paths

router = APIRouter(tags=["predictions"], route_class=AuthorizedRoute)

KIND = "predict"


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


@router.post(
    "/v1/jobs/{job}/predictions",
    **starts_operation(Role.OPERATOR),
    operation_id="predictByJob",
    summary="Predict with a job's model",
)
def predict_by_job(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    asked: PredictionRequest,
    request: Request,
    response: Response,
) -> OperationEntry:
    """Predict many events with a version of the job's model, while it trains; write Parquet to `output`.

    The result is the manifest. A repeated request continues an interrupted one.
    """
    note(request, version=asked.version, output=asked.output)
    if asked.spec is not None or asked.base is not None:
        raise SpecError("the job has a spec; leave it out, or use /v1/predictions", "spec")
    loaded = statuses.loaded(job)
    act = _act(request, host, loaded, with_absolute_paths(asked, loaded.folder), statuses.job(job))
    return start_operation(host, KIND, job, caller, act, response)


@router.post(
    "/v1/predictions",
    **starts_operation(Role.OPERATOR),
    operation_id="predictByExport",
    summary="Predict with an export",
)
def predict_by_export(
    host: HostOf, caller: CallerOf, asked: PredictionRequest, request: Request, response: Response
) -> OperationEntry:
    """Predict many events with an export of any job. `version` is its address; `spec` defines how events are read."""
    note(request, version=asked.version, output=asked.output)
    if asked.base is None or not Path(asked.base).is_absolute():
        raise SpecError("must be an absolute path: relative paths of the spec start there", "base")
    check_size(asked.spec or {})
    loaded = job_of(asked)
    act = _act(request, host, loaded, with_absolute_paths(asked, loaded.folder), None)
    return start_operation(host, KIND, None, caller, act, response)


def _act(request: Request, host: Host, job: LoadedJob, asked: PredictionRequest, hosted: HostedJob | None) -> Act:
    """The operation. The request is checked now, and again when the operation starts, with the files of its input.

    Raises SpecError where this service does not allow the request.
    """
    ground: PredictionRules = request.app.state.ground
    private: Path | None = request.app.state.predicting
    in_background(lambda: ground.check(asked, job, host.jobs(), hosted))

    def act(progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
        allowed = ground.check(asked, job, host.jobs(), hosted)

        def check_files(files: Iterable[str]) -> None:
            for file in files:
                allowed.confines.check_match(file, job.folder, "input.paths")

        with as_cancelled(cancelled):
            return predict(job, asked, progress, cancelled, private=private, check_files=check_files)

    return act
