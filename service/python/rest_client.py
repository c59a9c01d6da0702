"""The client of a service's REST API: requests with bounded retries, paged lists, operations, event streams.

Problems in answers become this project's errors, so that a remote command fails like a local one. `RestCalls` has what
is asked, retried and awaited, as steps: requests to send and pauses to make. `ServiceClient` takes the steps on the
caller's thread, `AsyncServiceClient` in an event loop. Printing is left to service.cli.service_commands.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

import headrace
from headrace import documents
from headrace.address import is_loopback
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, SpecError, Unavailable
from headrace.retry import Backoff
from headrace.service.python.rest_paths import path_of

CALL_S = 30.0
"""Longest time for one answer, and longest silence of a stream, which sends a comment every few seconds."""
RETRY_S = 15.0
"""Longest time to retry while the service is unreachable or busy."""
REOPEN_S = 60.0
"""Longest time to retry a broken stream."""
BACKOFF = Backoff.doubling(0.2, 5.0)
"""Pauses between two tries of one request."""
STREAM_S = 1.0
"""Pause before a broken stream is opened again."""
LOOK_S = 0.3
"""Pause between two requests for the state of an operation."""
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)

Result = TypeVar("Result")
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request to send."""

    method: str
    path: str
    options: Mapping[str, Any]
    """Its content, headers and params, as httpx takes them."""


Answered = httpx.Response | httpx.TransportError | None
"""The answer to a step: to a request its response, or why there is none; to a pause nothing."""
Steps = Generator[RestRequest | float, Answered, Result]
"""Requests to send, and seconds to pause, until there is a result."""


class Busy(Unavailable):
    """The service answers, but not to this yet."""


class NotFound(HeadraceError):
    """The service has nothing of this name. The exit code is that of an unknown local name."""

    exit_code = SpecError.exit_code


class RestCalls:
    """The calls of a service as steps. Raises the errors of `error_of`, and Unavailable."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.base_url = parsed = parsed_url(url)
        self.headers = {"User-Agent": f"headrace/{headrace.__version__}", "Accept": "application/json", **bearer(token)}
        self.url = str(parsed).rstrip("/")
        self.private = parsed.scheme == "https" or is_loopback(parsed.host)
        """Whether the connection is encrypted or local."""

    def get(self, path: str, parameters: Mapping[str, Any]) -> Steps[Any]:
        """The value at `path`."""
        return value_of((yield from self.ask("GET", path, parameters=parameters)))

    def page(
        self, path: str, parameters: Mapping[str, Any], after: str | None = None
    ) -> Steps[tuple[list[Any], str | None]]:
        """Entries of the list at `path`, and the cursor of the next page. Raises Refused for an answer of no page."""
        match (yield from self.get(path, {**parameters, "after": after})):
            case {"items": list(items), "next": None | str() as following} if following is None or following != after:
                return items, following
            case _:
                raise Refused(f"{self.url}{path} answered no page of a list, or one that it had answered before")

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, parameters: Mapping[str, Any] | None = None
    ) -> Steps[Any]:
        """Request an action. An idempotency key makes sure that it happens once, however often the request is sent."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        answer = yield from self.ask("POST", path, body=body, headers=key, parameters=parameters)
        return value_of(answer) if answer.content else None

    def change(
        self, method: str, path: str, body: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None = None
    ) -> Steps[Any]:
        """PATCH or DELETE the resource at `path`. Raises Refused if somebody else changes it meanwhile."""
        tag = (yield from self.ask("GET", path)).headers.get("etag", "*")
        answer = yield from self.ask(method, path, body=body, headers={"If-Match": tag}, parameters=parameters)
        return value_of(answer) if answer.content else None

    def ended(
        self, operation: Mapping[str, Any], deadline: Deadline, notify: Notify | None = None
    ) -> Steps[dict[str, Any]]:
        """Wait for an operation until it is done; call `notify` with its progress text whenever that changes.

        Raises the error that the operation failed with; DeadlineExceeded while the operation continues.
        """
        last, now = "", dict(operation)
        while now["state"] in ("waiting", "running"):
            if notify is not None and now["said"] and now["said"] != last:
                last = now["said"]
                notify(last)
            deadline.check(f"waiting for operation {now['id']}, which continues")
            yield min(LOOK_S, max(0.0, deadline.left_s()))
            now = yield from self.get(path_of("operations", now["id"]), {})
        if now["state"] == "done":
            return now
        if now["problem"]:
            raise error_of(now["problem"].get("status", HTTPStatus.CONFLICT), now["problem"])
        raise Refused(f"operation {now['id']} was {now['state']}; try again")

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Steps[httpx.Response]:
        """The answer to a request. Retries while the service is unreachable or busy, if the request is idempotent."""
        content, headers = _encoded(body, headers or {})
        options = {"content": content, "headers": headers, "params": _given(parameters or {})}
        request = RestRequest(method, path, options)
        deadline, failures = Deadline.after(RETRY_S), 0
        once = method not in ("GET", "POST")  # a POST has an idempotency key
        while True:
            at_least_s = 0.0
            answer = yield request
            match answer:
                case httpx.ConnectError():
                    if "CERTIFICATE_VERIFY_FAILED" in str(answer):
                        problem = (
                            f"{self.url} has a certificate that is not trusted here: {answer}; if it is right, set"
                        )
                        raise Refused(f"{problem} SSL_CERT_FILE to the file that contains it") from answer
                    trouble: HeadraceError = Unavailable(f"{self.url} cannot be reached: {answer}")
                case httpx.TransportError():
                    trouble = Unavailable(f"{self.url} does not answer: {answer}")
                    if once:
                        raise Unavailable(f"{trouble}; check whether it was done") from answer
                case _:
                    assert answer is not None
                    if answer.status_code < HTTPStatus.MULTIPLE_CHOICES:
                        return answer
                    trouble = error_of(answer.status_code, _problem(answer))
                    if answer.status_code not in AGAIN:
                        raise trouble
                    at_least_s = _retry_after_s(answer)
            failures += 1
            pause_s = BACKOFF.next_pause_s(failures, deadline.left_s(), at_least_s)
            if pause_s is None:
                raise trouble
            yield pause_s


class ServiceClient:
    """One service, asked on the caller's thread; use it as a context."""

    def __init__(self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.calls = RestCalls(url, token)
        self.url, self.private = self.calls.url, self.calls.private
        self._http = httpx.Client(
            base_url=self.calls.base_url, headers=self.calls.headers, timeout=CALL_S, transport=transport
        )

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def take(self, steps: Steps[Result]) -> Result:
        """Take steps to their result."""
        answer: Answered = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                found: Result = end.value
                return found
            if isinstance(step, RestRequest):
                try:
                    answer = self._http.request(step.method, step.path, **step.options)
                except httpx.TransportError as error:
                    answer = error
            else:
                time.sleep(step)
                answer = None

    def get(self, path: str, **parameters: Any) -> Any:
        """The value at `path`."""
        return self.take(self.calls.get(path, parameters))

    def items(self, path: str, **parameters: Any) -> Iterator[Any]:
        """All entries of a list, page by page."""
        page, after = self.take(self.calls.page(path, parameters))
        yield from page
        while after is not None:
            page, after = self.take(self.calls.page(path, parameters, after))
            yield from page

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Request an action. It happens once, however often the request is sent."""
        return self.take(self.calls.post(path, body))

    def post_once_ready(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> Any:
        """As `post`, until the deadline where the service answers that it is still getting ready."""
        while True:
            try:
                return self.post(path, body)
            except Busy:
                if deadline.left_s() <= STREAM_S:
                    raise
            time.sleep(STREAM_S)

    def change(self, method: str, path: str, body: Mapping[str, Any] | None = None, **parameters: Any) -> Any:
        """PATCH or DELETE the resource at `path`. Raises Refused if somebody else changes it meanwhile."""
        return self.take(self.calls.change(method, path, body, parameters))

    def carry_out(
        self, path: str, body: Mapping[str, Any] | None, deadline: Deadline, notify: Notify | None = None
    ) -> Any:
        """Request an action that is an operation, and wait for it; return its result. See `post` and `done`."""
        return self.done(self.post(path, body), deadline, notify)

    def done(self, operation: Mapping[str, Any], deadline: Deadline, notify: Notify | None = None) -> Any:
        """Wait for an operation and return its result; see RestCalls.ended."""
        return self.take(self.calls.ended(operation, deadline, notify))["result"]

    def events(self, path: str, **parameters: Any) -> Iterator[tuple[str, Any]]:
        """Name and data of each event of a stream, without end. A broken stream is resumed after its last event."""
        last: str | None = None
        deadline = Deadline.after(REOPEN_S)
        while True:
            try:
                headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last is not None else {})}
                with self._http.stream("GET", path, params=_given(parameters), headers=headers) as answer:
                    if answer.status_code >= HTTPStatus.BAD_REQUEST:
                        answer.read()
                        raise error_of(answer.status_code, _problem(answer))
                    for event in parsed_events(answer.iter_lines()):
                        last, deadline = event.id or last, Deadline.after(REOPEN_S)
                        yield event.name, event.data
            except (httpx.TransportError, Unavailable) as error:
                if deadline.left_s() <= 0:
                    raise Unavailable(f"{self.url} does not answer: {error}") from error
            time.sleep(STREAM_S)


class AsyncServiceClient:
    """One service, asked in an event loop; use it as a context."""

    def __init__(self, url: str, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.calls = RestCalls(url, token)
        self._http = httpx.AsyncClient(
            base_url=self.calls.base_url, headers=self.calls.headers, timeout=CALL_S, transport=transport
        )

    async def __aenter__(self) -> "AsyncServiceClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def take(self, steps: Steps[Result]) -> Result:
        """Take steps to their result."""
        answer: Answered = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                found: Result = end.value
                return found
            if isinstance(step, RestRequest):
                try:
                    answer = await self._http.request(step.method, step.path, **step.options)
                except httpx.TransportError as error:
                    answer = error
            else:
                await asyncio.sleep(step)
                answer = None


def error_of(status: int, problem: Mapping[str, Any]) -> HeadraceError:
    """The error for a problem in an answer."""
    detail = str(problem.get("detail") or problem.get("title") or f"the service answered with status {status}")
    match status:
        case HTTPStatus.UNPROCESSABLE_ENTITY | HTTPStatus.BAD_REQUEST:
            return SpecError(detail)  # the detail begins with the path
        case HTTPStatus.NOT_FOUND:
            return NotFound(detail)
        case _ if status in AGAIN:
            return Busy(detail)
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return Unavailable(detail)
        case HTTPStatus.UNAUTHORIZED:
            return Refused(f"{detail}; give one with --token or HEADRACE_TOKEN")
        case _:
            return Refused(detail)


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One server-sent event."""

    id: str | None
    """A resumed stream begins after this id."""
    name: str
    data: Any


def parsed_events(lines: Iterator[str]) -> Iterator[ReceivedEvent]:
    """Parse server-sent events. Comments, which keep the connection open, are skipped."""
    number, name, data = None, "message", list[str]()
    for line in lines:
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield ReceivedEvent(number, name, documents.parse("\n".join(data), "an event of the service"))
            name, data = "message", []
        elif key == "event":
            name = value
        elif key == "data":
            data.append(value)
        elif key == "id":
            number = value


def bearer(token: str | None) -> dict[str, str]:
    """The header that shows a token; none without one. Raises SpecError, which does not show it."""
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SpecError("is not a token; `headrace token create` prints one", "--token")
    return {"Authorization": f"Bearer {token}"}


def parsed_url(url: str) -> httpx.URL:
    """The address of a server. Raises SpecError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SpecError(f"{url!r} is not a URL: {error}", "--url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query:
        raise SpecError("is not of the form https://host:8080; a token goes into --token or HEADRACE_TOKEN", "--url")
    return parsed


def _encoded(body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> tuple[bytes | None, Mapping[str, str]]:
    """A body as JSON, and the headers that go with it. Raises SpecError."""
    if body is None:
        return None, headers
    try:
        return json.dumps(body, allow_nan=False).encode(), {"Content-Type": "application/json", **headers}
    except (TypeError, ValueError) as error:  # a date, or a number that is infinite or none
        raise SpecError(f"the request cannot be written as JSON: {error}") from None


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def value_of(answer: httpx.Response) -> Any:
    """The JSON value of an answer's body. Raises InvalidDocument."""
    return documents.parse(answer.content, f"the answer of {answer.url}")


def _problem(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        found = value_of(answer)
    except documents.InvalidDocument:  # a proxy may have answered
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
