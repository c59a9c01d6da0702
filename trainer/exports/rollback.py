"""Decides when a stream of exports goes back to an older one, and when exports are promoted again. Pure.

A fold over the closes and the log, so a replay gives the same state. The level is the median of the metric at the
closes where it had not fallen. Once it has fallen for some closes in a row, the stream goes back to the newest export
of a version before the fall; the level then stays until the metric is back.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headrace.trainer.guard_config import RollbackSection
from headrace.trainer.job_status import RollbackStatus

MAX_PROMOTED = 64
"""Promoted exports that are remembered; older ones are no longer gone back to."""
WORSE_IF_HIGHER = ("logloss",)


class PromotedExport(NamedTuple):
    """An export that `current.json` named."""

    path: str
    """"t1/0000000012-base"."""
    version: int


class RollbackDecision(NamedTuple):
    """A step back, or on, at a close."""

    kind: Literal["back", "on"]
    """Back to one of `paths`; or on with new exports."""
    paths: tuple[str, ...]
    level: float
    value: float
    """The metric at this close."""
    why: str


@dataclass
class RollbackState:
    """One stream. Its fields are keys of a commit's state."""

    values: list[float] = field(default_factory=list)
    """The metric at closes where it had not fallen, oldest first."""
    last: float | None = None
    """The metric at the last close."""
    well: int = 0
    """Last version at whose close the metric had not fallen."""
    streak: int = 0
    """Closes in a row: above 0 with a fallen metric, below 0 with one that had not fallen."""
    promoted: list[PromotedExport] = field(default_factory=list)
    """Oldest first."""
    active: str = ""
    """Why the stream is rolled back; "" where it is not."""
    target: list[str] = field(default_factory=list)
    """While it is rolled back: paths of the exports to go back to, newest first."""
    since: int = 0
    """While it is rolled back: the version at which that was decided."""
    pointed: str = ""
    """The path that current.json names for it, once that is done."""
    trouble: str = ""
    """Why current.json could not be changed; "" where it could."""

    def level(self, section: RollbackSection) -> float | None:
        """The median of the reference; None while it has fewer than 3 closes."""
        known = self.values[-section.reference :]
        return statistics.median(known) if len(known) >= 3 else None

    def saw(self, section: RollbackSection, version: int, value: float | None) -> None:
        """Note the metric at a close with samples; None, and no number, count for nothing."""
        if value is None or not math.isfinite(value):
            return
        self.last = value
        level = self.level(section)
        if level is not None and has_fallen(section, level, value):
            self.streak = max(0, self.streak) + 1
            return
        self.streak = min(0, self.streak) - 1
        self.well = version
        self.values = [*self.values, value][-section.reference :]

    def decide(self, section: RollbackSection) -> RollbackDecision | None:
        """The step that is due now, if any. Without an older export there is nothing to go back to."""
        level = self.level(section)
        if self.last is None or level is None:
            return None
        if self.active:
            if self.streak > -section.closes:
                return None
            why = f"{section.metric} is {self.last:.4f} again, and was not below its bound for {section.closes} closes"
            return RollbackDecision("on", (), level, self.last, why)
        if self.streak < section.closes:
            return None
        good = tuple(each.path for each in reversed(self.promoted) if each.version <= self.well)
        if not good:
            return None
        worse = "above" if section.metric in WORSE_IF_HIGHER else "below"
        why = (
            f"{section.metric} of the {section.span} was more than {section.falls:g} {worse} {level:.4f} "
            f"for {section.closes} closes"
        )
        return RollbackDecision("back", good, level, self.last, why)

    def went(self, version: int, paths: Sequence[str], why: str) -> None:
        """A decision has acted at the close of `version`."""
        self.active, self.target = (why, list(paths)) if paths else ("", [])
        self.since, self.pointed, self.trouble, self.streak = version, "", "", 0
        if paths:
            self.promoted = [each for each in self.promoted if each.version <= self.well]

    def was_pointed(self, version: int, path: str, trouble: str) -> bool:
        """How current.json went back, by the decision at `version` -> whether that decision is still in force."""
        if self.since != version:
            return False
        self.pointed, self.trouble = path, trouble
        return True

    @property
    def to_point(self) -> tuple[str, ...]:
        """The paths of which current.json is still to name the first that exists."""
        return () if self.pointed or self.trouble else tuple(self.target)

    def was_promoted(self, path: str, version: int) -> None:
        """`current.json` named a new export. While the stream is rolled back, it is one that ended late."""
        if self.active:
            return
        self.promoted = [*(each for each in self.promoted if each.path != path), PromotedExport(path, version)]
        self.promoted = self.promoted[-MAX_PROMOTED:]

    def on_timeline(self, timeline: str) -> "RollbackState":
        """On another timeline, after a rewind, no export is known yet, and no rollback is in force."""
        if all(each.path.startswith(f"{timeline}/") for each in self.promoted):
            return self
        return RollbackState(values=self.values, last=self.last)

    def status(self, section: RollbackSection) -> RollbackStatus:
        """For people."""
        level = self.level(section)
        return RollbackStatus(
            metric=section.metric,
            level=level,
            bound=None if level is None else _bound(section, level),
            value=self.last,
            fallen_closes=max(0, self.streak),
            stuck=not self.active and self.streak >= section.closes,
            back=self.active or None,
            since=self.since if self.active else None,
            current=self.pointed or None,
            trouble=self.trouble or None,
        )


def has_fallen(section: RollbackSection, level: float, value: float) -> bool:
    """Whether a value is beyond the bound of a level."""
    bound = _bound(section, level)
    return value > bound if section.metric in WORSE_IF_HIGHER else value < bound


def _bound(section: RollbackSection, level: float) -> float:
    return level + section.falls if section.metric in WORSE_IF_HIGHER else level - section.falls


def value_of(section: RollbackSection, metrics: Mapping[str, Any]) -> float | None:
    """The watched metric in the report of a close."""
    tasks = metrics.get(section.span, {})
    name = section.task or next(iter(tasks), None)
    value = tasks.get(name, {}).get(section.metric)
    return None if value is None else float(value)
