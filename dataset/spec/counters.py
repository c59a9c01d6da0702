"""The key `counters` of a dense slot: past-only counts of what happened to a key, over windows of event time. Pure."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from millrace.config import PositiveDuration, Section

MAX_WINDOWS = 8
"""Most windows of a slot: 60 bytes each for every key."""
MAX_CROSSED = 8
"""Most slots of a key."""
MIN_WINDOW_S, MAX_WINDOW_S = 60, 366 * 86_400
"""Limits of the length of a window."""


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
    by window."""

    key: str | Annotated[tuple[str, ...], Field(min_length=2, max_length=MAX_CROSSED)]
    """Sparse slot whose first sign is the key, for example "article"; or several, for example ["user", "article"]:
    their first signs together are the key. Only samples that have all of them have a key."""
    what: Annotated[tuple[Counted, ...], Field(min_length=1)] = (Counted.SHOWS, Counted.CLICKS, Counted.CTR)
    """The floats of each window: "shows": log(1 + shows); "clicks": log(1 + clicks); "ctr":
    log((clicks + prior * prior_weight) / (shows + prior_weight) / prior), which is 0 for a key without samples."""
    windows: Annotated[tuple[PositiveDuration | Literal["all"], ...], Field(min_length=1, max_length=MAX_WINDOWS)]
    """Lengths of the windows, for example ["1h", "1d", "all"]: whole minutes, at most 366 days; "all" has no end. The
    begin of a window is rounded down to a sixth of its length."""
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
    def _whole_minutes(cls, windows: tuple[float | str, ...]) -> tuple[float | str, ...]:
        for window in windows:
            if isinstance(window, float) and (window % 60 or not MIN_WINDOW_S <= window <= MAX_WINDOW_S):
                raise ValueError(f'{window:g} s is not a window: whole minutes, at most 366 days, or "all"')
        if len(set(windows)) < len(windows):
            raise ValueError("a window is there twice")
        return windows

    @model_validator(mode="after")
    def _has_click(self) -> "CountersSection":
        if self.click is None and any(each is not Counted.SHOWS for each in self.what):
            raise ValueError('"clicks" and "ctr" need click = "...", a meta slot; or set what = ["shows"]')
        if len(set(self.what)) < len(self.what):
            raise ValueError("what has a number twice")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The slots whose signs make the key."""
        return (self.key,) if isinstance(self.key, str) else self.key

    @property
    def windows_s(self) -> tuple[int, ...]:
        """The windows in seconds, 0 for the one without end."""
        return tuple(0 if window == "all" else int(window) for window in self.windows)

    @property
    def size(self) -> int:
        """Number of floats of the slot."""
        return len(self.what) * len(self.windows)
