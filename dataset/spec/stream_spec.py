"""The slots of a job file alone: all that a generator in a shell needs of it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from headrace.config import Section, load_toml, validate
from headrace.dataset.spec.config import AnySlot
from headrace.dataset.spec.schema import Schema
from headrace.validation import naming_entries


class SlotsSpec(Section):
    """The slots, which are all that a generator needs."""

    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """Slots, in the order of the pipe's output."""


def read_slots(path: Path) -> tuple[Schema, bool]:
    """The slots that the pipe of the spec at `path` emits, and whether other columns are dropped (pipe.extra).

    Raises SpecError."""
    raw = load_toml(path)
    pipe = raw.get("pipe")
    drop = isinstance(pipe, dict) and pipe.get("extra") == "drop"
    with naming_entries(raw):
        return Schema.of(validate(SlotsSpec, raw, only_known=True).slots).emitted, drop
