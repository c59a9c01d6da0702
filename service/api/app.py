"""The application: composes the routes of all resources, authorization, and the checks of every request."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

import headrace
from headrace.errors import HeadraceError
from headrace.service.api import (
    admin,
    commits,
    drafts,
    exports,
    feed,
    guards,
    health,
    jobs,
    metrics,
    operations,
    output,
    predictions,
    suggestions,
    tables,
    timelines,
    tried_events,
    upgrades,
)
from headrace.service.api.actions import offered
from headrace.service.api.authorization import SCHEME
from headrace.service.api.etags import JobLocks
from headrace.service.api.event_streams import MAX_CAUGHT_UP, JobPoll, Streams
from headrace.service.api.idempotency import IdempotencyStore
from headrace.service.api.inactive import OnlyActive
from headrace.service.api.job_cache import JobCache
from headrace.service.api.job_figures import figures_of
from headrace.service.api.middleware import RequestChecks
from headrace.service.api.problems import Problem, on_error
from headrace.service.auth.config import AllowSection
from headrace.service.auth.guard import Guard
from headrace.service.auth.tokens import Tokens
from headrace.service.history.closes import TimelineVersion
from headrace.service.jobs.config import LimitsSection
from headrace.service.jobs.host import Host
from headrace.service.jobs.prediction_rules import PredictionRules
from headrace.service.predict.event_trials import EventTrials

DESCRIPTION = """Jobs that train on event streams: their state, and actions on them.

Errors are problems (RFC 9457). Lists have pages: pass `next` of a page as `after` for the next page. Long actions are
answered with 202 and an operation. A POST that is repeated with the same `Idempotency-Key` is carried out once.
`x-role` is the role that a route needs: viewer, operator (includes viewer) or admin (includes operator)."""
ROUTERS = (
    *(health, jobs, drafts, upgrades, commits, exports, metrics, guards, tables, output, predictions, suggestions),
    *(tried_events, timelines, operations, feed, admin),
)
OFFERED = tuple(sorted(offered, key=lambda act: act.form.group))
"""The actions that a job's page offers, in the order of their buttons: all modules of routes are imported by now."""


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the API."""

    guard: Guard
    tokens: Tokens | None = None
    """None for a foreground run, which has no tokens."""
    limits: LimitsSection = LimitsSection()
    allow: AllowSection = AllowSection()
    private: tuple[Path, ...] = ()
    """Paths that no spec may reach, even below an allowed root."""
    predicting: Path | None = None
    """Folder for private files of the workers of predictions. Default: the folder for temporary files."""
    names: tuple[str, ...] = ()
    """Host names under which it answers, besides the local ones."""
    fence: Callable[[], object] | None = None
    """Raises NotActive while this service must not answer, as another one may be active."""

    @classmethod
    def of_a_run(cls) -> "ApiSettings":
        """The settings of a foreground run."""
        return cls(guard=Guard.of_a_run())


def app(host: Host, terms: ApiSettings) -> FastAPI:
    """The application that serves the jobs of `host`."""
    api = FastAPI(
        title="Headrace",
        version=headrace.__version__,
        description=DESCRIPTION,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    api.state.host, api.state.guard, api.state.tokens = host, terms.guard, terms.tokens
    api.state.ground = PredictionRules(allow=terms.allow, limits=terms.limits, private=terms.private)
    api.state.predicting, api.state.trials = terms.predicting, EventTrials()
    api.state.statuses, api.state.repeats, api.state.turns = JobCache(host), IdempotencyStore(host.records), JobLocks()
    host.work.on_end = api.state.statuses.forget
    api.state.streams = Streams(poller(api.state.statuses), terms.limits.max_streams, terms.limits.max_streams_each)
    if terms.fence is not None:
        api.add_middleware(OnlyActive, fence=terms.fence)
    api.add_middleware(RequestChecks, names=terms.names, max_body=terms.limits.max_body)
    for error in (HTTPException, RequestValidationError, HeadraceError, Exception):
        api.add_exception_handler(error, on_error)
    for each in ROUTERS:
        api.include_router(each.router)
    api.openapi = lambda: _document(api)  # type: ignore[method-assign]  # FastAPI's way
    return api


def poller(statuses: JobCache) -> Any:
    """The function by which event streams read a job."""

    def look(job: str, since: TimelineVersion | None) -> JobPoll:
        closes = statuses.closes(job)
        at = closes.placed(since or TimelineVersion(0, 0))
        found = closes.newest(1) if since is None else closes.newest(MAX_CAUGHT_UP, at.version)
        figures = figures_of(statuses.of(job)).model_dump_json(by_alias=True)
        entries = [(close.moment, metrics.close_entry(close).model_dump_json()) for close in found]
        return JobPoll(statuses.job(job).phase, figures, entries, found[-1].moment if found else at)

    return look


def _document(api: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document, plus the security scheme and the schema of problems."""
    if api.openapi_schema:
        return api.openapi_schema
    found = get_openapi(
        title=api.title, version=api.version, description=api.description, routes=api.routes, summary=None
    )
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, schema in schemas.items():
        if "enum" in schema:
            schema["x-enum-varnames"] = [_constant(name, value) for value in schema["enum"]]
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer"}}
    api.openapi_schema = found
    return found


def _constant(enum: str, value: str) -> str:
    """The constant of an enum's value in generated clients: in Go, constants of all enums are in one name space."""
    return re.sub(r"\W|(?<=[a-z])(?=[A-Z])", "_", f"{enum}_{value}").upper()
