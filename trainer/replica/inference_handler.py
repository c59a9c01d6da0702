"""Answers inference requests: from the body of a request to the body of its answer."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from headrace import documents
from headrace.errors import BadInput, HeadraceError
from headrace.http.front_door import MAX_DIGITS
from headrace.trainer.replica.access import JSON_CONTENT, send_answer, send_error
from headrace.trainer.replica.content_coding import BodyRefused, decoded, encoded
from headrace.trainer.replica.inference_messages import (
    InferenceResult,
    InvalidInference,
    RequestReader,
    attach_raw,
    checked_outputs,
    format_answer,
)
from headrace.trainer.replica.known_requests import KnownRequest, KnownRequests
from headrace.trainer.replica.replica_metrics import Durations, ReplicaMetrics
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState, VersionNotKept, VersionUnservable
from headrace.trainer.replica.serving_model import MemoryMissing
from headrace.trainer.serving.item_filter import FilterRefused

INLINE_BYTES = 1 << 16
"""Longer requests are answered by another thread, so that they do not delay short ones."""
INLINE_COST = 2048
"""Likewise requests of a higher cost, whatever their length; see RequestReader.cost. This cost takes about 1 ms."""
MAX_LONG = 4
"""Long requests that are answered at the same time, each with the memory of a batch; others wait."""
TRIES = 10
"""Tries of one request while the model keeps changing."""
HEAD_LENGTH = "inference-header-content-length"
RAW_CONTENT = {"content-type": "application/octet-stream"}

log = logging.getLogger(__name__)


class NoSuchModel(BadInput):
    """A model or version that is not served."""


STATUS: dict[type[Exception], HTTPStatus] = {
    NoSuchModel: HTTPStatus.NOT_FOUND,
    InvalidInference: HTTPStatus.BAD_REQUEST,
    FilterRefused: HTTPStatus.BAD_REQUEST,
    MemoryMissing: HTTPStatus.BAD_REQUEST,
    NoVersionLoaded: HTTPStatus.SERVICE_UNAVAILABLE,
    VersionNotKept: HTTPStatus.NOT_FOUND,
    VersionUnservable: HTTPStatus.CONFLICT,
}
"""Statuses of errors; 500 for another one."""


@dataclass(frozen=True, slots=True)
class BodyHeaders:
    """The headers of a request that say how its body is read, and which body its answer may have."""

    coding: str = ""
    """Content-Encoding."""
    head_length: str | None = None
    """Inference-Header-Content-Length: bytes of JSON before raw tensors."""
    accepted: str = ""
    """Accept-Encoding."""

    @classmethod
    def of(cls, scope: Scope) -> "BodyHeaders":
        """The headers of an ASGI request."""
        headers = Headers(scope=scope)
        listed = (", ".join(headers.getlist(name)) for name in ("content-encoding", "accept-encoding"))
        coding, accepted = listed
        return cls(coding, headers.get(HEAD_LENGTH), accepted)


PLAIN = BodyHeaders()
Answer = TypeVar("Answer")


class InferenceAnswer(NamedTuple):
    """An answer over HTTP."""

    status: int
    body: bytes
    headers: Mapping[str, str] = JSON_CONTENT


class InferenceHandler:
    """Answers inference requests. Any thread."""

    def __init__(self, state: ReplicaState, figures: ReplicaMetrics, max_batch: int, max_body: int) -> None:
        self._state, self._statistics = state, figures.inference
        self._max_batch, self._max_body = max_batch, max_body
        self._known: KnownRequests | None = None
        self._long = ThreadPoolExecutor(MAX_LONG, "inference")

    def infer(self, name: str, version: str | None, body: bytes, headers: BodyHeaders = PLAIN) -> InferenceAnswer:
        """The answer to a body."""
        now_s = time.perf_counter()
        return self._answer(
            name, version, self._read(body, headers.coding, headers.head_length), headers, RequestClock(now_s, now_s)
        )

    def _read(self, body: bytes, coding: str, head_length: str | None) -> object:
        """The parsed request in a body; where it cannot be read, the error, returned and not raised."""
        try:
            content = decoded(body, coding, self._max_body)
            length = len(content) if head_length is None else _length(head_length, len(content))
        except (BodyRefused, InvalidInference) as error:
            return error
        head, raw = content[:length], content[length:]
        again = partial(_parsed, head, raw)
        try:
            known = self._current_known().read(head, raw, again)
        except NoVersionLoaded:
            known = None
        return again() if known is None else known

    def _answer(
        self, name: str, version: str | None, request: object, headers: BodyHeaders, clock: "RequestClock"
    ) -> InferenceAnswer:
        """The answer to a parsed request."""
        try:
            found = self._predicted(name, version, request, headers, clock)
        except Exception as error:  # noqa: BLE001  # outermost handler of a request: the next one is answered
            status, why = refusal_of(error)
            found = InferenceAnswer(status, json.dumps({"error": why}).encode())
        self.count(found.status, clock)
        return found

    def _predicted(
        self, name: str, version: str | None, request: object, headers: BodyHeaders, clock: "RequestClock"
    ) -> InferenceAnswer:
        result = self.predicted(name, version, request, clock)
        asked = request.rest if isinstance(request, KnownRequest) else request
        assert isinstance(asked, dict)  # otherwise nothing was predicted
        head, raw = format_answer(name, asked, result)
        return _formatted(head, raw, headers.accepted)

    def at_once(
        self, name: str, version: str | None, headers: BodyHeaders, body: bytes, head_length: str | None
    ) -> InferenceAnswer | None:
        """The answer to a short request without errors; None for others, which are to be given to `answer`."""
        arrived_s = time.perf_counter()
        if headers.coding or len(body) > INLINE_BYTES:
            return None
        request = self._read(body, "", head_length)
        if not isinstance(request, KnownRequest) or request.cost > INLINE_COST:
            return None
        clock = RequestClock(arrived_s, arrived_s)
        try:
            found = self._predicted(name, version, request, headers, clock)
        except Exception:  # noqa: BLE001  # `answer` meets it again, and words it
            return None
        self.count(found.status, clock)
        return found

    def predicted(self, name: str, version: str | None, request: object, clock: "RequestClock") -> InferenceResult:
        """The outputs for a parsed request. Raises NoSuchModel, NoVersionLoaded, MemoryMissing, BadInput; also the
        error that `request` is."""
        check_name(self._state, name, version)
        if isinstance(request, Exception):
            raise request
        for _ in range(TRIES):
            reader = self._current()
            if isinstance(request, KnownRequest) and request.reader is not reader:
                request = request.again()
            if isinstance(request, KnownRequest):
                inputs = request.inputs
                wanted: Sequence[str] = reader.model.outputs
            else:
                inputs = reader.inputs(request)
                assert isinstance(request, dict)  # otherwise it had no inputs
                wanted = reader.outputs(request, inputs.num_samples)
            clock.read_s = time.perf_counter()
            done = self._state.predict(reader.model, inputs)
            if done is None:  # the model changed meanwhile
                continue
            kept, found = done
            if version is not None and version != self._state.name_of(kept):
                check_name(self._state, name, version)
                continue
            clock.predicted_s, clock.num_samples = time.perf_counter(), inputs.num_samples
            return InferenceResult(self._state.name_of(kept), checked_outputs(found, wanted, inputs.events))
        raise NoVersionLoaded("the model keeps changing; try again")

    def count(self, status: int, clock: "RequestClock") -> None:
        """Count a request that was answered now."""
        end_s = time.perf_counter()
        if status != HTTPStatus.OK:
            return self._statistics.add_failure(status, end_s - clock.arrived_s)
        parts = clock.begin_s - clock.arrived_s, clock.read_s - clock.begin_s, clock.predicted_s - clock.read_s
        self._statistics.add(clock.num_samples, Durations(*parts, end_s - clock.predicted_s))

    def _current(self) -> RequestReader:
        """The reader of the model that is served. Raises NoVersionLoaded."""
        return self._current_known().reader

    def _current_known(self) -> KnownRequests:
        """The reader of known requests to the model that is served. Raises NoVersionLoaded."""
        model, known = self._state.model(), self._known
        if known is None or known.reader.model is not model:
            self._known = known = KnownRequests(RequestReader(model, self._max_batch))
        return known

    async def answer(self, name: str, version: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        body = b""
        while True:
            try:
                message = await receive()
            except HTTPException as error:  # too long, or too slow
                return await send_error(send, HTTPStatus(error.status_code), error.detail)
            if message["type"] == "http.disconnect":
                return
            body = body + message["body"] if body else message.get("body", b"")
            if not message.get("more_body", False):
                break
        headers = BodyHeaders.of(scope)
        found = await self.scheduled(
            len(body),
            partial(self._read, body, headers.coding, headers.head_length),
            lambda request, clock: self._answer(name, version, request, headers, clock),
            is_long=bool(headers.coding),
        )
        await send_answer(send, *found)

    async def scheduled(
        self,
        num_bytes: int,
        read: Callable[[], object],
        answer: Callable[[object, "RequestClock"], Answer],
        *,
        is_long: bool = False,
    ) -> Answer:
        """Parse a request that is now here whole, and answer it; on another thread where others would wait for it.

        `read` returns what `predicted` takes. `is_long`: whatever `num_bytes` says.
        """
        arrived_s = time.perf_counter()
        aside = partial(asyncio.get_running_loop().run_in_executor, self._long)
        if is_long or num_bytes > INLINE_BYTES:

            def read_and_answer() -> Answer:
                clock = RequestClock(arrived_s, time.perf_counter())
                return answer(read(), clock)

            return await aside(read_and_answer)
        request = read()
        if self._is_short(request):
            return answer(request, RequestClock(arrived_s, arrived_s))
        return await aside(lambda: answer(request, RequestClock(arrived_s, time.perf_counter())))

    def statistics_of_models(self) -> dict[str, Any]:
        """Counts and durations of requests, in the form of the protocol's statistics."""
        served = self._state.served
        if served is None:
            return {"model_stats": []}
        return {"model_stats": [self._statistics.message(served.version.job, self._state.name_of(served))]}

    def max_batch(self) -> int:
        """Most samples of one request to the model that is served. Raises NoVersionLoaded."""
        return self._current().max_batch

    def _is_short(self, request: object) -> bool:
        """Whether other requests may wait until this one is answered."""
        try:
            cost = request.cost if isinstance(request, KnownRequest) else self._current().cost(request)
            return cost <= INLINE_COST
        except NoVersionLoaded:
            return True


@dataclass(slots=True)
class RequestClock:
    """When the parts of one request were done (`time.perf_counter`), and its samples."""

    arrived_s: float
    """Its body was there."""
    begin_s: float
    """A thread began with it."""
    read_s: float = 0.0
    predicted_s: float = 0.0
    num_samples: int = 0


def status_of(error: Exception) -> HTTPStatus:
    """Status of the answer to a request with this error."""
    if isinstance(error, BodyRefused):
        return error.status
    known = (STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    return next(known, HTTPStatus.INTERNAL_SERVER_ERROR)


def refusal_of(error: Exception) -> tuple[HTTPStatus, str]:
    """Status and text of the answer to a request with this error; a bug is logged."""
    if isinstance(error, HeadraceError | BodyRefused):
        return status_of(error), str(error)
    log.error("a request could not be answered", exc_info=error)
    return status_of(error), "a bug in the replica; see its log"


def _parsed(head: bytes, raw: bytes) -> object:
    """The request in JSON and the raw bytes behind it; where it cannot be read, the error, returned and not raised."""
    try:
        request = documents.parse(head, "the body")
        attach_raw(request, raw)
    except InvalidInference as error:
        return error
    except documents.InvalidDocument as error:
        return InvalidInference(str(error))
    return request


def _formatted(head: bytes, raw: bytes, accepted: str) -> InferenceAnswer:
    """The answer with this JSON and these raw bytes, compressed where the client accepts it."""
    headers = RAW_CONTENT | {HEAD_LENGTH: str(len(head))} if raw else JSON_CONTENT
    body, coding = encoded(head + raw, accepted)
    if coding is not None:
        headers = {**headers, "content-encoding": coding, "vary": "accept-encoding"}
    return InferenceAnswer(HTTPStatus.OK, body, headers)


def check_name(state: ReplicaState, name: str, version: str | None = None) -> None:
    """Raises NoSuchModel, NoVersionLoaded."""
    served = state.served
    if served is None:
        raise NoVersionLoaded("no version is loaded yet; try again once /v2/health/ready reports ready")
    if name != served.version.job:
        raise NoSuchModel(f"there is no model {name!r}; this replica serves {served.version.job!r}")
    if version is not None and version != state.name_of(served):
        known = any(version == state.name_of(each) for each in state.versions())
        hint = "it is kept: roll back to it first" if known else "it is not kept either"
        raise NoSuchModel(f"version {version} is not served, but {state.name_of(served)}; {hint}")


def _length(text: str, most: int) -> int:
    """The length of a JSON head. Raises InvalidInference."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) <= most:
        return int(text)
    raise InvalidInference(
        f"Inference-Header-Content-Length is {text!r:.100}; it must be the length of the JSON at the beginning of the "
        f"body, 0 to {most}"
    )
