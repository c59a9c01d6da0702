"""Rejects events whose label is not one that the loss of its task takes.

Shapes: B samples of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason, Rejection

if TYPE_CHECKING:  # every check of a job file imports this module
    from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput


@dataclass(frozen=True, slots=True)
class LabelBounds:
    """The labels that a task takes; missing ones (NaN) are checked elsewhere."""

    slot: str
    lowest: float
    highest: float
    reason: Reason
    takes: str
    """The same in words."""
    mask: str | None = None
    """Slot that is 0 where the task has no label."""

    @classmethod
    def of_classes(cls, slot: str, num: int) -> "LabelBounds":
        """The number of one of so many classes."""
        return cls(slot, 0, num - 1, Reason.CLASS, f"the model has the classes 0 to {num - 1}")

    @classmethod
    def of_probability(cls, slot: str, mask: str | None) -> "LabelBounds":
        """Those of log loss."""
        takes = 'loss = "bce" takes labels from 0 to 1; use loss = "mse" for other values'
        return cls(slot, 0, 1, Reason.LABEL, takes, mask)

    def outside(self, block: Samples) -> NDArray[np.bool_]:
        """(B,) the samples with another label."""
        label_B = block.meta[self.slot]
        outside_B: NDArray[np.bool_] = (label_B < self.lowest) | (label_B > self.highest)
        return outside_B if self.mask is None else outside_B & (block.meta[self.mask] != 0)


def reject_labels(work: "PipeInput", outcome: "PipeOutput", bounds: Sequence[LabelBounds], *, traced: bool) -> None:
    """Take the samples of events with other labels out of `outcome`, and add their rejections.

    `traced`: whether samples know the position of their event, and not only a number (multislot).
    """
    for each in bounds:
        for number, block in enumerate(outcome.blocks):
            wrong_B = each.outside(block)
            if not wrong_B.any():
                continue
            events, first = np.unique(block.event_B[wrong_B], return_index=True)
            for event, at in zip(events.tolist(), np.flatnonzero(wrong_B)[first].tolist(), strict=True):
                why = f"{each.slot} is {block.meta[each.slot][at]}; {each.takes}"
                outcome.rejections.append(_rejection(work, event, each.reason, why, traced=traced))
            kept_B = ~np.isin(block.event_B, events)
            outcome.blocks[number] = block.take(np.flatnonzero(kept_B))


def _rejection(work: "PipeInput", event: int, reason: Reason, why: str, *, traced: bool) -> Rejection:
    segment = work.segment
    if not traced:
        return Rejection(segment.partition, segment.begin, reason, why, line=event + 1)
    for block in work.blocks:
        at = int(np.searchsorted(block.position_E, event))
        if at < len(block) and block.position_E[at] == event:
            return Rejection(segment.partition, event, reason, why, block.value(at))
    return Rejection(segment.partition, event, reason, why)
