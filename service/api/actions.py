"""Actions: what callers can do to jobs. Each is one function under `action`, beside the routes that show its resource.

The function's parameters are what a request carries; its docstring is the documentation. It answers with an Operation
(202), which it starts by `ActionCall.start`, or with a body (200), or with nothing (204). This module has what actions
have in common: role, audit log, `If-Match`, a fresh look at the job afterwards, the entry in the OpenAPI document.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, TypeVar, get_args

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from headrace.deadline import Deadline
from headrace.service.api.authorization import CallerOf, HostOf, authorized, note
from headrace.service.api.etags import Precondition, TurnsOf
from headrace.service.api.forms import Form
from headrace.service.api.job_cache import JobCache, StatusesOf
from headrace.service.api.operations import OperationEntry, entry
from headrace.service.api.schemas import JobName
from headrace.service.auth.roles import Caller, Role
from headrace.service.jobs.host import Host, HostedJob
from headrace.service.jobs.operation_queue import Act, Operation, one_step
from headrace.service.spec.job import LoadedJob

Do = TypeVar("Do", bound=Callable[..., Any])
KEYWORD = inspect.Parameter.KEYWORD_ONLY
STARTED = {
    "description": "The operation has started; get it at `Location`.",
    "headers": {"Location": {"description": "Address of the operation.", "schema": {"type": "string"}}},
}


class IfMatch(Enum):
    """Whether a request names the revision of the job that it is about. The job is then changed by it alone."""

    OPTIONAL = auto()
    NEEDED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAction:
    """An action that a job's page offers."""

    id: str
    """Id of the operation in the OpenAPI document."""
    path: str
    body: type[BaseModel] | None
    """The body of its request."""
    if_match: IfMatch | None
    form: Form


offered: list[JobAction] = []
"""Every action with a form: `action` adds them as modules of routes are imported. See `app.OFFERED`."""


@dataclass(frozen=True, slots=True)
class ActionCall:
    """One request for an action."""

    name: str
    """The job; empty for an action on no job."""
    caller: Caller
    host: Host
    statuses: JobCache
    request: Request
    response: Response

    @property
    def job(self) -> HostedJob:
        """The job as it was a moment ago. Raises UnknownJob."""
        return self.statuses.job(self.name)

    @property
    def loaded(self) -> LoadedJob:
        """The job's validated spec. Raises UnknownJob, SpecError."""
        return self.statuses.loaded(self.name)

    def start(self, kind: str, words: str, within_s: float, work: Callable[[Deadline], Any]) -> Operation:
        """Start an operation of one step, described by `words`; `work` returns its result. Raises LimitReached."""
        return self.start_steps(kind, one_step(words, within_s, work))

    def start_steps(self, kind: str, act: Act) -> Operation:
        """Start an operation that reports its steps itself. Raises LimitReached."""
        return self.host.work.start(kind, self.name or None, self.caller.name, act)

    def note(self, **details: Any) -> None:
        """Set the details of the request in the audit log, in place of what its body says."""
        note(self.request, **details)


def action(
    router: APIRouter,
    path: str,
    *,
    id: str,
    summary: str,
    method: str = "POST",
    role: Role = Role.OPERATOR,
    grant: str = "",
    if_match: IfMatch | None = None,
    audited: tuple[str, ...] | None = None,
    answer: Mapping[str, Any] | None = None,
    form: Form | None = None,
    repeatable: bool = True,
) -> Callable[[Do], Do]:
    """Make a function an action: add its route. The function takes an ActionCall, then what the request carries.

    `role`, or a token that was granted the action `grant`, may call it. `audited` names the fields of its body that the
    audit log shows; None: all. `answer` describes an answer 200. `form`: how a job's page offers it; None: not at all.
    `repeatable`: whether the answer is kept for a repeated request with the same `Idempotency-Key`.
    """

    def add(do: Do) -> Do:
        returns = inspect.signature(do).return_annotation
        refusals = [HTTPStatus.NOT_FOUND]
        refusals += [HTTPStatus.PRECONDITION_FAILED] if if_match is not None else []
        refusals += [HTTPStatus.PRECONDITION_REQUIRED] if if_match is IfMatch.NEEDED else []
        told = authorized(role, *refusals, act=grant, repeatable=repeatable and method != "DELETE")
        if returns is Operation:
            told["responses"][int(HTTPStatus.ACCEPTED)] = STARTED
            told["status_code"] = HTTPStatus.ACCEPTED
        elif returns is None:
            told["status_code"] = HTTPStatus.NO_CONTENT
        elif answer is not None:
            told["responses"][int(HTTPStatus.OK)] = answer
        route = _route(do, "{job}" in router.prefix + path, if_match, audited)
        router.add_api_route(path, route, methods=[method], operation_id=id, summary=summary, **told)
        if form is not None:
            bodies = (_body_of(each) for each in inspect.signature(do).parameters.values())
            body = next((each for each in bodies if each is not None), None)
            offered.append(JobAction(id=id, path=router.prefix + path, body=body, if_match=if_match, form=form))
        return do

    return add


def _route(do: Callable[..., Any], on_job: bool, if_match: IfMatch | None, audited: tuple[str, ...] | None) -> Any:
    """The function that FastAPI calls for an action.

    FastAPI takes from its signature what a request carries. The signature is put together here: what every action
    needs, the job, the parameters of the action after its first, and `If-Match`.
    """
    held, needed = if_match is not None, if_match is IfMatch.NEEDED
    first, *carried = (each.replace(kind=KEYWORD) for each in inspect.signature(do).parameters.values())
    assert first.annotation is ActionCall, f"{do.__name__} takes an ActionCall first"

    def route(
        *,
        request: Request,
        response: Response,
        host: HostOf,
        statuses: StatusesOf,
        caller: CallerOf,
        turns: TurnsOf,
        **given: Any,
    ) -> Any:
        job, tag = given.pop("job", ""), given.pop("if_match", None)
        call = ActionCall(job, caller, host, statuses, request, response)
        details = {name: value for each in carried for name, value in _told(each, given[each.name]).items()}
        call.note(**{name: value for name, value in details.items() if audited is None or name in audited})
        with turns.changing(host, job, tag, needed=needed) if held else nullcontext():
            found = do(call, **given)
        if on_job:
            statuses.forget(job)
        if not isinstance(found, Operation):
            return found
        response.headers["Location"] = f"/v1/operations/{found.id}"
        return entry(found)

    *common, _given = inspect.signature(route).parameters.values()
    job = [inspect.Parameter("job", KEYWORD, annotation=JobName)] if on_job else []
    tag = [inspect.Parameter("if_match", KEYWORD, annotation=Precondition, default=None)] if held else []
    returns = inspect.signature(do).return_annotation
    answers = OperationEntry if returns is Operation else returns
    route.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*common, *job, *carried, *tag], return_annotation=answers
    )
    route.__name__, route.__doc__ = do.__name__, do.__doc__
    return route


def _body_of(parameter: inspect.Parameter) -> type[BaseModel] | None:
    """The body that a parameter of an action stands for; None for a name in the path, or of the query."""
    kinds = [each for each in (parameter.annotation, *get_args(parameter.annotation)) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


def _told(parameter: inspect.Parameter, value: Any) -> dict[str, Any]:
    """A parameter of a request for the audit log: a body by its fields, also one that may be left out, and is."""
    body = _body_of(parameter)
    if body is None:
        return {parameter.name: value}
    return (body() if value is None else value).model_dump()
