"""The key `counters` of a dense slot: past-only counts of what happened to a key, over windows of event time. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from headrace.config import PositiveDuration, Section
from headrace.text_kinds import TextKind

MAX_WINDOWS = 8
"""Most windows and half-lives of a slot: a window is 60 bytes for every key, a half-life 12."""
MAX_CROSSED = 8
"""Most slots of a key."""
MIN_WINDOW_S, MAX_WINDOW_S = 60, 366 * 86_400
"""Limits of the length of a window, or of a half-life."""


class Counted(StrEnum):
    """A number that is counted."""

    SHOWS = "shows"
    CLICKS = "clicks"
    CTR = "ctr"


class CountersSection(Section):
    """A dense slot that the job fills itself: how often a key was shown and clicked in earlier samples, in windows of
    event time that end at the sample.

    The pipe does not emit such a slot. A sample sees the samples of earlier events, in the order of the log, and none
    of its own event. A sample without a key has zeros. The slot has a float for each window and each of `what`, window
    by window; after the windows, likewise for each half-life."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "key": TextKind.NAME,
        "click": TextKind.NAME,
    }

    key: str | Annotated[tuple[str, ...], Field(min_length=2, max_length=MAX_CROSSED)]
    """Sparse slot whose first sign is the key, for example "article"; or several, for example ["user", "article"]:
    their first signs together are the key. Only samples that have all of them have a key."""
    what: Annotated[tuple[Counted, ...], Field(min_length=1)] = (Counted.SHOWS, Counted.CLICKS, Counted.CTR)
    """The floats of each window: "shows": log(1 + shows); "clicks": log(1 + clicks); "ctr":
    log((clicks + prior * prior_weight) / (shows + prior_weight) / prior), which is 0 for a key without samples."""
    windows: Annotated[tuple[PositiveDuration | Literal["all"], ...], Field(max_length=MAX_WINDOWS)] = ()
    """Lengths of the windows, for example ["1h", "1d", "all"]: whole minutes, at most 366 days; "all" has no end. The
    begin of a window is rounded down to a sixth of its length."""
    half_lives: Annotated[tuple[PositiveDuration, ...], Field(max_length=MAX_WINDOWS)] = ()
    """Counts that fade, for example ["1d"]: a show counts half after a day, a quarter after two. Whole minutes, at most
    366 days. Ages are rounded down to a sixth of the half-life."""
    click: str | None = None
    """Meta slot: a sample in which it is neither 0 nor missing is a click. Needed by "clicks" and "ctr"."""
    prior: float = Field(default=0.05, gt=0, lt=1)
    """The share of clicks that "ctr" supposes where it knows nothing."""
    prior_weight: float = Field(default=20.0, gt=0, le=1e9)
    """Number of shows that `prior` counts as."""
    delete_after_days: int | None = Field(default=None, ge=0, le=1_000_000)
    """Counters of keys without a sample for more days are deleted at a day's tick. Unset: they are kept, so that memory
    grows with the number of keys."""

    @field_validator("windows")
    @classmethod
    def _windows_fit(cls, windows: tuple[float | str, ...]) -> tuple[float | str, ...]:
        _check_lengths(windows, "window", ', or "all"')
        return windows

    @field_validator("half_lives")
    @classmethod
    def _half_lives_fit(cls, half_lives: tuple[float, ...]) -> tuple[float, ...]:
        _check_lengths(half_lives, "half-life")
        return half_lives

    @model_validator(mode="after")
    def _has_windows(self) -> "CountersSection":
        if not 1 <= len(self.windows) + len(self.half_lives) <= MAX_WINDOWS:
            raise ValueError(f"needs windows or half_lives, at most {MAX_WINDOWS} together")
        return self

    @model_validator(mode="after")
    def _has_click(self) -> "CountersSection":
        if self.click is None and any(each is not Counted.SHOWS for each in self.what):
            raise ValueError('"clicks" and "ctr" need click = "...", a meta slot; or set what = ["shows"]')
        if len(set(self.what)) < len(self.what):
            raise ValueError("what has a number twice")
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `half_lives` that are not set, so that other counters are written as before there were any."""
        return {name: value for name, value in dump(self).items() if name != "half_lives" or self.half_lives}

    @property
    def keys(self) -> tuple[str, ...]:
        """The slots whose signs make the key."""
        return (self.key,) if isinstance(self.key, str) else self.key

    @property
    def windows_s(self) -> tuple[int, ...]:
        """The windows in seconds, 0 for the one without end; then the half-lives, below 0."""
        windows_s = (0 if window == "all" else int(window) for window in self.windows)
        return (*windows_s, *(-int(each) for each in self.half_lives))

    @property
    def size(self) -> int:
        """Number of floats of the slot."""
        return len(self.what) * len(self.windows_s)


def _check_lengths(lengths: Sequence[float | str], what: str, other: str = "") -> None:
    """Raise ValueError for a length that is too short, too long, or there twice. `other`: what else is possible."""
    for length in lengths:
        if isinstance(length, float) and (length % 60 or not MIN_WINDOW_S <= length <= MAX_WINDOW_S):
            raise ValueError(f"{length:g} s is not a {what}: whole minutes, at most 366 days{other}")
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"a {what} is there twice")
