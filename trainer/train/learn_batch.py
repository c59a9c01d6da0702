"""Learns from the batch of a step: forward and backward pass of each of its micro-batches."""

from collections.abc import Mapping

from headrace.pserver.protocol.shards import Gradients
from headrace.timeline import Span, span
from headrace.trainer.features.micro_batches import micro_batches
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.status.time_spent import LoopPart
from headrace.trainer.train.exchanges import Rows
from headrace.trainer.train.row_sums import RowSums
from headrace.trainer.train.trainer_parts import TrainerParts


def learn_batch(
    parts: TrainerParts, batch: TrainingBatch, rows: Rows, step: int, global_weight: Mapping[str, float]
) -> tuple[dict[str, Gradients], bool]:
    """Measure the batch and learn from it. Returns the gradients of its rows, and whether all numbers are finite.

    The dense strategy holds the gradients of the dense parameters. `global_weight`: weight of the step, by task.
    """
    parts.dense.take(rows)
    sums = RowSums.of(batch)
    for number, each in enumerate(micro_batches(batch), 1):
        with span(Span.FORWARD):
            measured = parts.stepper.measured(each, rows, global_weight)
            forward = parts.stepper.forward(each, rows, global_weight)
            parts.observer.observe(each, measured or forward, step)
        with parts.progress.spent.part(LoopPart.BACKWARD), span(Span.BACKWARD):
            if number == len(batch.ends):
                parts.dense.fills(parts.stepper.scale.value)
            parts.stepper.backward(each, forward, sums)
    with parts.progress.spent.part(LoopPart.BACKWARD), span(Span.BACKWARD):
        return parts.stepper.gradients(batch, sums), sums.finite
