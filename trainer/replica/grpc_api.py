"""The gRPC API of a replica: GRPCInferenceService of the Open Inference Protocol, with the token and TLS of HTTP.

Every call is declared as one with a stream of messages, of which it reads the first: so the token is checked before a
message is read, and a slow sender holds no thread.
"""

import asyncio
import hmac
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from headrace.address import format_address
from headrace.errors import SpecError
from headrace.http.listening import ConnectionBounds
from headrace.rpc.channels import serialize
from headrace.rpc.rpc_server import bounds_of_callers
from headrace.trainer.proto import open_inference_pb2 as pb
from headrace.trainer.replica.access import BODY_S
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.inference_handler import (
    InferenceHandler,
    NoSuchModel,
    RequestClock,
    check_name,
    refusal_of,
    status_of,
)
from headrace.trainer.replica.inference_messages import (
    CLASSIFICATION,
    SHARED_MEMORY,
    TEXT,
    InferenceResult,
    InvalidInference,
    kind_of,
    raw_of,
    texts,
)
from headrace.trainer.replica.model_documents import (
    configuration,
    model_metadata,
    repository_index,
    server_metadata,
)
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState

# Messages of the Open Inference Protocol over gRPC, as the requests that trainer.replica.inference_messages reads.
#
# Source: the protocol's inference_grpc.md. Answers have raw outputs, which every client reads.

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    TEXT: "bytes_contents",
}
"""Fields of InferTensorContents; values of other datatypes must be raw."""

MAX_TENSORS = 1 << 14
"""Most inputs, and outputs, of one request; more are refused before they are copied."""


def request_of(message: pb.ModelInferRequest) -> dict[str, Any]:
    """A request in the form of JSON, with bytes as the data of raw tensors. Raises InvalidInference."""
    raw, num_tensors = message.raw_input_contents, max(len(message.inputs), len(message.outputs))
    if num_tensors > MAX_TENSORS:
        raise InvalidInference(f"{num_tensors} inputs or outputs in one request; at most {MAX_TENSORS}")
    if raw and len(raw) != len(message.inputs):
        raise InvalidInference(f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs; send all or none raw")
    inputs = []
    for place, tensor in enumerate(message.inputs):
        inputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": _parameters(tensor.parameters),
                "data": raw[place] if raw else _contents(tensor),
            }
        )
    outputs = [{"name": each.name, "parameters": _parameters(each.parameters)} for each in message.outputs]
    return {"id": message.id, "inputs": inputs, "outputs": outputs}


def _contents(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        known = ", ".join(CONTENTS)
        raise InvalidInference(
            f"{tensor.name!r:.100}: contents cannot be of type {tensor.datatype!r:.100}; send it raw, or as {known}"
        )
    values = list(getattr(tensor.contents, field))
    return texts(tensor.name, values) if tensor.datatype == TEXT else values


def _parameters(found: Mapping[str, pb.InferParameter]) -> dict[str, bool]:
    """Those parameters that are refused; others mean nothing here."""
    return {name: True for name in (SHARED_MEMORY, CLASSIFICATION) if name in found}


def answer_of(message: pb.ModelInferRequest, result: InferenceResult) -> pb.ModelInferResponse:
    """The answer to a request."""
    answer = pb.ModelInferResponse(model_name=message.model_name, model_version=result.version, id=message.id)
    for name, value in result.outputs.items():
        answer.outputs.add(name=name, datatype=kind_of(value), shape=value.shape)
        answer.raw_output_contents.append(raw_of(value))
    return answer


STOP_S = 5.0
"""How long calls in flight may take at the end."""
CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
}
OPEN = ("ServerLive", "ServerReady")
"""Calls without a token, for process supervisors."""
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class GrpcCalls:
    """The calls of the service: from the bytes of a request to the answer. They raise what `refusal_of` knows."""

    def __init__(self, state: ReplicaState, answering: InferenceHandler) -> None:
        self._state, self._answering = state, answering

    async def ServerLive(self, _content: bytes) -> Message:
        """Whether this process answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _content: bytes) -> Message:
        """Whether a version is loaded."""
        return pb.ServerReadyResponse(ready=self._state.served is not None)

    async def ModelReady(self, content: bytes) -> Message:
        """Whether the model, or this version of it, answers."""
        try:
            self._check(pb.ModelReadyRequest.FromString(content))
        except (NoSuchModel, NoVersionLoaded):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, _content: bytes) -> Message:
        """Name, version and extensions of this server."""
        return ParseDict(server_metadata(), pb.ServerMetadataResponse())

    async def ModelMetadata(self, content: bytes) -> Message:
        """Inputs, outputs and versions of the model."""
        self._check(pb.ModelMetadataRequest.FromString(content))
        served = self._state.served
        assert served is not None
        return ParseDict(model_metadata(self._state, served), pb.ModelMetadataResponse())

    async def ModelConfig(self, content: bytes) -> Message:
        """Inputs, outputs and the largest batch, in the form of Triton's model configuration."""
        asked = pb.ModelConfigRequest.FromString(content)
        self._check(asked)
        found = configuration(asked.name, self._state.model(), self._answering.max_batch())
        return ParseDict({"config": found}, pb.ModelConfigResponse())

    async def ModelStatistics(self, content: bytes) -> Message:
        """Counts and durations of inference requests since the process began, over all versions."""
        asked = pb.ModelStatisticsRequest.FromString(content)
        if asked.name:
            self._check(asked)
        return ParseDict(
            self._answering.statistics_of_models(), pb.ModelStatisticsResponse(), ignore_unknown_fields=True
        )

    async def RepositoryIndex(self, content: bytes) -> Message:
        """The kept versions of the model, and which of them is served."""
        asked = pb.RepositoryIndexRequest.FromString(content)
        return ParseDict({"models": repository_index(self._state, ready=asked.ready)}, pb.RepositoryIndexResponse())

    async def ModelInfer(self, content: bytes) -> Message:
        """Predict samples."""
        message = pb.ModelInferRequest()
        return await self._answering.scheduled(
            len(content), partial(_read, message, content), partial(self._predicted, message)
        )

    def _predicted(self, message: pb.ModelInferRequest, request: object, clock: RequestClock) -> Message:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        try:
            version = message.model_version or None
            result = self._answering.predicted(message.model_name, version, request, clock)
            answer, status = answer_of(message, result), HTTPStatus.OK
        except Exception as error:
            status = status_of(error)
            raise
        finally:
            self._answering.count(status, clock)
        return answer

    def _check(self, asked: Any) -> None:
        check_name(self._state, asked.name, asked.version or None)


def _read(message: pb.ModelInferRequest, content: bytes) -> object:
    """Fill the message; the request that it is, or the error, returned and not raised. Raises DecodeError."""
    message.ParseFromString(content)
    try:
        return request_of(message)
    except InvalidInference as error:
        return error


@contextmanager
def serving(state: ReplicaState, answering: InferenceHandler, config: ReplicaConfig) -> Iterator[str | None]:
    """Answer calls while the context lasts, and yield host:port; without `grpc_listen`, do nothing.

    Calls in flight are still answered. Raises SpecError.
    """
    if config.grpc_address is None:
        yield None
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grpc", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        server, port = run(_started(GrpcCalls(state, answering), config, config.grpc_address))
        try:
            yield format_address(config.grpc_address[0], port)
        finally:
            run(server.stop(STOP_S))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _started(calls: GrpcCalls, config: ReplicaConfig, at: tuple[str, int]) -> tuple[grpc.aio.Server, int]:
    """A server and its port. Raises SpecError."""
    token, tls = config.token(), config.tls()
    server = grpc.aio.server(
        maximum_concurrent_rpcs=config.max_requests,
        options=[
            ("grpc.max_receive_message_length", config.max_body),
            ("grpc.max_send_message_length", -1),  # answers are bounded by MAX_VALUES
            ("grpc.so_reuseport", 0),
            *bounds_of_callers(ConnectionBounds.here().open // 4, is_port=True),
        ],
    )
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        bearer = None if token is None or method.name in OPEN else f"Bearer {token}"
        answer = _guarded(getattr(calls, method.name), bearer)
        handlers[method.name] = grpc.stream_unary_rpc_method_handler(answer, None, serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    address = format_address(*at)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            cert, key = tls
            pair = [(key.read_bytes(), cert.read_bytes())]
            port = server.add_secure_port(address, grpc.ssl_server_credentials(pair))
    except RuntimeError as error:
        raise SpecError(f"{address} is not available: choose another port", "--grpc-listen") from error
    await server.start()
    log.info("answering gRPC on %s", format_address(at[0], port))
    return server, port


def _guarded(
    call: Callable[[bytes], Awaitable[Message]], bearer: str | None
) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Message]]:
    """A call for clients with the token, whose message arrives in time; its errors as statuses of gRPC."""

    async def answer(messages: AsyncIterator[bytes], context: Context) -> Message:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if bearer is not None and not hmac.compare_digest(str(given).encode(), bearer.encode()):
            await _abort(
                context, grpc.StatusCode.UNAUTHENTICATED, "send authorization: Bearer with this replica's token"
            )
        try:
            async with asyncio.timeout(BODY_S):
                content = await anext(messages)
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"the message did not arrive within {BODY_S:g} s")
        except StopAsyncIteration:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        try:
            return await call(content)
        except DecodeError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {error}")
        except Exception as error:  # noqa: BLE001  # outermost handler of a call
            status, why = refusal_of(error)
            await _abort(context, CODES[status], why)

    return answer


async def _abort(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort raises")
