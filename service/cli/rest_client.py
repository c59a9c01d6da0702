"""The client of a service's REST API: requests with bounded retries, paged lists, operations, event streams.

Problems in answers become this project's errors, so that a remote command fails like a local one. Printing is left to
service.cli.service_commands.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

import headrace
from headrace import documents
from headrace.address import is_loopback
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, SpecError, Unavailable
from headrace.retry import Backoff
from headrace.service.cli.targets import path_of

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


class NotFound(HeadraceError):
    """The service has nothing of this name. The exit code is that of an unknown local name."""

    exit_code = SpecError.exit_code


class ServiceClient:
    """One service; use it as a context. Raises the errors of `error_of`, and Unavailable."""

    def __init__(self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        parsed = _parsed(url)
        headers = {"User-Agent": f"headrace/{headrace.__version__}", "Accept": "application/json"}
        if token:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise SpecError("is not a token; `headrace token create` prints one", "--token")
            headers["Authorization"] = f"Bearer {token}"
        self.url = str(parsed).rstrip("/")
        self.private = parsed.scheme == "https" or is_loopback(parsed.host)
        """Whether the connection is encrypted or local."""
        self._http = httpx.Client(base_url=parsed, headers=headers, timeout=CALL_S, transport=transport)

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> Any:
        """The value at `path`."""
        return _value(self._asked("GET", path, parameters=parameters))

    def items(self, path: str, **parameters: Any) -> Iterator[Any]:
        """All entries of a list, page by page."""
        after: str | None = None
        while True:
            page = self.get(path, **parameters, after=after)
            yield from page["items"]
            after = page["next"]
            if after is None:
                return

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Request an action. An idempotency key makes sure that it happens once, however often the request is sent."""
        return _value(self._asked("POST", path, body=body, headers={"Idempotency-Key": uuid.uuid4().hex}))

    def change(self, method: str, path: str, body: Mapping[str, Any] | None = None, **parameters: Any) -> Any:
        """PATCH or DELETE the resource at `path`. Raises Refused if somebody else changes it meanwhile."""
        tag = self._asked("GET", path).headers.get("etag", "*")
        answer = self._asked(method, path, body=body, headers={"If-Match": tag}, parameters=parameters)
        return _value(answer) if answer.content else None

    def carry_out(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        deadline: Deadline,
        notify: Callable[[str], None] | None = None,
    ) -> Any:
        """Request an action that is an operation, and wait for it; return its result. See `post` and `done`."""
        return self.done(self.post(path, body), deadline, notify)

    def done(
        self, operation: Mapping[str, Any], deadline: Deadline, notify: Callable[[str], None] | None = None
    ) -> Any:
        """Wait for an operation and return its result; call `notify` with its progress text whenever that changes.

        Raises the error that the operation failed with; DeadlineExceeded while the operation continues.
        """
        last, now = "", dict(operation)
        while now["state"] in ("waiting", "running"):
            if notify is not None and now["said"] and now["said"] != last:
                last = now["said"]
                notify(last)
            deadline.check(f"waiting for operation {now['id']}, which continues")
            time.sleep(min(LOOK_S, max(0.0, deadline.left_s())))
            now = self.get(path_of("operations", now["id"]))
        if now["state"] == "done":
            return now["result"]
        if now["problem"]:
            raise error_of(now["problem"].get("status", HTTPStatus.CONFLICT), now["problem"])
        raise Refused(f"operation {now['id']} was {now['state']}; try again")

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

    def _asked(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """The answer to a request. Retries while the service is unreachable or busy, if the request is idempotent."""
        content, headers = _encoded(body, headers or {})
        deadline, failures = Deadline.after(RETRY_S), 0
        once = method not in ("GET", "POST")  # a POST has an idempotency key
        while True:
            at_least_s = 0.0
            try:
                answer = self._http.request(
                    method, path, content=content, headers=headers, params=_given(parameters or {})
                )  # fmt: skip
            except httpx.ConnectError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    problem = f"{self.url} has a certificate that is not trusted here: {error}; if it is right, set"
                    raise Refused(f"{problem} SSL_CERT_FILE to the file that contains it") from error
                trouble: HeadraceError = Unavailable(f"{self.url} cannot be reached: {error}")
            except httpx.TransportError as error:
                trouble = Unavailable(f"{self.url} does not answer: {error}")
                if once:
                    raise Unavailable(f"{trouble}; check whether it was done") from error
            else:
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
            time.sleep(pause_s)


def error_of(status: int, problem: Mapping[str, Any]) -> HeadraceError:
    """The error for a problem in an answer."""
    detail = str(problem.get("detail") or problem.get("title") or f"the service answered with status {status}")
    match status:
        case HTTPStatus.UNPROCESSABLE_ENTITY | HTTPStatus.BAD_REQUEST:
            return SpecError(detail)  # the detail begins with the path
        case HTTPStatus.NOT_FOUND:
            return NotFound(detail)
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in AGAIN:
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


def _parsed(url: str) -> httpx.URL:
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


def _value(answer: httpx.Response) -> Any:
    """The JSON value of an answer's body. Raises InvalidDocument."""
    return documents.parse(answer.content, f"the answer of {answer.url}")


def _problem(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        found = _value(answer)
    except documents.InvalidDocument:  # a proxy may have answered
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
