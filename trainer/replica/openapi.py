"""The OpenAPI document of a replica: which errors each route answers, and inference, which FastAPI does not route.

The models of this module describe inference for readers and generators of clients;
trainer.replica.inference_messages parses it.
"""

from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.trainer.replica.inference_messages import NUMBERS, TEXT

Responses = dict[int | str, dict[str, Any]]
HEAD = "Bytes of JSON in front of raw tensors"
REFERENCE = "#/components/schemas/{model}"
EVERYWHERE = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.SERVICE_UNAVAILABLE)
"""Errors of trainer.replica.access, except those of bodies."""
OF_BODY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
OF_INFERENCE = (
    *EVERYWHERE, HTTPStatus.NOT_FOUND, *OF_BODY, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HTTPStatus.INTERNAL_SERVER_ERROR,
)  # fmt: skip
MEANING = {
    HTTPStatus.BAD_REQUEST: "The request is malformed, or under a host name that is not answered",
    HTTPStatus.UNAUTHORIZED: "The token is missing or wrong",
    HTTPStatus.FORBIDDEN: "The request comes from a page of another site",
    HTTPStatus.NOT_FOUND: "The model or version is not served",
    HTTPStatus.CONFLICT: "The version is kept, and cannot be served: its items have no vectors",
    HTTPStatus.REQUEST_TIMEOUT: "The body arrives too slowly",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too long, also once it is decompressed",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The content coding is neither gzip nor deflate",
    HTTPStatus.INTERNAL_SERVER_ERROR: "A prediction is not finite, or a bug",
    HTTPStatus.SERVICE_UNAVAILABLE: "No version is loaded, or too many requests are in progress",
}


class _Message(BaseModel):
    model_config = {"use_attribute_docstrings": True}


class ErrorAnswer(_Message):
    """An error in the form of the protocol."""

    error: str
    """The fault, and what to do."""


class RequestTensorDocument(_Message):
    """A slot's values for all samples."""

    name: str
    """The slot; or its name with ".lengths" or ".weight"."""
    datatype: Literal[*NUMBERS, TEXT]  # type: ignore[valid-type]  # the tuple is the definition
    shape: list[int]
    data: list[Any] | None = None
    """Flat or nested values; absent where the tensor is raw."""
    parameters: dict[str, Any] | None = None
    """`binary_data_size`: bytes of a raw tensor behind the JSON."""


class RequestedOutput(_Message):
    """An output that the answer shall have."""

    name: str
    parameters: dict[str, Any] | None = None
    """`binary_data`: whether it is raw."""


class InferenceRequest(_Message):
    """The samples to predict, as tensors or as raw events."""

    id: str | None = None
    """Comes back in the answer."""
    inputs: list[RequestTensorDocument] | None = None
    events: list[Any] | None = None
    """Raw events instead of inputs, with `pipe.kind = "columns"`."""
    event_time: list[float] | None = None
    """Unix seconds of the events."""
    outputs: list[RequestedOutput] | None = None
    """Default: all."""
    parameters: dict[str, Any] | None = None
    """`binary_data_output`: whether outputs are raw that do not say it themselves."""


class AnsweredTensor(_Message):
    """An output for all samples."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    """Flat values; absent where the tensor is raw."""
    parameters: dict[str, Any] | None = None
    """`binary_data_size`: bytes of a raw tensor behind the JSON."""


class InferenceResponse(_Message):
    """Predictions."""

    model_name: str
    model_version: str
    """The version that predicted."""
    id: str | None = None
    outputs: list[AnsweredTensor]


def described(*statuses: HTTPStatus) -> Responses:
    """The errors with these statuses, for a route."""
    return {int(each): {"model": ErrorAnswer, "description": MEANING[each]} for each in statuses}


def errors(*statuses: HTTPStatus) -> Responses:
    """The errors of every route but health, and these."""
    return described(*EVERYWHERE, *statuses)


OF_MODEL = errors(HTTPStatus.NOT_FOUND)


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that reads it itself, for `openapi_extra`."""
    return {
        "requestBody": {"content": {"application/json": {"schema": kind.model_json_schema(ref_template=REFERENCE)}}}
    }


def document(api: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with inference and without the errors of validation that are answered with 400 here."""
    if api.openapi_schema:
        return api.openapi_schema
    found = get_openapi(title=api.title, version=api.version, routes=api.routes)
    schemas = found["components"]["schemas"]
    for path in found["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for media in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(media["schema"].pop("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, of_inference = models_json_schema(
        [(InferenceRequest, "validation"), (InferenceResponse, "validation")], ref_template=REFERENCE
    )
    schemas.update(of_inference["$defs"])
    found["paths"]["/v2/models/{name}/infer"] = {"post": _inference("infer", "name")}
    versioned = "/v2/models/{name}/versions/{version}/infer"
    found["paths"][versioned] = {"post": _inference("infer_version", "name", "version")}
    api.openapi_schema = found
    return found


def _inference(operation: str, *parameters: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model=ErrorAnswer.__name__)}}}
    return {
        "summary": "Predict samples",
        "description": "Raw tensors follow the JSON; its length is then in the header "
        "Inference-Header-Content-Length. Bodies may be compressed, by gzip or deflate.",
        "operationId": operation,
        "parameters": [
            *({"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in parameters),
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "description": HEAD,
                "schema": {"type": "integer"},
            },
        ],
        "requestBody": {"required": True, "content": _messages(InferenceRequest)},
        "responses": {
            "200": {"description": "Predictions", "content": _messages(InferenceResponse)},
            **{str(int(each)): {"description": MEANING[each], "content": error} for each in OF_INFERENCE},
        },
    }


def _messages(kind: type[BaseModel]) -> dict[str, Any]:
    """A message as JSON, or as JSON with raw tensors behind it."""
    return {
        "application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }
