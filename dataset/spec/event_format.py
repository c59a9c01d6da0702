"""The keys of a columns pipe about the format of its events: JSON, or Avro and Protobuf and where their schemas are."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.address import is_loopback
from headrace.config import Section
from headrace.secrets import FORMS, is_reference
from headrace.text_kinds import TextKind

MAX_URL = 1024
"""Longest URL of a registry."""


class EventFormat(Section):
    """How events are written."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "schema_file": TextKind.FOLDER,
        "message": TextKind.NAME,
        "registry": TextKind.REGISTRY,
        "registry_credentials": TextKind.SECRET,
    }

    format: Literal["json", "avro", "protobuf"] = "json"
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
        given = [name for name in ("schema_file", "registry") if getattr(self, name) is not None]
        if self.format == "json" and (given or self.message is not None):
            raise ValueError(f'{(*given, "message")[0]} is for format = "avro" or "protobuf"; JSON needs no schema')
        if self.format != "json" and len(given) != 1:
            raise ValueError(f'format = "{self.format}" needs schema_file or registry, and one of them alone')
        if self.registry is None and self.registry_unknown != "wait":
            raise ValueError("registry_unknown is for a registry, and there is none")
        named = self.format == "protobuf" and self.schema_file is not None
        if named != (self.message is not None):
            raise ValueError(
                'format = "protobuf" with schema_file needs message, the name of the events\' message'
                if named
                else 'message is for format = "protobuf" with schema_file; elsewhere the events say it'
            )
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
