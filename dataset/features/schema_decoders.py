"""Opens the decoder of a job whose events have schemas: in a file, or in a registry."""

from collections.abc import Sequence
from pathlib import Path

from headrace.dataset.features.decoding import Decoder, EventField
from headrace.dataset.features.event_reader import EventReader, InvalidSchema, SchemaDecoder
from headrace.dataset.features.protobuf_events import MAX_SCHEMA_BYTES, ProtobufEvents, ProtobufSchema
from headrace.dataset.features.registry_events import RegistryDecoder
from headrace.dataset.features.schema_registry import SchemaRegistry
from headrace.dataset.spec.event_format import EventFormat
from headrace.errors import SpecError
from headrace.secrets import resolve_secret

KEY = "pipe.schema_file"


def open_schema_decoder(
    pipe: EventFormat, fields: Sequence[EventField], folder: Path | None, patience_s: float
) -> Decoder:
    """The decoder of events of Avro or Protobuf. Paths are relative to `folder`. Connects to nothing. `patience_s`: for
    ids that a registry does not know.

    Raises SpecError where the schema cannot be read, or lacks one of the `fields`.
    """
    if folder is None:
        raise SpecError(f'format = "{pipe.format}" needs the folder of the job file', "pipe.format")
    protobuf = pipe.format == "protobuf"
    if pipe.registry is not None:
        secret = pipe.registry_credentials
        at = "pipe.registry_credentials"
        credentials = None if secret is None else str(resolve_secret(secret, folder, at))
        if credentials is not None and ":" not in credentials and not credentials.startswith("Bearer "):
            raise SpecError('names a secret that is neither "user:password" nor "Bearer TOKEN"', at)
        patience_s = patience_s if pipe.registry_unknown == "wait" else 0.0
        texts = SchemaRegistry(pipe.registry, credentials)
        return RegistryDecoder(texts, fields, protobuf=protobuf, patience_s=patience_s)
    assert pipe.schema_file is not None, "checked by the section"
    path = folder / pipe.schema_file
    content = _content(path)
    try:
        return SchemaDecoder(_reader(content, pipe, fields), fields)
    except InvalidSchema as error:
        raise SpecError(f"{path} {error}", KEY) from None


def _reader(content: bytes, pipe: EventFormat, fields: Sequence[EventField]) -> EventReader:
    if pipe.format == "avro":
        from headrace.dataset.features.avro_events import AvroEvents

        avro = AvroEvents(content)
        avro.check_fields(fields)
        return avro
    assert pipe.message is not None, "checked by the section"
    reader = ProtobufEvents(ProtobufSchema.of_set(content).message(pipe.message), fields)
    reader.check_fields()
    return reader


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
