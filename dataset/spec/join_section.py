"""The section `join` of a job file: impressions whose labels come later, as clicks in events of their own."""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from headrace.config import PositiveDuration, Section
from headrace.text_kinds import TextKind

MAX_SAMPLE_BYTES = 16_000
"""Most bytes of a sample that waits."""


class LearnAt(StrEnum):
    """When an impression is learnt."""

    AT_WINDOW_END = "at_window_end"
    AT_CLICK = "at_click"
    AT_ONCE = "at_once"


class JoinSection(Section):
    """Impressions are joined with the clicks that come later, by a key, within a window of event time.

    An event whose `label` is neither 0 nor missing is a click: only its key, time and label count. Any other event is
    an impression: its sample waits on the shards for its click, or for the end of the window."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "label": TextKind.NAME,
        "key": TextKind.NAME,
    }

    label: str
    """Meta slot with the label. A click has it in its event; the sample of an impression gets it from its click, or 0
    where none comes within the window."""
    key: str
    """Meta slot with the key of an impression and of its click, for example the id of the impression."""
    window: PositiveDuration
    """Longest time from an impression to its click, of event time."""
    learn: LearnAt = LearnAt.AT_WINDOW_END
    """"at_window_end": each impression when its window ends, with its label; "at_click": clicked ones when their click
    comes, the others when their window ends; "at_once": each with label 0 when it comes, and clicked ones again with
    their label when their click comes, with weights that correct this."""
    keep_negatives: float = Field(default=1.0, gt=0, le=1)
    """Share of the impressions without a click that are learnt, drawn by key; their weight is divided by it. Below 1
    it needs `sample.weight`."""
    max_ahead: PositiveDuration | None = None
    """Longest time by which an event may be ahead of all events before it, in the order of time; events further ahead
    are rejected. Unset: any event may end the windows of all that waits."""
    max_sample_bytes: int = Field(default=1024, ge=64, le=MAX_SAMPLE_BYTES)
    """Memory for a waiting sample, of every one; an impression whose sample needs more is rejected."""
