"""Rejections: why an event, or a line of a pipe's output, gives no sample."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """The reason of a rejection; rejections are counted by it."""

    NULL = "null value"
    NO_TIME = "no event time"
    TOO_LONG = "longer than max_event_bytes"
    LINE_FEED = "line feed inside"
    WRONG_COUNT = "wrong count"
    UNPARSABLE = "unparsable"
    LABEL_MISSING = "label missing"
    NON_FINITE = "non-finite value"
    NOT_UTF8 = "not UTF-8"
    GENERATOR = "generator error"
    SAMPLE_TOO_LONG = "longer than join.max_sample_bytes"
    CLASS = "class out of range"
    LABEL = "label out of range"
    TOO_FAR_AHEAD = "further ahead than join.max_ahead"
    HALF = "output ends inside a line"

    @classmethod
    def of_error(cls, text: str) -> "Reason":
        """The reason for an error text of a generator."""
        return cls.NOT_UTF8 if text.startswith(cls.NOT_UTF8.value) else cls.GENERATOR

    @classmethod
    def of_field(cls, text: str) -> "Reason":
        """The reason for an error text of a decoder or of dataset.features."""
        return cls.NOT_UTF8 if text.startswith(cls.NOT_UTF8.value) else cls.UNPARSABLE


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """A sample that is rejected after the pipe, and its event with it."""

    block: int
    """Number of its block among those of the pass, from 0."""
    event: int
    """Its `event_B`."""
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rejected event (multislot: one output line)."""

    partition: str
    offset: int
    """Position of the event; multislot: first position of the segment with the line."""
    reason: Reason
    detail: str = ""
    """Details as text: the slot, the byte."""
    data: bytes | None = None
    """The event, or the output line."""
    line: int | None = None
    """Multislot: number of the line in the segment's output, from 1."""

    def __str__(self) -> str:
        line = "" if self.line is None else f", output line {self.line}"
        return f"{self.partition} at {self.offset}{line}: {self.reason}" + (f": {self.detail}" if self.detail else "")
