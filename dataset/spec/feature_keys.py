"""The keys of a slot that say how its values come from an event, for `pipe.kind = "columns"`.

Which keys go together, and with which kind of slot, is checked by dataset.features.slot_rules.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer

from headrace.config import Section
from headrace.text_kinds import TextKind

MAX_CROSSED = 8
"""Most parts of a cross."""
MAX_BOUNDARIES = 10_000
"""Most boundaries of buckets."""
FieldPath = Annotated[str, Field(min_length=1, max_length=256)]
FIELD_SEPARATOR = "."
"""Between the names of a path: "user.id" is field "id" of field "user"."""
MAX_NUMBER = 1e30
"""Upper limit of numbers of either sign: what is computed with them fits a float32, or is told as not finite."""
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""A sign, or a number of either sign."""


class TimePart(StrEnum):
    """A part of a time, in UTC."""

    MINUTE = "minute"
    """0 to 59."""
    HOUR = "hour"
    """0 to 23."""
    WEEKDAY = "weekday"
    """0 (Monday) to 6."""
    WEEK_HOUR = "week_hour"
    """0 to 167: 24 times the weekday, plus the hour."""
    DAY = "day"
    """Days since 1970-01-01."""
    DAY_OF_MONTH = "day_of_month"
    """1 to 31."""
    MONTH = "month"
    """1 to 12."""
    YEAR = "year"
    """Such as 2026."""


class TimeUnit(StrEnum):
    """How a time is written."""

    SECONDS = "s"
    """Unix time in seconds."""
    MILLISECONDS = "ms"
    """Unix time in milliseconds."""
    MICROSECONDS = "us"
    """Unix time in microseconds."""
    ISO = "iso"
    """Text such as "2026-05-01T12:30:00+02:00"; without an offset it is UTC."""


if TYPE_CHECKING:

    class KeywordKeys(Section):
        """Keys that are words of Python."""

else:
    # Written out, as a class body cannot name them; an alias would give specs two forms.
    KeywordKeys = create_model(
        "KeywordKeys",
        __base__=Section,
        __module__=__name__,
        **{
            "from": (
                FieldPath | None,
                Field(
                    default=None,
                    description='Field of the event, for example "user.id"; a list on the way gives its elements. '
                    "Default: the name of the slot.",
                ),
            ),
            "in": (
                FieldPath | None,
                Field(
                    default=None,
                    description="1 if the value of `from` (default: the exploded element) is in this list of the "
                    "event, else 0: a label.",
                ),
            ),
        },
    )
    KeywordKeys.__doc__ = "Keys that are words of Python."


class FeatureKeys(KeywordKeys):
    """How the values of a slot come from an event; only with `pipe.kind = "columns"`."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "from": TextKind.NAME,
        "in": TextKind.NAME,
        "cross": TextKind.NAME,
        "split": TextKind.VALUE,
        "default": TextKind.VALUE,
    }

    cross: Annotated[tuple[FieldPath, ...], Field(max_length=MAX_CROSSED)] = ()
    """Sparse slots, or fields of the event, whose ids together are one id."""
    split: str | None = Field(default=None, min_length=1, max_length=8)
    """Separator of the values in a text, for example ","; empty values are left out."""
    time: TimePart | None = None
    """A part of a time in UTC: "minute", "hour", "weekday", "week_hour", "day", "day_of_month", "month" or "year"."""
    unit: TimeUnit | None = None
    """How the time is written: "s" (default), "ms", "us", or "iso" for text."""
    count: bool = False
    """The number of elements of a list."""
    scale: float | None = Field(default=None, ge=-MAX_NUMBER, le=MAX_NUMBER)
    """Factor of a dense or meta value."""
    log: bool = False
    """log(1 + value) of a dense value."""
    buckets: Annotated[tuple[Number, ...], Field(max_length=MAX_BOUNDARIES)] = ()
    """Rising boundaries: the id is the number of boundaries that are at most the value."""
    hash: int | None = Field(default=None, ge=1, lt=1 << 63)
    """Number of ids: the id is mixed, then taken modulo this."""
    default: bool | Whole | Annotated[float, Field(ge=-(1 << 63), lt=1 << 64)] | str | None = Field(
        default=None, union_mode="left_to_right"
    )
    """The value where the event has none."""

    @property
    def source(self) -> str | None:
        """`from`."""
        found: str | None = getattr(self, "from")  # noqa: B009 - a word of Python
        return found

    @property
    def members(self) -> str | None:
        """`in`."""
        found: str | None = getattr(self, "in")  # noqa: B009 - a word of Python
        return found

    @property
    def feature_keys(self) -> tuple[str, ...]:
        """The keys of this class that are set."""
        return tuple(name for name in FeatureKeys.model_fields if _is_set(name, getattr(self, name)))

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys of this class, `counters`, `statistics` and `pairs` that are not set, so that other slots
        are written as before there were any."""
        unset = {name for name in FeatureKeys.model_fields if name not in self.feature_keys}
        unset |= {name for name in ("counters", "statistics") if getattr(self, name, None) is None}
        unset |= {name for name in ("pairs",) if not getattr(self, name, ())}
        return {name: value for name, value in dump(self).items() if name not in unset}


def _is_set(name: str, value: object) -> bool:
    """Whether a key has a value; 0 is one, and so is `default = false`."""
    return value is not None and value != () and (value is not False or name == "default")
