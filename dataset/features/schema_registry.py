"""A client of a schema registry that speaks Confluent's protocol: the texts of schemas by their ids.

The text of an id never changes; dataset.features.registry_events keeps what it makes of it. A registry that does not
answer is an unavailable source; dataset.features.registry_events decides about an id that it does not know. No
redirect is followed.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from headrace.dataset.stream.errors import SourceUnavailable
from headrace.deadline import Deadline
from headrace.documents import InvalidDocument, parse_object
from headrace.errors import DeadlineExceeded

MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of the registry; a schema in a longer one is refused."""
MAX_REFERENCES = 64
"""Most schemas that a schema refers to, directly or not."""
FETCH_S = 10.0
"""Longest time for one schema and its references."""
NO_SCHEMA = (40401, 40402, 40403)
"""Codes of a registry without the subject, the version, or the id."""


class UnknownSchema(Exception):
    """The registry does not have a schema, or has none that can be used; the text names the id and the URL."""


class SchemaNotThere(UnknownSchema):
    """The registry does not have a schema. It may have it later: a registry of several machines may be behind."""


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema, as the registry has it."""

    kind: str
    """"AVRO", "PROTOBUF" or "JSON"."""
    text: str
    """Of Avro: JSON. Of Protobuf: a FileDescriptorProto in base64."""
    references: tuple["RegisteredSchema", ...] = ()
    """Schemas that it uses, each after those that it uses itself."""

    @property
    def descriptor(self) -> bytes:
        """The FileDescriptorProto of Protobuf. Raises ValueError."""
        try:
            return base64.b64decode(self.text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"is not base64: {error}") from None


class SchemaTexts(Protocol):
    """Schemas by their ids."""

    def schema(self, number: int) -> RegisteredSchema:
        """The schema of an id, always the same. Raises UnknownSchema, SourceUnavailable."""
        ...

    def name(self, number: int) -> str:
        """The name of a schema in errors."""
        ...


class SchemaRegistry:
    """One thread at a time may call it."""

    def __init__(self, url: str, credentials: str | None = None, *, fetch_s: float = FETCH_S) -> None:
        """`credentials`: "user:password", or "Bearer TOKEN"."""
        self._url, self._fetch_s = url.rstrip("/"), fetch_s
        accepted = "application/vnd.schemaregistry.v1+json, application/json"
        headers = {"Accept": accepted, "Accept-Encoding": "identity"}  # a packed answer may be of any length
        auth: httpx.BasicAuth | None = None
        if credentials is not None and credentials.startswith("Bearer "):
            headers["Authorization"] = credentials
        elif credentials is not None:
            user, _, password = credentials.partition(":")
            auth = httpx.BasicAuth(user, password)
        # Without trust_env: neither proxies nor credentials of the environment. Schemas are few: no connection is kept.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, auth=auth, timeout=fetch_s, trust_env=False, limits=limits)

    def schema(self, number: int) -> RegisteredSchema:
        return self._whole(self._path(number), self.name(number), Deadline.after(self._fetch_s))

    def name(self, number: int) -> str:
        return f"schema {number} of {self._url}{self._path(number)}"

    @staticmethod
    def _path(number: int) -> str:
        return f"/schemas/ids/{number}"

    def _whole(self, path: str, name: str, deadline: Deadline) -> RegisteredSchema:
        """A schema with all that it refers to."""
        seen: dict[str, RegisteredSchema] = {}
        answer = self._fetch(path, name, deadline)
        self._collect(answer, name, seen, (), deadline)
        kind, text = _schema_of(answer, name)
        return RegisteredSchema(kind, text, tuple(seen.values()))

    def _collect(
        self,
        answer: Mapping[str, Any],
        name: str,
        seen: dict[str, RegisteredSchema],
        above: tuple[str, ...],
        deadline: Deadline,
    ) -> None:
        """Add the references of a schema to `seen`, each after its own."""
        references = answer.get("references") or []
        if not isinstance(references, list):
            raise UnknownSchema(f"{name} has references that are no list")
        for each in references:
            subject, version = (each.get("subject"), each.get("version")) if isinstance(each, dict) else (None, None)
            if not isinstance(subject, str) or not isinstance(version, int):
                raise UnknownSchema(f"{name} has a reference without subject and version")
            path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
            if path in above or len(seen) + len(above) >= MAX_REFERENCES:
                raise UnknownSchema(f"{name} refers to itself, or to more than {MAX_REFERENCES} schemas")
            if path not in seen:
                inner = f"reference {subject!r} version {version} of {name}"
                below = self._fetch(path, inner, deadline)
                self._collect(below, inner, seen, (*above, path), deadline)
                seen[path] = RegisteredSchema(*_schema_of(below, inner))

    def _fetch(self, path: str, name: str, deadline: Deadline) -> dict[str, Any]:
        """The answer to a path, with Protobuf in base64. Raises UnknownSchema, SourceUnavailable."""
        url = f"{self._url}{path}"
        try:
            with self._client.stream("GET", url, params={"format": "serialized"}, timeout=deadline.left_s()) as answer:
                content = self._bounded(answer, name, deadline)
        except (httpx.HTTPError, DeadlineExceeded, OSError) as error:
            reason = str(error) or type(error).__name__
            raise SourceUnavailable(f"the schema registry does not answer for {name}: {reason}") from None
        try:
            found = parse_object(content, name, MAX_ANSWER_BYTES)
        except InvalidDocument as error:
            raise SourceUnavailable(f"the schema registry answers {answer.status_code} for {name}: {error}") from None
        if answer.status_code == httpx.codes.OK:
            return found
        if answer.status_code == httpx.codes.NOT_FOUND and found.get("error_code") in NO_SCHEMA:
            raise SchemaNotThere(f"the schema registry does not know {name}")
        message = str(found.get("message", ""))[:200]
        raise SourceUnavailable(f"the schema registry answers {answer.status_code} for {name}: {message}")

    def _bounded(self, answer: httpx.Response, name: str, deadline: Deadline) -> bytes:
        content = bytearray()
        if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise SourceUnavailable(f"the schema registry answers in {packed[:40]!r} for {name}; it was asked not to")
        for part in answer.iter_raw():
            content += part
            deadline.check(f"reading {name}")
            if len(content) > MAX_ANSWER_BYTES:
                raise UnknownSchema(f"{name} is longer than {MAX_ANSWER_BYTES:,} bytes")
        return bytes(content)


def _schema_of(answer: Mapping[str, Any], name: str) -> tuple[str, str]:
    kind, text = answer.get("schemaType", "AVRO"), answer.get("schema")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise UnknownSchema(f"{name} is answered without a schema")
    return kind, text
