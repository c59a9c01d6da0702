"""The sections of a job spec about the stream, for `python -m headrace.dataset` and for generators in a shell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from headrace.config import Section, Seed, load_toml, validate
from headrace.dataset.spec.config import AnyPipe, AnySlot, AnySource, SampleSection
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import check_sources
from headrace.validation import naming_entries


class SlotsSpec(Section):
    """The slots, which are all that a generator needs."""

    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """Slots, in the order of the pipe's output."""


class StreamSpec(SlotsSpec):
    """Source, pipe, slots and sample."""

    name: str = "job"
    """Name of the job."""
    seed: Seed = 1
    """Seed of all random choices."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The stream: one source, or several by name."""
    pipe: AnyPipe
    """The command, or the keys of the slots, that turn events into samples."""
    sample: SampleSection = SampleSection()
    """Group and weight of samples."""


def read_slots(path: Path) -> tuple[Schema, bool]:
    """The slots that the pipe of the spec at `path` emits, and whether other columns are dropped (pipe.extra).

    Raises SpecError."""
    raw = load_toml(path)
    pipe = raw.get("pipe")
    drop = isinstance(pipe, dict) and pipe.get("extra") == "drop"
    with naming_entries(raw):
        return Schema.of(validate(SlotsSpec, raw, only_known=True).slots).emitted, drop


def read_stream(path: Path, overrides: Sequence[str] = ()) -> StreamSpec:
    """The source, pipe and slots of the spec at `path`. Raises SpecError."""
    raw = load_toml(path, overrides)
    with naming_entries(raw):
        stream = validate(StreamSpec, raw, only_known=True)
        check_sources(stream.sources)
    return stream
