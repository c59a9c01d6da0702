"""The weight of a step: the samples of all its batches, on all ranks."""

from collections.abc import Sequence

import numpy as np

from headrace.pserver.consistency.policy import StepFigures
from headrace.trainer.config import TaskSection
from headrace.trainer.features.training_batches import TrainingBatch


def own_figures(batch: TrainingBatch | None, tasks: Sequence[TaskSection], *, average: bool) -> StepFigures:
    """The figures of this rank for a step: weights by task and, without `average`, its number of micro-batches."""
    if batch is None:
        return StepFigures([0.0] * (len(tasks) + (not average)), num_samples=0, num_batches=0)
    weights = [float(batch.weight_B[task.name].sum(dtype=np.float64)) for task in tasks]
    more = [] if average else [float(len(batch.ends))]
    return StepFigures([*weights, *more], len(batch.samples), num_batches=1)


def step_weights(figures: StepFigures, tasks: Sequence[TaskSection], *, average: bool) -> dict[str, float]:
    """By task, the number by which the sum of all losses is divided.

    With `average` it is the weight of all samples. Without, it is that of one micro-batch in the mean: the step then
    learns from the sum of as many means as each rank has micro-batches.
    """
    num_merged = 1.0 if average or not figures.num_batches else figures.weights[-1] / figures.num_batches
    return {task.name: figures.weights[i] / num_merged for i, task in enumerate(tasks)}
