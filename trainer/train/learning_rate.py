"""The learning rate of the dense part in force: its base rate times the share of its schedule at the present count.

The count is a pure function of what was learnt: samples of all trainers in steps of learnt passes, skipped ones
included, or the number of versions before the pass. A commit holds the count of samples.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.rate_schedules import Constant, CountedSchedule, Schedule

SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Schedule)


class LearningRate:
    """Every rank has the same."""

    def __init__(self, dense: DenseStrategy, section: DenseSection) -> None:
        self._dense, self._base, self._schedule = dense, section.optimizer.lr, section.schedule
        self._num_samples = self._num_versions = 0

    def set(self, base: float | None, schedule: Mapping[str, Any] | None) -> None:
        """Use another base rate, or another schedule as JSON-able data, from the next step on."""
        self._base = self._base if base is None else base
        self._schedule = self._schedule if schedule is None else SCHEDULE.validate_python(schedule)
        self._dense.set_lr(self.value)

    @property
    def value(self) -> float:
        """The rate of the next step."""
        if not isinstance(self._schedule, CountedSchedule):
            return self._base
        count = self._num_samples if self._schedule.counts == "samples" else self._num_versions
        return self._base * self._schedule.share(count)

    def open_pass(self, number: int) -> None:
        """Begin the pass of version `number`."""
        self._num_versions = number - 1

    def step(self, num_samples: int) -> None:
        """Before a step with so many samples over all ranks: the strategy learns at the rate of this step."""
        if not isinstance(self._schedule, Constant):
            self._dense.set_lr(self.value)
        self._num_samples += num_samples

    def digest(self, dense: str) -> str:
        """The hash of the dense state, with the count if a schedule uses it."""
        if isinstance(self._schedule, Constant):
            return dense
        return hashlib.sha256(f"{dense} {self._num_samples}".encode()).hexdigest()

    def state(self) -> dict[str, int]:
        """The state that a commit holds."""
        return {"samples": self._num_samples}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a commit; older ones have no count, which then begins at 0."""
        self._num_samples = state.get("samples", 0)
