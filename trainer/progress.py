"""How far the job is, and how fast: what a status says. Clocks here decide nothing."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainer.plan import Plan

RATE_WINDOW_S = 10.0
"""Rates are over the passes closed in the last so many seconds."""


class Progress:
    """Counts of one rank's view; the chief's is served. Written by the loop, read by any thread."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._begin_s = time.monotonic()
        self._closes: deque[tuple[float, int, int]] = deque([(self._begin_s, 0, 0)])
        self._said: dict[str, Any] = {}
        self.state = "starting"
        self.current = 0
        """Pass being trained."""
        self.version = 0
        """Last closed pass."""
        self.last_planned = 0
        self.planned_positions: dict[str, int] = {}
        self.num_planned = 0
        """Positions of all passes planned."""
        self.positions: dict[str, int] = {}
        self.num_events = self.num_samples = self.skipped_steps = 0
        self.rejected: dict[str, int] = {}
        self.learning = True

    def planned(self, plan: Plan) -> None:
        """A pass is planned."""
        self.last_planned = plan.number
        self.planned_positions |= plan.positions()
        self.num_planned += plan.num_positions

    def opened(self, plan: Plan) -> None:
        """A pass begins."""
        self.current, self.state, self.learning = plan.number, "training", plan.learn

    def closed(
        self, plan: Plan, num_events: int, num_samples: int, rejected: Mapping[str, int], said: Mapping[str, Any]
    ) -> None:
        """A pass is closed; `said` are further lines of the status."""
        with self._lock:
            self.version = plan.number
            self.positions |= plan.positions()
            self.num_events += num_events
            self.num_samples += num_samples
            for reason, count in rejected.items():
                self.rejected[reason] = self.rejected.get(reason, 0) + count
            self._said = dict(said)
            now_s = time.monotonic()
            self._closes.append((now_s, self.num_events, self.num_samples))
            while len(self._closes) > 2 and self._closes[0][0] < now_s - RATE_WINDOW_S:
                self._closes.popleft()

    def ended(self) -> None:
        """The job is done."""
        self.state = "done"

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin_s

    def status(self) -> dict[str, Any]:
        """What the Role service answers."""
        with self._lock:
            first, last = self._closes[0], self._closes[-1]
            elapsed_s = max(last[0] - first[0], 1e-9)
            moving = last is not first and time.monotonic() - last[0] < 2 * RATE_WINDOW_S
            return {
                "job": self._job,
                "state": self.state,
                "pass": self.current,
                "version": self.version,
                "learning": self.learning,
                "events": self.num_events,
                "samples": self.num_samples,
                "rejected": dict(self.rejected),
                "skipped_steps": self.skipped_steps,
                "events_per_s": (last[1] - first[1]) / elapsed_s if moving else 0.0,
                "samples_per_s": (last[2] - first[2]) / elapsed_s if moving else 0.0,
                "positions": dict(self.positions),
                "wall_s": self.wall_s,
            } | self._said
