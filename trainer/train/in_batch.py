"""First-order weights that follow each event of a batch before the next one is predicted: `tables.<t>.in_batch`.

Rows learn once a step. So a batch predicts all of a user's samples in it by what was known before the first of them,
and the larger the batch, the more a model loses to a linear one that takes a sample at a time. Here the first-order
weights of the batch's keys take such steps on copies: by events in order, each sample's logit gets what the earlier
events of the batch have added to its weights. Samples are measured, and all parts of the model learn, by the error that
is left. The copies end with the step; the rows learn from the sum of these errors as ever, on the shards, whose Adagrad
says how long the steps of the copies are. Each trainer follows its own samples.

Shapes: as in trainer.features.lookup_kernels; E floats of a pulled row (D weights and two more, pserver.rows.kernels),
T tasks, and N occurrences of all tables in the order of samples.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.dataset.samples.batch import F32, I64
from headrace.kernel_cache import njit
from headrace.pserver.protocol.shards import Floats
from headrace.trainer.config import TaskSection
from headrace.trainer.device_copies import DeviceCopies, Later, sent
from headrace.trainer.features.deduplication import I32, TableLookup
from headrace.trainer.features.training_batches import TrainingBatch, first_occurrences
from headrace.trainer.models.contract import Declared
from headrace.trainer.models.layers import FirstOrder
from headrace.trainer.train.losses import fake_negative_weights

F64 = NDArray[np.float64]
MAX_LOGIT = 30.0


class InBatchLearning:
    """Corrects the logits of a job's tasks. A model whose logits are not sums with the first-order term has none."""

    def __init__(
        self, model: nn.Module, tasks: Sequence[TaskSection], copies: DeviceCopies, at_once: str | None = None
    ) -> None:
        """`at_once`: the label whose negatives are learnt before it is known (trainer.train.losses)."""
        found = [each for each in model.modules() if isinstance(each, FirstOrder) and each.present]
        self._term = found[0] if len(found) == 1 and Declared.of(model).sums_first_order else None
        self._tasks = [task for task in tasks if task.loss != "softmax"]
        self._copies, self._at_once, self.num_samples = copies, at_once, 0
        """Samples of the step, of all trainers."""
        self._is_bce_T = np.array([task.loss == "bce" for task in self._tasks])

    def corrected(
        self,
        batch: TrainingBatch,
        rows: Mapping[str, Floats],
        outputs: Mapping[str, Tensor],
        global_weight: Mapping[str, float],
    ) -> dict[str, Tensor]:
        """The outputs with corrected logits. `global_weight`: weight of the step over all trainers, by task.

        Tables whose rows do not say how long their steps are, as in a pass that is only predicted, stay as they are.
        """
        looks = [look for look in batch.lookups if rows[look.table.name].shape[1] > look.table.width]
        names = [task.name for task in self._tasks]
        if self._term is None or not looks or not names or not len(batch.samples):
            return dict(outputs)
        logits, scale_T, steps = self._here([outputs[name] for name in names], looks, rows)
        logit_BT = np.stack(logits, 1).astype(np.float64)
        label_BT = np.stack([batch.label_B[name] for name in names], 1).astype(np.float64)
        factor_BT = self._factors(batch, logits, global_weight)
        event_B1 = np.flatnonzero(np.diff(batch.samples.event_B, prepend=-1, append=-1))
        added_B = np.zeros(len(batch.samples))
        of_samples = logit_BT, label_BT, factor_BT, self._is_bce_T, scale_T, event_B1
        follow_events(*of_samples, *_occurrences(batch, looks, steps), added_B)
        return {name: self._with(output, name, names, added_B, scale_T) for name, output in outputs.items()}

    def _here(
        self, outputs: Sequence[Tensor], looks: Sequence[TableLookup], rows: Mapping[str, Floats]
    ) -> tuple[list[F32], F64, list[F32]]:
        """On the host, after one wait: (B,) logits and their factors by task, and (U, 2) two numbers of keys by table.
        Of rows on a device, these two alone travel."""
        later, scale = self._copies.later, None if self._term is None else self._term.scale
        logits = [later(each.detach().float()) for each in outputs]
        steps = [_steps(rows[look.table.name], look.table.width, later) for look in looks]
        scale_T = None if scale is None or scale.scale_T is None else later(scale.scale_T)
        factors_T = np.ones(len(outputs)) if scale_T is None else scale_T.array.astype(np.float64)[: len(outputs)]
        found = [each.array if isinstance(each, Later) else each for each in steps]
        return [each.array for each in logits], factors_T, found

    def _factors(self, batch: TrainingBatch, logits: Sequence[F32], global_weight: Mapping[str, float]) -> F64:
        """(B, T) what the gradients of samples are multiplied by where `grad_scale` is "sum"."""
        found = []
        for task, logit_B in zip(self._tasks, logits, strict=True):
            weight_B, total = batch.weight_B[task.name].astype(np.float64), global_weight[task.name]
            if task.label == self._at_once:
                label = torch.from_numpy(batch.label_B[task.name])
                weight_B = weight_B * fake_negative_weights(torch.from_numpy(logit_B), label).numpy()
            found.append(weight_B * (task.weight * self.num_samples / total if total else 0.0))
        return np.stack(found, 1)

    def _with(self, output: Tensor, name: str, names: Sequence[str], added_B: F64, scale_T: F64) -> Tensor:
        if name not in names:
            return output
        return output + sent((added_B * scale_T[names.index(name)]).astype(np.float32), output.device)


def _occurrences(
    batch: TrainingBatch, looks: Sequence[TableLookup], steps: Sequence[F32]
) -> tuple[I64, I32, F32, F32, F32]:
    """(B + 1) the first occurrence of each sample; (N) the key of each, and its factor; (U) two numbers of each key."""
    parts = [_of_table(batch, look) for look in looks]
    first_U, second_U = (np.concatenate([each[:, number] for each in steps]) for number in (0, 1))
    if len(parts) == 1:
        return *parts[0], first_U, second_U
    begins = np.cumsum([0, *(len(each) for each in steps[:-1])])
    key_N = np.concatenate([inverse_N + begin for (_, inverse_N, _), begin in zip(parts, begins, strict=True)])
    sample_N = np.concatenate([np.repeat(np.arange(len(start_B1) - 1), np.diff(start_B1)) for start_B1, _, _ in parts])
    order_N = np.argsort(sample_N, kind="stable")
    start_B1 = np.sum([start_B1 for start_B1, _, _ in parts], axis=0)
    by_N = np.concatenate([by_N for _, _, by_N in parts])
    return start_B1, key_N[order_N].astype(np.int32), by_N[order_N], first_U, second_U


def _steps(rows_UE: Floats, width: int, later: Callable[[Tensor], Later]) -> F32 | Later:
    """(U, 2) the two numbers of each key."""
    if isinstance(rows_UE, Tensor):
        return later(rows_UE[:, width:])
    assert isinstance(rows_UE, np.ndarray), "rows are an array or a tensor"
    return rows_UE[:, width:]


def _of_table(batch: TrainingBatch, look: TableLookup) -> tuple[I64, I32, F32]:
    """Of one table. Ids of sequences have the factor 0: models take their mean, and not each for itself."""
    start_B1 = first_occurrences(batch, look)
    if look.cell_N is None or look.scale_N is None:
        return start_B1, look.inverse_N, np.ones(len(look.inverse_N), np.float32)
    pooled_N = look.cell_N < look.num_samples * len(look.table.pooled)
    return start_B1, look.inverse_N, np.where(pooled_N, look.scale_N, np.float32(0))


@njit(nogil=True, cache=True)
def follow_events(  # type: ignore[no-untyped-def]
    logit_BT, label_BT, factor_BT, is_bce_T, scale_T, event_B1, start_B1, key_N, by_N, first_U, second_U, added_B
):
    """Write what the first-order weights have learnt from earlier events of the batch adds to each sample.

    Event e has samples event_B1[e] .. event_B1[e + 1] - 1, all predicted before any of them is learnt. A key of one
    occurrence learns nothing that the batch reads. Adagrad: first += gradient^2 * second, then a step of
    gradient / sqrt(first).
    """
    count_U, moved_U = np.zeros(len(first_U), np.int32), np.zeros(len(first_U))
    inertia_U, error_B = first_U.astype(np.float64), np.zeros(len(logit_BT))
    for n in range(len(key_N)):
        count_U[key_N[n]] += 1
    for e in range(len(event_B1) - 1):
        for b in range(event_B1[e], event_B1[e + 1]):
            total = 0.0
            for n in range(start_B1[b], start_B1[b + 1]):
                if count_U[key_N[n]] > 1:
                    total += moved_U[key_N[n]] * by_N[n]
            added_B[b], error_B[b] = total, 0.0
            for t in range(logit_BT.shape[1]):
                z = logit_BT[b, t] + scale_T[t] * total
                if is_bce_T[t]:
                    error = 1.0 / (1.0 + math.exp(-min(max(z, -MAX_LOGIT), MAX_LOGIT))) - label_BT[b, t]
                else:
                    error = 2.0 * (z - label_BT[b, t])
                error_B[b] += factor_BT[b, t] * scale_T[t] * error
        for b in range(event_B1[e], event_B1[e + 1]):
            for n in range(start_B1[b], start_B1[b + 1]):
                u, gradient = key_N[n], error_B[b] * by_N[n]
                if count_U[u] > 1 and gradient != 0:
                    inertia_U[u] += gradient * gradient * second_U[u]
                    moved_U[u] -= gradient / math.sqrt(inertia_U[u])


def follow_events_reference(
    logits: Sequence[Sequence[float]],
    labels: Sequence[Sequence[float]],
    factors: Sequence[Sequence[float]],
    is_bce: Sequence[bool],
    scales: Sequence[float],
    events: Sequence[Sequence[int]],
    occurrences: Sequence[Sequence[tuple[int, float]]],
    steps: Sequence[tuple[float, float]],
) -> list[float]:
    """The plain twin of `follow_events`. `events`: the samples of each; `occurrences`: key and factor, by sample;
    `steps`: both numbers of each key."""
    added, moved, inertia = [0.0] * len(logits), [0.0] * len(steps), [first for first, _ in steps]
    for samples in events:
        for b in samples:
            added[b] = sum(moved[u] * by for u, by in occurrences[b])
        for b in samples:
            total = 0.0
            for t, scale in enumerate(scales):
                z = logits[b][t] + scale * added[b]
                found = 1 / (1 + math.exp(-min(max(z, -MAX_LOGIT), MAX_LOGIT))) if is_bce[t] else 2 * z
                wanted = labels[b][t] if is_bce[t] else 2 * labels[b][t]
                total += factors[b][t] * scale * (found - wanted)
            for u, by in occurrences[b]:
                if total * by:
                    inertia[u] += (total * by) ** 2 * steps[u][1]
                    moved[u] -= total * by / inertia[u] ** 0.5
    return added
