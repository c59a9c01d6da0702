"""The sections of a job spec that concern the stream: what `python -m dataset` and generators in a shell read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dataset.config import AnySlot, AnySource, PipeSection, SampleSection
from dataset.schema import Schema
from millrace.config import Section, Seed, load_toml, validate
from millrace.errors import SpecError


class SlotsSpec(Section):
    """Slots only: all that a generator needs."""

    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """Slots, in the order of the pipe's output."""


class StreamSpec(SlotsSpec):
    """Source, pipe, slots and sample."""

    name: str = "job"
    """Name of the job."""
    seed: Seed = 1
    """Seed of everything that is drawn."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The stream; one source is built."""
    pipe: PipeSection
    """Events to samples."""
    sample: SampleSection = SampleSection()
    """Group and weight of a sample."""

    @property
    def source(self) -> AnySource:
        """The one source."""
        if len(self.sources) != 1:
            raise SpecError(f"several sources are not built yet; {len(self.sources)} given", "sources")
        return next(iter(self.sources.values()))


def read_slots(path: Path) -> tuple[Schema, bool]:
    """Slots of the spec at `path`, and whether columns that are none are dropped (pipe.extra). Raises SpecError."""
    raw = load_toml(path)
    pipe = raw.get("pipe")
    drop = isinstance(pipe, dict) and pipe.get("extra") == "drop"
    return Schema.of(validate(SlotsSpec, raw, only_known=True).slots), drop


def read_stream(path: Path, overrides: Sequence[str] = ()) -> StreamSpec:
    """Source, pipe and slots of the spec at `path`. Raises SpecError."""
    return validate(StreamSpec, load_toml(path, overrides), only_known=True)
