"""Rejects events whose class is not one of those that the model has.

Shapes: B samples of a block.
"""

from collections.abc import Mapping

import numpy as np

from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.samples.rejection import Reason, Rejection


def reject_classes(work: PipeInput, outcome: PipeOutput, classes: Mapping[str, int], *, traced: bool) -> None:
    """Take the samples of such events out of `outcome`, and add their rejections. `classes`: their number by slot.

    `traced`: whether samples know the position of their event, and not only a number (multislot).
    """
    for name, num_classes in classes.items():
        for number, block in enumerate(outcome.blocks):
            class_B = block.meta[name]
            wrong_B = (class_B < 0) | (class_B >= num_classes)
            if not wrong_B.any():
                continue
            events, first = np.unique(block.event_B[wrong_B], return_index=True)
            for event, at in zip(events.tolist(), np.flatnonzero(wrong_B)[first].tolist(), strict=True):
                why = f"{name} is {class_B[at]}; the model has the classes 0 to {num_classes - 1}"
                outcome.rejections.append(_rejection(work, event, why, traced=traced))
            kept_B = ~np.isin(block.event_B, events)
            outcome.blocks[number] = block.take(np.flatnonzero(kept_B))


def _rejection(work: PipeInput, event: int, why: str, *, traced: bool) -> Rejection:
    segment = work.segment
    if not traced:
        return Rejection(segment.partition, segment.begin, Reason.CLASS, why, line=event + 1)
    for block in work.blocks:
        at = int(np.searchsorted(block.position_E, event))
        if at < len(block) and block.position_E[at] == event:
            return Rejection(segment.partition, event, Reason.CLASS, why, block.value(at))
    return Rejection(segment.partition, event, Reason.CLASS, why)
