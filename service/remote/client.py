"""A service over its REST API: requests with bounded retries, lists with their pages, operations waited for.

Problems become our errors: who is told what on another machine is told the same here. What is printed is
service.remote.commands' business.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

import millrace
from millrace import documents
from millrace.address import is_loopback
from millrace.deadline import Deadline
from millrace.errors import MillraceError, Refused, SpecError, Unavailable
from millrace.retry import Backoff
from service.remote.asking import path_of

CALL_S = 30.0
"""How long one answer may take; of a stream, how long nothing may come: it says something every few seconds."""
RETRY_S = 15.0
"""How long a service that is away, or busy, is asked again; then that is the error."""
REOPEN_S = 60.0
"""How long a stream that broke is tried again."""
BACKOFF = Backoff.doubling(0.2, 5.0)
"""Between two tries of one request."""
STREAM_S = 1.0
"""Before a stream that broke is gone on with."""
LOOK_S = 0.3
"""How often an operation is asked how it stands."""
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)


class NotThere(MillraceError):
    """The service knows nothing of this name: it ends a command as one that this machine does not know does."""

    exit_code = SpecError.exit_code


class Client:
    """One service; use it as a context. Raises the errors that `raised` names, and Unavailable."""

    def __init__(self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        parsed = _parsed(url)
        headers = {"User-Agent": f"millrace/{millrace.__version__}", "Accept": "application/json"}
        if token:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise SpecError("is no token: it is printed by `millrace token create`", "--token")
            headers["Authorization"] = f"Bearer {token}"
        self.url = str(parsed).rstrip("/")
        self.private = parsed.scheme == "https" or is_loopback(parsed.host)
        """Whether nobody on the way reads what is said."""
        self._http = httpx.Client(base_url=parsed, headers=headers, timeout=CALL_S, transport=transport)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> Any:
        """What is at `path`."""
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
        """Have something done, once however often the request is sent: it has a key of its own."""
        return _value(self._asked("POST", path, body=body, headers={"Idempotency-Key": uuid.uuid4().hex}))

    def change(self, method: str, path: str, body: Mapping[str, Any] | None = None, **parameters: Any) -> Any:
        """PATCH or DELETE what is at `path` as it is now; somebody else's change in between is an error."""
        tag = self._asked("GET", path).headers.get("etag", "*")
        answer = self._asked(method, path, body=body, headers={"If-Match": tag}, parameters=parameters)
        return _value(answer) if answer.content else None

    def done(self, operation: Mapping[str, Any], deadline: Deadline, say: Callable[[str], None] | None = None) -> Any:
        """The result of an operation, once it is over; `say` is called with what it says of itself, when that changes.

        Raises what the operation failed with, DeadlineExceeded where it goes on without us.
        """
        said, now = "", dict(operation)
        while now["state"] in ("waiting", "running"):
            if say is not None and now["said"] and now["said"] != said:
                said = now["said"]
                say(said)
            deadline.check(f"waiting for operation {now['id']}, which goes on")
            time.sleep(min(LOOK_S, max(0.0, deadline.left_s())))
            now = self.get(path_of("operations", now["id"]))
        if now["state"] == "done":
            return now["result"]
        if now["problem"]:
            raise raised(now["problem"].get("status", HTTPStatus.CONFLICT), now["problem"])
        raise Refused(f"operation {now['id']} was {now['state']}; ask again")

    def events(self, path: str, **parameters: Any) -> Iterator[tuple[str, Any]]:
        """Name and data of each event of a stream, for ever: one that breaks is gone on with where it was."""
        last: str | None = None
        deadline = Deadline.after(REOPEN_S)
        while True:
            try:
                headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last is not None else {})}
                with self._http.stream("GET", path, params=_given(parameters), headers=headers) as answer:
                    if answer.status_code >= HTTPStatus.BAD_REQUEST:
                        answer.read()
                        raise raised(answer.status_code, _problem(answer))
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
        """The answer, asked for again while the service is away or busy, where asking twice is the same as once."""
        content, headers = _encoded(body, headers or {})
        deadline, failures = Deadline.after(RETRY_S), 0
        once = method not in ("GET", "POST")  # a POST has its key
        while True:
            at_least_s = 0.0
            try:
                answer = self._http.request(
                    method, path, content=content, headers=headers, params=_given(parameters or {})
                )  # fmt: skip
            except httpx.ConnectError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    told = f"{self.url} shows a certificate that is not trusted here: {error}; if it is right, have"
                    raise Refused(f"{told} SSL_CERT_FILE name the file with it") from error
                trouble: MillraceError = Unavailable(f"{self.url} cannot be reached: {error}")
            except httpx.TransportError as error:
                trouble = Unavailable(f"{self.url} does not answer: {error}")
                if once:
                    raise Unavailable(f"{trouble}; look whether it was done") from error
            else:
                if answer.status_code < HTTPStatus.MULTIPLE_CHOICES:
                    return answer
                trouble = raised(answer.status_code, _problem(answer))
                if answer.status_code not in AGAIN:
                    raise trouble
                at_least_s = _retry_after_s(answer)
            failures += 1
            pause_s = BACKOFF.next_pause_s(failures, deadline.left_s(), at_least_s)
            if pause_s is None:
                raise trouble
            time.sleep(pause_s)


def raised(status: int, problem: Mapping[str, Any]) -> MillraceError:
    """The error of ours that a problem stands for."""
    detail = str(problem.get("detail") or problem.get("title") or f"the service answered with status {status}")
    match status:
        case HTTPStatus.UNPROCESSABLE_ENTITY | HTTPStatus.BAD_REQUEST:
            return SpecError(detail)  # the detail begins with the path
        case HTTPStatus.NOT_FOUND:
            return NotThere(detail)
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in AGAIN:
            return Unavailable(detail)
        case HTTPStatus.UNAUTHORIZED:
            return Refused(f"{detail}; give yours by --token or MILLRACE_TOKEN")
        case _:
            return Refused(detail)


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: str | None
    """What a later stream begins behind."""
    name: str
    data: Any


def parsed_events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events; comments keep the line warm and are passed over."""
    number, name, data = None, "message", list[str]()
    for line in lines:
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield Event(number, name, documents.parse("\n".join(data), "an event of the service"))
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
        raise SpecError(f"{url!r} is no address: {error}", "--url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query:
        raise SpecError("is not of the form https://host:8080; a token goes into --token or MILLRACE_TOKEN", "--url")
    return parsed


def _encoded(body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> tuple[bytes | None, Mapping[str, str]]:
    """A body as JSON, and the headers that go with it. Raises SpecError."""
    if body is None:
        return None, headers
    try:
        return json.dumps(body, allow_nan=False).encode(), {"Content-Type": "application/json", **headers}
    except (TypeError, ValueError) as error:  # a date, or a number that is infinite or none
        raise SpecError(f"what is asked for cannot be said in JSON: {error}") from None


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _value(answer: httpx.Response) -> Any:
    """What an answer's body says. Raises NotReadable."""
    return documents.parse(answer.content, f"the answer of {answer.url}")


def _problem(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        found = _value(answer)
    except documents.NotReadable:  # something between us and the service answered
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after_s(answer: httpx.Response) -> float:
    told = answer.headers.get("retry-after", "")
    return float(told) if told.isdecimal() and len(told) < 6 else 0.0
