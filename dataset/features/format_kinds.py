"""Headrace's formats of events: what each checks of the pipe, and its decoder.

The check of a job file imports this module, so libraries of formats are imported late.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headrace.dataset.spec.event_format import Decoder, EventField, EventFormat, FormatKind
from headrace.errors import SpecError
from headrace.extras import require
from headrace.secrets import resolve_secret

if TYPE_CHECKING:
    from headrace.dataset.features.event_reader import EventReader
    from headrace.dataset.features.schema_registry import RegisteredSchema

MAX_SCHEMA_BYTES = 4 << 20
"""Longest file with a schema."""
KEY = "pipe.schema_file"


class JsonFormat(FormatKind):
    """An object each."""

    def check(self, pipe: EventFormat) -> None:
        given = [name for name in ("schema_file", "registry", "message") if getattr(pipe, name) is not None]
        if given:
            raise ValueError(f'{given[0]} is for format = "avro" or "protobuf"; JSON needs no schema')

    def open(self, pipe: EventFormat, fields: Sequence[EventField], folder: Path | None, patience_s: float) -> Decoder:
        from headrace.dataset.features.json_decoder import JsonDecoder

        return JsonDecoder(fields)


class SchemaFormat(FormatKind):
    """A format whose events have a schema: all of them one in a file, or each its own in a registry."""

    registry_type: ClassVar[str]
    """The type of its schemas in a registry."""
    has_places: ClassVar[bool] = False
    """Whether a schema has several messages. With a file, `message` names the message of the events; events of a
    registry begin with its place."""

    def check(self, pipe: EventFormat) -> None:
        if (pipe.schema_file is None) == (pipe.registry is None):
            raise ValueError(f'format = "{pipe.format}" needs schema_file or registry, and one of them alone')
        named = self.has_places and pipe.schema_file is not None
        if named and pipe.message is None:
            raise ValueError(
                f'format = "{pipe.format}" with schema_file needs message, the name of the events\' message'
            )
        if not named and pipe.message is not None:
            raise ValueError('message is for format = "protobuf" with schema_file; elsewhere the events say it')

    def open(self, pipe: EventFormat, fields: Sequence[EventField], folder: Path | None, patience_s: float) -> Decoder:
        from headrace.dataset.features.event_reader import InvalidSchema, SchemaDecoder

        if folder is None:
            raise SpecError(f'format = "{pipe.format}" needs the folder of the job file', "pipe.format")
        if pipe.schema_file is None:
            return self._of_registry(pipe, fields, folder, patience_s)
        path = folder / pipe.schema_file
        content = _content(path)
        try:
            return SchemaDecoder(self.reader_of_file(content, pipe, fields), fields)
        except InvalidSchema as error:
            raise SpecError(f"{path} {error}", KEY) from None

    def _of_registry(self, pipe: EventFormat, fields: Sequence[EventField], folder: Path, patience_s: float) -> Decoder:
        from headrace.dataset.features.registry_events import RegistryDecoder
        from headrace.dataset.features.schema_registry import SchemaRegistry

        assert pipe.registry is not None, "checked by the section"
        secret, at = pipe.registry_credentials, "pipe.registry_credentials"
        credentials = None if secret is None else str(resolve_secret(secret, folder, at))
        if credentials is not None and ":" not in credentials and not credentials.startswith("Bearer "):
            raise SpecError('names a secret that is neither "user:password" nor "Bearer TOKEN"', at)
        patience_s = patience_s if pipe.registry_unknown == "wait" else 0.0
        return RegistryDecoder(SchemaRegistry(pipe.registry, credentials), fields, self, patience_s=patience_s)

    def reader_of_file(self, content: bytes, pipe: EventFormat, fields: Sequence[EventField]) -> "EventReader":
        """The reader of events under the schema of a file. Raises InvalidSchema, also for a field that it lacks."""
        raise NotImplementedError

    def reader_of(
        self, schema: "RegisteredSchema", place: tuple[int, ...], fields: Sequence[EventField]
    ) -> "EventReader":
        """The reader of events under a schema of a registry; `place`: of the message in it. Raises InvalidSchema."""
        raise NotImplementedError


class AvroFormat(SchemaFormat):
    """A record each."""

    registry_type = "AVRO"

    def open(self, pipe: EventFormat, fields: Sequence[EventField], folder: Path | None, patience_s: float) -> Decoder:
        require("fastavro", '"avro"', "pipe.format")
        return super().open(pipe, fields, folder, patience_s)

    def reader_of_file(self, content: bytes, pipe: EventFormat, fields: Sequence[EventField]) -> "EventReader":
        from headrace.dataset.features.avro_events import AvroEvents

        reader = AvroEvents(content)
        reader.check_fields(fields)
        return reader

    def reader_of(
        self, schema: "RegisteredSchema", place: tuple[int, ...], fields: Sequence[EventField]
    ) -> "EventReader":
        from headrace.dataset.features.avro_events import AvroEvents

        return AvroEvents(schema.text, [each.text for each in schema.references])


class ProtobufFormat(SchemaFormat):
    """A message each."""

    registry_type = "PROTOBUF"
    has_places = True

    def reader_of_file(self, content: bytes, pipe: EventFormat, fields: Sequence[EventField]) -> "EventReader":
        from headrace.dataset.features.protobuf_events import ProtobufEvents, ProtobufSchema

        assert pipe.message is not None, "checked by the section"
        reader = ProtobufEvents(ProtobufSchema.of_set(content).message(pipe.message), fields)
        reader.check_fields()
        return reader

    def reader_of(
        self, schema: "RegisteredSchema", place: tuple[int, ...], fields: Sequence[EventField]
    ) -> "EventReader":
        from headrace.dataset.features.event_reader import InvalidSchema
        from headrace.dataset.features.protobuf_events import ProtobufEvents, ProtobufSchema

        try:
            files = [each.descriptor for each in (*schema.references, schema)]
        except ValueError as error:
            raise InvalidSchema(str(error)) from None
        return ProtobufEvents(ProtobufSchema(files).message_at(place), fields)


def _content(path: Path) -> bytes:
    """The bytes of a schema. Raises SpecError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SCHEMA_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}", KEY) from None
    if len(content) > MAX_SCHEMA_BYTES:
        raise SpecError(f"{path} is longer than {MAX_SCHEMA_BYTES:,} bytes", KEY)
    return content
