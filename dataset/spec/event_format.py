"""Formats of events: the keys of a columns pipe about them, and the protocol of a format and of its decoder.

A format (JSON, Avro, ...) knows nothing of slots: it decodes the fields of events that are asked for.
dataset.features.format_kinds has Headrace's own; dataset.features.conversion has the rules by which values become whole
numbers, numbers or text.

Shapes: E events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.address import is_loopback
from headrace.config import Section
from headrace.dataset.spec.feature_keys import FIELD_SEPARATOR
from headrace.errors import SpecError
from headrace.registry import Registry
from headrace.secrets import FORMS, is_reference
from headrace.text_kinds import TextKind

if TYPE_CHECKING:
    import pyarrow as pa

MAX_URL = 1024
"""Longest URL of a registry."""
PATIENCE_S = 60.0
"""How long an id that a schema registry does not know is asked for again, before its events are rejected."""


class FieldKind(StrEnum):
    """The type that a field is read as; see dataset.features.conversion for the rules."""

    WHOLE = "whole"
    """Whole numbers of 64 bits: int64 if `signed`, else uint64."""
    NUMBER = "number"
    """float64."""
    TEXT = "text"
    """utf8."""
    LENGTH = "length"
    """Only the number of elements of a list is used: int64."""


@dataclass(frozen=True, slots=True, order=True)
class EventField:
    """A field of events that the plan asks for."""

    path: str
    """Names with dots between: "user.id". A list on the way gives a list: of `{"items": [{"id": 1}, {"id": 2}]}`,
    "items.id" is [1, 2]. A list inside a list is refused."""
    kind: FieldKind
    signed: bool = False
    """Whether whole numbers may be negative."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its path, from the outside in."""
        return tuple(self.path.split(FIELD_SEPARATOR))

    @property
    def type(self) -> "pa.DataType":
        """The Arrow type of its values."""
        import pyarrow as pa  # late: the check of a job file imports this module

        match self.kind:
            case FieldKind.WHOLE:
                return pa.int64() if self.signed else pa.uint64()
            case FieldKind.NUMBER:
                return pa.float64()
            case FieldKind.TEXT:
                return pa.utf8()
            case FieldKind.LENGTH:
                return pa.int64()


@dataclass(frozen=True, slots=True)
class Decoded:
    """The fields of some events."""

    fields: "pa.RecordBatch"
    """E rows. One column for each field that was asked for, in that order, under its path: of the field's type, or a
    list of it. Null: the event lacks the field, or the field is null. A column may be of lists although some of its
    events have a single value: then each is a list of one. Values of events in `errors` are not used."""
    errors: Sequence[tuple[int, str]]
    """Events that are rejected, and why, in order of events, each at most once. A text that begins with "not UTF-8" is
    counted under that reason."""


class Decoder(Protocol):
    """Decodes events of one format. One thread at a time may call it.

    The answer for an event depends on the event alone: not on its neighbours, and not on events decoded before.
    """

    def decode(self, events: "pa.BinaryArray") -> Decoded:
        """The fields of the events; an event that cannot be read is in `errors`, and never raises."""
        ...


class FormatKind:
    """A format of events, as `pipe.format` names it. Its settings are keys of the pipe."""

    def check(self, pipe: "EventFormat") -> None:
        """Raise ValueError for keys of the pipe that are missing, or do not go with it."""
        for key in ("schema_file", "registry", "message"):
            if getattr(pipe, key) is not None:
                raise ValueError(f'{key} is for formats with a schema; format = "{pipe.format}" has none')

    def open(
        self, pipe: "EventFormat", fields: Sequence[EventField], folder: Path | None, patience_s: float
    ) -> Decoder:
        """A decoder of the job's events that gives `fields`; see EventFormat.open_decoder."""
        raise NotImplementedError


FORMATS = Registry(
    kind="format of events",
    group="headrace.formats",
    base=FormatKind,
    own={
        "json": "dataset.features.format_kinds:JsonFormat",
        "avro": "dataset.features.format_kinds:AvroFormat",
        "protobuf": "dataset.features.format_kinds:ProtobufFormat",
    },
)

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS.names())]


class EventFormat(Section):
    """How events are written."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "schema_file": TextKind.FOLDER,
        "message": TextKind.NAME,
        "registry": TextKind.REGISTRY,
        "registry_credentials": TextKind.SECRET,
    }

    format: FormatName = "json"
    """"json": one object each. "avro" and "protobuf": one record or message each, without the header of a file; they
    need schema_file or registry."""
    schema_file: Annotated[str, Field(min_length=1, max_length=4095)] | None = None
    """File with the schema of all events, relative to the spec's folder. Avro: a schema as JSON ("event.avsc").
    Protobuf: a FileDescriptorSet, as `protoc --include_imports --descriptor_set_out=event.desc` makes it. A job keeps
    no copy: replace it only by a schema that reads old events alike."""
    message: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """With Protobuf and schema_file: the full name of the events' message, "shop.Event"."""
    registry: Annotated[str, Field(max_length=MAX_URL)] | None = None
    """URL of a schema registry with Confluent's protocol, "https://registry:8081". Each event then begins with a zero
    byte and the id of its schema in four bytes (and in Protobuf the place of its message). While the registry does not
    answer the job waits, as for a source, at most passes.max_outage."""
    registry_credentials: dict[str, str] | None = None
    """A reference to "user:password" or "Bearer TOKEN" for the registry: { env = "NAME" } or { file = "path" }."""

    registry_unknown: Literal["wait", "reject"] = "wait"
    """Events whose id the registry does not know. "wait": it may be behind, so the job asks again for a minute (at most
    half of passes.max_outage), and then rejects them like other bad events. "reject": each is rejected at once."""

    @field_validator("registry")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
        return url

    @field_validator("registry_credentials")
    @classmethod
    def _is_a_reference(cls, value: Mapping[str, str] | None) -> Mapping[str, str] | None:
        if value is not None and not is_reference(value):
            raise ValueError(f"is not a reference to a secret: {FORMS}")
        return value

    @model_validator(mode="after")
    def _has_a_schema(self) -> "EventFormat":
        self._kind().check(self)
        if self.registry is None and self.registry_unknown != "wait":
            raise ValueError("registry_unknown is for a registry, and there is none")
        return self

    @model_validator(mode="after")
    def _sends_no_secret_in_the_clear(self) -> "EventFormat":
        if self.registry_credentials is None:
            return self
        if self.registry is None:
            raise ValueError("registry_credentials are for a registry, and there is none")
        parts = urlsplit(self.registry)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError("registry_credentials would cross the network unencrypted; use an https:// registry")
        return self

    def _kind(self) -> FormatKind:
        try:
            return FORMATS.load(self.format)()
        except SpecError as error:
            raise ValueError(str(error)) from error

    def open_decoder(
        self, fields: Sequence[EventField], folder: Path | None, patience_s: float = PATIENCE_S
    ) -> Decoder:
        """A decoder of the job's events that gives `fields`. Paths in the spec are relative to `folder`; None: to none.
        `patience_s`: how long ids that a schema registry does not know are asked for again.

        Connects to nothing. Raises SpecError where the schema cannot be read, or lacks one of the `fields`.
        """
        return self._kind().open(self, fields, folder, patience_s)


def check_url(url: str) -> None:
    """Raise ValueError for what is not the plain URL of a registry."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("is not a URL like https://registry:8081")
    if "@" in parts.netloc:
        raise ValueError("has a user or a password in it; name them in registry_credentials")
    if parts.query or parts.fragment or ".." in PurePosixPath(parts.path).parts:
        raise ValueError("has more than a host, a port and a path")
