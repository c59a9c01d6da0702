"""Facts about a step that all ranks know before it begins, in one message with how the step before went."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFacts:
    """See module docstring."""

    weight: Mapping[str, float]
    """Weight of the step's samples over all ranks, by task."""
    num_samples: int
    num_batches: int
    """Number of ranks with a batch."""
    num_bad: int
    """Number of ranks on which a loss or gradient of the step before is not finite."""

    @property
    def more(self) -> bool:
        """Whether any rank has a batch."""
        return self.num_batches > 0
