"""The learning rate of the dense part in force: its base rate times the share of its schedule at the present count.

The count is a pure function of what was learnt: samples of all trainers in steps of learnt passes, skipped ones
included, or the number of versions before the pass. A commit holds the count of samples. Where dense parameters are on
the shards, these apply the schedule and count as for rows, samples of predicted passes included; so does this one.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from headrace.pserver.rate_schedules import Constant, Schedule
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.dense_config import DenseSection

SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Schedule)


class LearningRate:
    """Every rank has the same."""

    def __init__(self, dense: DenseStrategy, section: DenseSection, *, by_pass: bool = False) -> None:
        """`by_pass`: the count stands still within a pass, as where ranks do not know the steps of the others. Dense
        parameters are on the shards then, which count for themselves."""
        self._by_pass, self._counts_as_rows = by_pass, section.kind.on_shards
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
        return self._base * self._schedule.share_after(self._num_samples, self._num_versions)

    def open_pass(self, number: int, samples: int = 0) -> None:
        """Begin the pass of version `number`, after so many samples of the job."""
        self._num_versions = number - 1
        if self._counts_as_rows:
            self._num_samples = samples

    def step(self, num_samples: int) -> None:
        """Before a step with so many samples over all ranks: the strategy learns at the rate of this step."""
        if self._by_pass:
            return
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
