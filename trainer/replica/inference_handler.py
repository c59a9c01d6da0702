"""Answers inference requests: from the body of a request to the body of its answer."""

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import Receive, Send

from headrace import documents
from headrace.errors import BadInput
from headrace.trainer.replica.access import send_answer, send_error
from headrace.trainer.replica.filled_inputs import MemoryMissing
from headrace.trainer.replica.inference_messages import InvalidInference, RequestReader, format_answer
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState

INLINE_BYTES = 1 << 16
"""Longer requests are answered by another thread, so that they do not delay short ones."""
INLINE_COST = 2048
"""Likewise requests of a higher cost, whatever their length; see RequestReader.cost. This cost takes about 1 ms."""
MAX_LONG = 4
"""Long requests that are answered at the same time, each with the memory of a batch; others wait."""
TRIES = 10
"""Tries of one request while the model keeps changing."""

log = logging.getLogger(__name__)


class NoSuchModel(BadInput):
    """A model or version that is not served."""


class InferenceHandler:
    """Answers inference requests. Any thread."""

    def __init__(self, state: ReplicaState, figures: ReplicaMetrics, max_batch: int) -> None:
        self._state, self._figures, self._max_batch = state, figures, max_batch
        self._reader: RequestReader | None = None
        self._long = ThreadPoolExecutor(MAX_LONG, "inference")

    def infer(self, name: str, version: str | None, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        return self._answer(name, version, _read(body))

    def _answer(self, name: str, version: str | None, request: object) -> tuple[int, bytes]:
        """Status and body of the answer to a parsed request."""
        begin_s = time.perf_counter()
        try:
            status, found = HTTPStatus.OK, self._infer(name, version, request)
        except NoSuchModel as error:
            status, found = HTTPStatus.NOT_FOUND, _error(error)
        except (InvalidInference, MemoryMissing) as error:
            status, found = HTTPStatus.BAD_REQUEST, _error(error)
        except NoVersionLoaded as error:
            status, found = HTTPStatus.SERVICE_UNAVAILABLE, _error(error)
        except BadInput as error:
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, _error(error)
        except Exception:  # noqa: BLE001  # outermost handler of a request: the next one is answered
            log.exception("a request could not be answered")
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, b'{"error": "a bug in the replica; see its log"}'
        self._figures.count(status, time.perf_counter() - begin_s)
        return status, found

    def _infer(self, name: str, version: str | None, request: object) -> bytes:
        check_name(self._state, name, version)
        if isinstance(request, InvalidInference):
            raise request
        for _ in range(TRIES):
            reader = self._current()
            inputs = reader.inputs(request)
            assert isinstance(request, dict)  # otherwise it had no inputs
            wanted = reader.outputs(request, inputs.num_samples)
            done = self._state.predict(reader.model, inputs)
            if done is None:  # the model changed meanwhile
                continue
            kept, found = done
            if version is not None and version != self._state.name_of(kept):
                check_name(self._state, name, version)
                continue
            self._figures.samples.inc(inputs.num_samples)
            return json.dumps(
                format_answer(name, self._state.name_of(kept), request, found, wanted, inputs.events)
            ).encode()
        raise NoVersionLoaded("the model keeps changing; try again")

    def _current(self) -> RequestReader:
        """The reader of the model that is served. Raises NoVersionLoaded."""
        model, reader = self._state.model(), self._reader
        if reader is None or reader.model is not model:
            self._reader = reader = RequestReader(model, self._max_batch)
        return reader

    async def answer(self, name: str, version: str | None, receive: Receive, send: Send) -> None:
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
        aside = asyncio.get_running_loop().run_in_executor
        if len(body) > INLINE_BYTES:
            status, found = await aside(self._long, self.infer, name, version, body)
        elif self._is_short(request := _read(body)):
            status, found = self._answer(name, version, request)
        else:
            status, found = await aside(self._long, self._answer, name, version, request)
        await send_answer(send, status, found)

    def _is_short(self, request: object) -> bool:
        """Whether other requests may wait until this one is answered."""
        try:
            return self._current().cost(request) <= INLINE_COST
        except NoVersionLoaded:
            return True


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


def _read(body: bytes) -> object:
    """The parsed JSON of a body; a InvalidInference, returned and not raised, where it is not JSON."""
    try:
        return documents.parse(body, "the body")
    except documents.InvalidDocument as error:
        return InvalidInference(str(error))


def _error(error: Exception) -> bytes:
    return json.dumps({"error": str(error)}).encode()
