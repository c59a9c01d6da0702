"""`connect` and `connect_async`: a service's actions as methods, made from the OpenAPI document that it answers.

There is no second list of actions here: a service's routes, its document and these methods come from one table
(service.api.actions and the routes beside it).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from headrace import documents
from headrace.config import load_toml
from headrace.deadline import Deadline
from headrace.errors import Refused, SpecError
from headrace.service.python.rest_client import (
    AsyncServiceClient,
    Notify,
    RestCalls,
    ServiceClient,
    Steps,
    value_of,
)
from headrace.service.python.rest_paths import path_of, quoted
from headrace.service.python.service_actions import AsyncServiceActions, ServiceActions
from headrace.validation import no_such

DOCUMENT = "/v1/openapi.json"
WAIT_S = 86_400.0
"""Longest wait for an operation, unless a call says another one."""
PAGE = 200
"""Entries of a page of a list: the most that a service gives."""
PATH = re.compile(r"/(?!/)(?:[\w.~:/-]|\{\w+\})*")
"""A path in the document; its parameters are in braces."""
CONTROLS = ("wait", "timeout_s", "notify")
"""Keywords of every action that is an operation; no parameter of an action has one of these names."""
Answer = Literal["value", "list", "operation", "file", "stream"]


@dataclass(frozen=True, slots=True)
class RestAction:
    """One action of a service."""

    method: str
    path: str
    in_path: tuple[str, ...]
    in_query: tuple[str, ...]
    in_body: Mapping[str, Any]
    """The schema of each field of its body."""
    required: frozenset[str]
    """Of its parameters."""
    has_body: bool
    """Whether its request must have one."""
    of_revision: bool
    """Whether its request names the revision of the job that it changes."""
    answer: Answer
    schema: Mapping[str, Any]
    """Of its answer; of a list, that of an entry."""

    def steps(
        self,
        calls: RestCalls,
        positional: Sequence[Any],
        given: Mapping[str, Any],
        deadline: Deadline,
        notify: Notify | None = None,
        *,
        wait: bool = True,
    ) -> Steps[Any]:
        """Carry it out. Raises TypeError for arguments that it does not have."""
        if len(positional) > len(self.in_path):
            raise TypeError(f"takes {len(self.in_path)} positional arguments ({', '.join(self.in_path)})")
        known = {**dict(zip(self.in_path, positional, strict=False)), **given}
        for name in known:
            if name not in (*self.in_path, *self.in_query, *self.in_body):
                raise TypeError(no_such("argument", name, [*self.in_path, *self.in_query, *self.in_body]))
        if missing := [
            name for name in (*self.in_path, *self.in_query, *self.in_body) if name in self.required - set(known)
        ]:
            raise TypeError(f"needs {', '.join(missing)}")
        path = self.path.format_map({name: quoted(str(known[name])) for name in self.in_path})
        query = {name: _text(known[name]) for name in self.in_query if name in known}
        body = {name: known[name] for name in self.in_body if known.get(name) is not None}
        if self.answer == "list":
            return (yield from _pages(calls, path, query))
        content = body if body or self.has_body else None
        match self.method:
            case "GET":
                answer = yield from calls.ask("GET", path, parameters=query)
                return answer.content if self.answer == "file" else value_of(answer)
            case "POST":
                found = yield from calls.post(path, content, query)
            case _:
                found = yield from calls.change(self.method, path, content, query)
        if self.answer == "operation" and wait:
            found = yield from calls.ended(found, deadline, notify)
        return found


def _pages(calls: RestCalls, path: str, query: Mapping[str, Any]) -> Steps[list[Any]]:
    """All entries of a list."""
    items, after = yield from calls.page(path, {"limit": PAGE, **query})
    found = [*items]
    while after is not None:
        items, after = yield from calls.page(path, {"limit": PAGE, **query}, after)
        found += items
    return found


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def actions_of(document: Mapping[str, Any]) -> dict[str, RestAction]:
    """The actions in a service's OpenAPI document, by the names of their methods.

    Raises KeyError, TypeError, ValueError or AttributeError for a document of another shape.
    """
    schemas = document["components"]["schemas"]

    def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        return found

    found = {}
    for path, methods in document["paths"].items():
        if PATH.fullmatch(path) is None:  # a path with a host would lead there, with the token
            raise ValueError(f"{path!r} is no path of the REST API")
        for method, told in methods.items():
            parameters = told.get("parameters", [])
            by_place = {
                place: [each for each in parameters if each["in"] == place] for place in ("path", "query", "header")
            }
            answer, schema = _answer(told["responses"], resolved)
            paging = ("limit", "after") if answer == "list" else ()
            in_path = tuple(re.findall(r"\{(\w+)\}", path))
            body = told.get("requestBody", {})
            content = body.get("content", {}).get("application/json", {}).get("schema", {})
            content = next(
                (resolved(each) for each in (content, *content.get("anyOf", ())) if "properties" in resolved(each)), {}
            )
            required = {each["name"] for each in parameters if each.get("required")} | set(content.get("required", ()))
            found[name_of(told["operationId"])] = RestAction(
                method=method.upper(),
                path=path,
                in_path=in_path,
                in_query=tuple(each["name"] for each in by_place["query"] if each["name"] not in paging),
                in_body=content.get("properties", {}),
                required=frozenset(required),
                has_body=bool(body.get("required")),
                of_revision=any(each["name"].lower() == "if-match" for each in by_place["header"]),
                answer=answer,
                schema=schema,
            )
    return found


def _answer(
    responses: Mapping[str, Any], resolved: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> tuple[Answer, Mapping[str, Any]]:
    """The kind of an action's answer, and its schema."""
    (status, told), *_ = ((status, told) for status, told in responses.items() if int(status) < 300)
    content: Mapping[str, Any] = told.get("content", {})
    if "application/json" not in content:
        return ("stream" if "text/event-stream" in content else "file" if content else "value"), {}
    schema: Mapping[str, Any] = content["application/json"].get("schema", {})
    fields = resolved(schema).get("properties", {})
    if fields.keys() == {"items", "next"}:
        return "list", fields["items"]["items"]
    return ("operation" if int(status) == HTTPStatus.ACCEPTED else "value"), schema


def name_of(operation_id: str) -> str:
    """The method of an action: "getJob" is "get_job"."""
    return re.sub(r"(?<=[a-z0-9])[A-Z]", lambda found: f"_{found[0].lower()}", operation_id)


class _Actions:
    """The actions of the service that is connected to, read when the first one is asked for."""

    def __init__(self, calls: RestCalls) -> None:
        self._calls = calls
        self._known: dict[str, RestAction] = {}

    def steps(self, name: str, positional: Sequence[Any], given: dict[str, Any]) -> Steps[Any]:
        """Carry out an action. Raises AttributeError where the service has none of this name."""
        action = yield from self.action(name)
        wait, timeout_s, notify = given.pop("wait", True), given.pop("timeout_s", WAIT_S), given.pop("notify", None)
        try:
            return (
                yield from action.steps(self._calls, positional, given, Deadline.after(timeout_s), notify, wait=wait)
            )
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None

    def action(self, name: str) -> Steps[RestAction]:
        """The action of this name. Raises AttributeError."""
        if not self._known:
            document = yield from self._calls.get(DOCUMENT, {})
            try:
                self._known = actions_of(document)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = "has an OpenAPI document that cannot be read; is it a service of Headrace?"
                raise Refused(f"{self._calls.url} {what} {error!r:.200}") from None
        if name not in self._known:
            raise AttributeError(no_such("action", name, list(self._known)))
        return self._known[name]


class Service(ServiceActions):
    """A service with its jobs, as `connect` opens it. Each action is a method; [REST](rest.md) describes them.

    What a list answers comes whole, as a list. An action that is an operation is awaited: its entry has the `result`;
    with `wait=False` it has begun. Arguments of a request's path stand first, in its order; all others have names.
    Results are dictionaries of the documented types. Errors are those of the command line, each a HeadraceError.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._actions = _Actions(client.calls)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<headrace service at {self._client.url}>"

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def submit(
        self,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        name: str | None = None,
        base: str | None = None,
        start: bool = True,
    ) -> Any:
        """Hand a job file of this machine to the service, as `headrace submit` does; the job that was created."""
        return self._carry_out("create_job", **submission(Path(path), overrides, name, base, start=start))

    def events(self, job: str) -> Iterator[tuple[str, Any]]:
        """Name and data of each event of a job: "close", "figures", and "end". A broken stream is resumed."""
        for name, data in self._client.events(path_of("jobs", job, "metrics", "stream")):
            yield name, data
            if name == "end":
                return

    def _carry_out(self, name: str, /, *positional: Any, **given: Any) -> Any:
        return self._client.take(self._actions.steps(name, positional, given))


class AsyncService(AsyncServiceActions):
    """The same in an event loop, as `connect_async` opens it: each action is awaited."""

    def __init__(self, client: AsyncServiceClient) -> None:
        self._client = client
        self._actions = _Actions(client.calls)

    async def __aenter__(self) -> "AsyncService":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<headrace service at {self._client.calls.url}>"

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def submit(
        self,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        name: str | None = None,
        base: str | None = None,
        start: bool = True,
    ) -> Any:
        """Hand a job file of this machine to the service; the job that was created."""
        return await self._carry_out("create_job", **submission(Path(path), overrides, name, base, start=start))

    async def _carry_out(self, name: str, /, *positional: Any, **given: Any) -> Any:
        return await self._client.take(self._actions.steps(name, positional, given))


def connect(url: str, token: str | None = None) -> Service:
    """A client of the service at `url`, as in "https://train.example:8080"; use it as a context, or close it."""
    return Service(ServiceClient(url, token))


def connect_async(url: str, token: str | None = None) -> AsyncService:
    """The same for an event loop; use it with `async with`."""
    return AsyncService(AsyncServiceClient(url, token))


def submission(
    path: Path, overrides: Sequence[str], name: str | None, base: str | None, *, start: bool
) -> dict[str, Any]:
    """The body that creates the job of a job file. Raises SpecError."""
    raw = load_toml(path, overrides)
    try:  # TOML times become text
        spec = documents.parse(json.dumps(raw, default=str, allow_nan=False), "the spec")
    except ValueError as error:
        raise SpecError(f"the spec contains a number that JSON cannot carry: {error}") from None
    body = {"spec": spec, "name": name, "base": base, "start": start}
    return {key: value for key, value in body.items() if value is not None}
