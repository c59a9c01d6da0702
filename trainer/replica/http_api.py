"""The HTTP API of a replica: the Open Inference Protocol v2 over REST, `/metrics`, and rollbacks.

Errors have the form of the protocol: `{"error": "..."}`. trainer.replica.inference_handler answers inference requests.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import headrace
from headrace.config import Count
from headrace.errors import HeadraceError
from headrace.http import http_server
from headrace.http.connections import AnswerAtOnce, HeldAnswer, InferenceConnection
from headrace.http.listening import Listener
from headrace.trainer.replica.access import RequestGate, headers_sent
from headrace.trainer.replica.candidate_ranking import CandidateRanker
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.content_coding import LEVEL, MIN_BYTES
from headrace.trainer.replica.inference_handler import BodyHeaders, InferenceHandler, check_name, refusal_of
from headrace.trainer.replica.model_documents import (
    configuration,
    model_metadata,
    repository_index,
    server_metadata,
)
from headrace.trainer.replica.openapi import OF_BODY, OF_MODEL, ErrorAnswer, body_of, described, document, errors
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import KeptVersion, ReplicaState
from headrace.trainer.replica.retrieval import Retrieval, RetrievalAnswer, RetrievalRequest
from headrace.trainer.replica.update_loop import UpdateLoop

LOADING = "this replica serves one model and takes its versions from a job; see rollback and follow"


class Rollback(BaseModel):
    """The version to serve."""

    model_config = {"extra": "forbid", "use_attribute_docstrings": True}
    version: Count
    """A kept version; the model's metadata lists them."""
    timeline: str | None = None
    """Its timeline: "t1" for "25@t1" in the list. Default: the newest timeline that has the version."""


class VersionInForce(BaseModel):
    """The version that is served from now on."""

    model_config = {"use_attribute_docstrings": True}
    name: str
    """The job."""
    version: str
    """Its version."""
    timeline: str
    """The timeline of the version."""
    held_back: bool
    """True after a rollback: nothing newer is served until `follow`."""


class IndexQuestion(BaseModel):
    """Which versions to list."""

    model_config = {"use_attribute_docstrings": True}
    ready: bool = False
    """Whether to list only the version that is served."""


Body = TypeVar("Body", bound=BaseModel)


def _body_as(kind: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """Reads a body, whatever its content type: `curl -d` declares a form. An empty one is an object without keys."""

    async def read(request: Request) -> Body:
        try:
            return kind.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        except ClientDisconnect:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is incomplete") from None

    return read


class InferenceShortcut:
    """Passes inference requests straight to `InferenceHandler`, since routing costs as much as inference; others to
    `api`."""

    def __init__(self, answering: InferenceHandler, api: ASGIApp) -> None:
        self._answering, self._api = answering, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (asked := _model_asked(scope)) is not None:
            return await self._answering.answer(*asked, scope, receive, send)
        await self._api(scope, receive, send)

    def at_once(self, scope: Scope) -> AnswerAtOnce | None:
        """Answers the inference requests with this head, where they are short; None for other requests."""
        if (asked := _model_asked(scope)) is None:
            return None
        answering, headers = self._answering, BodyHeaders.of(scope)

        def answered(body: bytes, head_length: str | None) -> HeldAnswer | None:
            found = answering.at_once(*asked, headers, body, head_length)
            return None if found is None else (found.status, headers_sent(found.body, found.headers), found.body)

        return answered


def _model_asked(scope: Scope) -> tuple[str, str | None] | None:
    """Name and version of an inference request; None for other requests."""
    if scope["method"] == "POST" and scope["path"].endswith("/infer"):
        match scope["path"].split("/"):
            case ["", "v2", "models", name, "infer"]:
                return name, None
            case ["", "v2", "models", name, "versions", version, "infer"]:
                return name, version
    return None


def app(
    state: ReplicaState,
    keeper: UpdateLoop,
    figures: ReplicaMetrics,
    answering: InferenceHandler,
    rankers: Sequence[CandidateRanker] = (),
) -> FastAPI:
    """The application for all requests except inference. `rankers`: models that rank retrieved items."""
    api = FastAPI(title="Headrace replica", version=headrace.__version__, openapi_url="/openapi.json", docs_url=None)
    api.openapi = lambda: document(api)  # type: ignore[method-assign]  # FastAPI's way
    api.add_middleware(GZipMiddleware, minimum_size=MIN_BYTES, compresslevel=LEVEL)
    api.add_exception_handler(HTTPException, _error)
    api.add_exception_handler(RequestValidationError, _error)
    api.add_exception_handler(HeadraceError, _error)
    _add_health(api, state, keeper)
    _add_statistics(api, state, answering)
    _add_models(api, state, keeper, answering, rankers)
    _add_repository(api, state)
    _add_rollbacks(api, state)
    _add_retrieval(api, Retrieval(state, rankers), figures)

    @api.get("/metrics", response_class=Response, responses=errors())
    def metrics(request: Request) -> Response:
        """Metrics for Prometheus, as OpenMetrics where Accept has it."""
        text, content_type = figures.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, "vary": "accept"})

    return api


def lacks(state: ReplicaState, keeper: UpdateLoop) -> str:
    """The reason why a replica is not ready; "" once a version is loaded."""
    if state.served is not None:
        return ""
    return f"no version is loaded: {keeper.refused or keeper.trouble or 'none was found yet'}"


def _add_health(api: FastAPI, state: ReplicaState, keeper: UpdateLoop) -> None:
    @api.get("/v2", responses=errors())
    async def server() -> dict[str, Any]:
        """Name, version and extensions of this server."""
        return server_metadata()

    @api.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether this process answers."""
        return {"live": True}

    @api.get("/v2/health/ready", responses=described(HTTPStatus.SERVICE_UNAVAILABLE))
    async def ready() -> JSONResponse:
        """Whether a version is loaded."""
        if why := lacks(state, keeper):
            return JSONResponse({"ready": False, "error": why}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"ready": True})


def _add_statistics(api: FastAPI, state: ReplicaState, answering: InferenceHandler) -> None:
    @api.get("/v2/models/stats", responses=errors())
    async def statistics() -> dict[str, Any]:
        """Counts and durations of inference requests since the process began, over all versions."""
        return answering.statistics_of_models()

    @api.get("/v2/models/{name}/stats", responses=OF_MODEL)
    async def model_statistics(name: str) -> dict[str, Any]:
        """The same for the model."""
        check_name(state, name)
        return answering.statistics_of_models()

    @api.get("/v2/models/{name}/versions/{version}/stats", responses=OF_MODEL)
    async def version_statistics(name: str, version: str) -> dict[str, Any]:
        """The same for the served version."""
        check_name(state, name, version)
        return answering.statistics_of_models()


def _add_models(
    api: FastAPI,
    state: ReplicaState,
    keeper: UpdateLoop,
    answering: InferenceHandler,
    rankers: Sequence[CandidateRanker],
) -> None:
    @api.get("/v2/models/{name}", responses=OF_MODEL)
    async def model(name: str) -> dict[str, Any]:
        """Inputs, outputs and versions of the model."""
        check_name(state, name)
        return _described(state, keeper, rankers)

    @api.get("/v2/models/{name}/versions/{version}", responses=OF_MODEL)
    async def model_version(name: str, version: str) -> dict[str, Any]:
        """The same for the served version."""
        check_name(state, name, version)
        return _described(state, keeper, rankers)

    @api.get("/v2/models/{name}/ready", responses=OF_MODEL)
    async def model_ready(name: str) -> dict[str, Any]:
        """Whether the model answers."""
        check_name(state, name)
        return {"name": name, "ready": True}

    @api.get("/v2/models/{name}/versions/{version}/ready", responses=OF_MODEL)
    async def version_ready(name: str, version: str) -> dict[str, Any]:
        """Whether this version answers."""
        check_name(state, name, version)
        return {"name": name, "ready": True}

    @api.get("/v2/models/{name}/config", responses=OF_MODEL)
    async def model_configuration(name: str) -> dict[str, Any]:
        """Inputs, outputs and the largest batch, in the form of Triton's model configuration."""
        check_name(state, name)
        return configuration(name, state.model(), answering.max_batch())

    @api.get("/v2/models/{name}/versions/{version}/config", responses=OF_MODEL)
    async def version_configuration(name: str, version: str) -> dict[str, Any]:
        """The same for the served version."""
        check_name(state, name, version)
        return configuration(name, state.model(), answering.max_batch())


def _add_repository(api: FastAPI, state: ReplicaState) -> None:
    @api.post("/v2/repository/index", openapi_extra=body_of(IndexQuestion), responses=errors(*OF_BODY))
    async def index(asked: Annotated[IndexQuestion, Depends(_body_as(IndexQuestion))]) -> list[dict[str, Any]]:
        """The kept versions of the model, and which of them is served."""
        return repository_index(state, ready=asked.ready)

    @api.post("/v2/repository/models/{name}/{change}", status_code=HTTPStatus.BAD_REQUEST, responses=errors())
    async def change(name: str, change: Literal["load", "unload"]) -> ErrorAnswer:
        """Refused: the versions of a replica come from its job."""
        return ErrorAnswer(error=LOADING)


def _add_rollbacks(api: FastAPI, state: ReplicaState) -> None:
    refused = OF_MODEL | errors(HTTPStatus.CONFLICT)

    @api.post("/v2/models/{name}/rollback", openapi_extra=body_of(Rollback), responses=refused | errors(*OF_BODY))
    def rollback(name: str, asked: Annotated[Rollback, Depends(_body_as(Rollback))]) -> VersionInForce:
        """Serve a kept version, and nothing newer until `follow`."""
        check_name(state, name)
        return _told(state.go_to(asked.version, asked.timeline), state)

    @api.post("/v2/models/{name}/follow", responses=refused)
    def follow(name: str) -> VersionInForce:
        """Serve the newest version and later ones."""
        check_name(state, name)
        newest = state.go_to_newest()
        assert newest is not None
        return _told(newest, state)


def _add_retrieval(api: FastAPI, retrieval: Retrieval, figures: ReplicaMetrics) -> None:
    described_body = body_of(RetrievalRequest)

    @api.post("/v2/models/{name}/retrieve", openapi_extra=described_body, responses=OF_MODEL | errors(*OF_BODY))
    def retrieve(name: str, asked: Annotated[RetrievalRequest, Depends(_body_as(RetrievalRequest))]) -> RetrievalAnswer:
        """The best items for users, by the served version. Their job file has a section `[retrieval]`."""
        with figures.retrieve_seconds.time():
            return retrieval.answer(name, asked)


def _told(kept: KeptVersion, state: ReplicaState) -> VersionInForce:
    return VersionInForce(
        name=kept.version.job,
        version=str(kept.version.number),
        timeline=kept.version.timeline,
        held_back=state.is_held_back,
    )


def _described(state: ReplicaState, keeper: UpdateLoop, rankers: Sequence[CandidateRanker]) -> dict[str, Any]:
    served = state.served
    assert served is not None
    return {
        **model_metadata(state, served),
        "parameters": {
            **_told(served, state).model_dump(),
            "event_time": served.event_time_s,
            "served_at": served.served_at_s,
            "rows": state.num_rows(),
            "items": 0 if (items := state.items) is None else items.index.num_items,
            "refused": keeper.refused,
            "trouble": keeper.trouble,
            "items_trouble": state.index_trouble,
            "rankers": {each.name: each.version for each in rankers if each.name is not None},
        },
    }


def _error(_request: Request, error: Exception) -> JSONResponse:
    match error:
        case HTTPException():
            return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            said = f"{place}: {first['msg']}" if place else first["msg"]
            return JSONResponse({"error": said}, HTTPStatus.BAD_REQUEST)
        case _:
            status, why = refusal_of(error)
            return JSONResponse({"error": why}, status)


def gated(
    state: ReplicaState,
    keeper: UpdateLoop,
    figures: ReplicaMetrics,
    config: ReplicaConfig,
    answering: InferenceHandler,
    rankers: Sequence[CandidateRanker] = (),
) -> RequestGate:
    """The complete ASGI application of a replica. Raises SpecError."""
    whole = InferenceShortcut(answering, app(state, keeper, figures, answering, rankers))
    limits = config.max_body, config.max_requests
    return RequestGate(whole, config.token(), *limits, local=config.is_loopback, at_once=whole.at_once)


def serving(api: ASGIApp, listener: Listener, tls: tuple[Path, Path] | None = None) -> AbstractContextManager[None]:
    """Serve until the context ends, over TLS with a certificate and key. Requests in progress are still answered."""
    at_once = api.at_once if isinstance(api, RequestGate) else None
    connection = partial(InferenceConnection, at_once=at_once)
    return http_server.serving(
        api, listener, tls=tls, thread_name="requests", http=connection, lifespan="off", ws="none"
    )
