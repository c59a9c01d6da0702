"""The decoder for the format that the job file names."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from headrace.dataset.features.decoding import Decoder, EventField
from headrace.dataset.features.json_decoder import JsonDecoder
from headrace.dataset.spec.config import ColumnsPipe
from headrace.extras import require

PATIENCE_S = 60.0
"""How long an id that a schema registry does not know is asked for again, before its events are rejected."""


def make_decoder(
    pipe: ColumnsPipe, fields: Sequence[EventField], folder: Path | None, patience_s: float = PATIENCE_S
) -> Decoder:
    """A decoder of the job's events that gives `fields`. Paths in the spec are relative to `folder`; None: to none.

    Raises SpecError.
    """
    match pipe.format:
        case "json":
            return JsonDecoder(fields)
        case "avro" | "protobuf":
            if pipe.format == "avro":
                require("fastavro", '"avro"', "pipe.format")
            # Imported late, as few jobs need the libraries.
            from headrace.dataset.features.schema_decoders import open_schema_decoder

            return open_schema_decoder(pipe, fields, folder, patience_s)
        case _:
            assert_never(pipe.format)
