"""Keeps probabilities calibrated: a scale and an offset of each task's logits that follow the stream.

Online Platt scaling (Gupta, Ramdas, "Online Platt Scaling with Calibeating", ICML 2023) by Newton steps that forget:
every step predicts with sigmoid(scale * logit + offset), then corrects both by the gradient of the log loss over the
step's samples, divided by the information of the recent ones. The model learns from its own logits, so no gradient
passes here, and no bit of its weights depends on it. Scale is above 0, so the order of predictions stays.

A model begins far from the base rate, and at first moves by more in one step than the labels of the next can correct.
That all logits move is seen without labels, and with less noise: in the first steps the offset goes against it.

Scale, offset, information and motion are buffers of the model: commits, digests, the live feed and exports have them
as they have its weights. In modes in which trainers do not meet in steps each follows its own samples, and the close of
a pass brings those of rank 0 to all, as for other buffers.

Shapes: B samples, T tasks with calibration, K sums of a step (SUMS), I numbers of information (KNOWN), M of
motion (MOTION).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.errors import SpecError
from headrace.kernel_cache import njit
from headrace.trainer.device_copies import DeviceCopies, Later, sent

NAME = "calibration"
"""The attribute of a model, and the prefix of the names of its buffers."""
MEMORY, MAX_MEMORY, SHARE = 400.0, 4000.0, 0.1
"""Information that is remembered: a tenth of all there was, within bounds. It is about a number of clicks where clicks
are rare. Few follow a young model; many cost less: the offset is noisy by 1 / sqrt(2 * memory), 0.035 to 0.011."""
DAMPING = 32.0
"""Information that is added in each step, so that the first ones stay small."""
SCALES = 0.125, 8.0
OFFSETS = -20.0, 20.0
FOLLOWED_STEPS = 32
"""Steps in which the offset follows the motion of the logits, ever less."""
CHANCE = 9.0
"""A motion counts as far as its square is above so many times its variance: three standard deviations."""
SUMS, KNOWN, MOTION = 10, 5, 3
"""Sums of a step: the gradient of scale and offset; the information of scale, of the pair, of offset; that of offset
with squared weights; the weight, with logits, with squared logits, and squared. The four of information are remembered,
and how much there was: that of offset in units of the mean weight. Motion: the number of steps, and mean and variance
of the mean logit of the last one."""


class Calibration(nn.Module):
    """The calibration of the tasks with these names; other tasks are left as they are."""

    scale_T: Tensor
    offset_T: Tensor
    information_TI: Tensor
    motion_TM: Tensor

    def __init__(self, tasks: Sequence[str] = ()) -> None:
        super().__init__()
        self.tasks: Final = tuple(tasks)
        self._sums_TK = np.zeros((len(tasks), SUMS))
        self._known: Later | None = None
        self.register_buffer("scale_T", torch.ones(len(tasks)))
        self.register_buffer("offset_T", torch.zeros(len(tasks)))
        self.register_buffer("information_TI", torch.zeros(len(tasks), KNOWN))
        self.register_buffer("motion_TM", torch.zeros(len(tasks), MOTION))

    @classmethod
    def of(cls, model: nn.Module) -> "Calibration":
        """That of a model, or one that changes nothing."""
        found = getattr(model, NAME, None)
        return found if isinstance(found, cls) else cls()

    def forward(self, task: str, logit_B: Tensor) -> Tensor:
        """(B,) calibrated logits."""
        if task not in self.tasks:
            return logit_B
        place = self.tasks.index(task)
        return logit_B * self.scale_T[place] + self.offset_T[place]

    def note(self, moments: Mapping[str, NDArray[np.float64]]) -> None:
        """Add the sums of a batch that is learnt from, by task."""
        for place, task in enumerate(self.tasks):
            self._sums_TK[place] += moments[task]

    def take_sums(self) -> list[float]:
        """This rank's sums since the last call."""
        sums: list[float] = self._sums_TK.reshape(-1).tolist()
        self._sums_TK.fill(0)
        return sums

    def look(self, copies: DeviceCopies) -> None:
        """A step begins: its `learn` reads the buffers with what else comes to the host."""
        if self.tasks:
            self._known = copies.later(self._flat())

    @property
    def _buffers_here(self) -> tuple[Tensor, ...]:
        return self.scale_T, self.offset_T, self.information_TI, self.motion_TM

    def _flat(self) -> Tensor:
        return torch.cat([each.flatten() for each in self._buffers_here])

    @torch.no_grad()
    def learn(self, sums: Sequence[float]) -> None:
        """Follow the samples of a step, by `take_sums` over all ranks. Sums that are not finite are left out."""
        if not self.tasks:
            return
        sums_TK = np.array(sums).reshape(-1, SUMS)
        looked, self._known = self._known, None
        flat = self._flat().cpu().numpy() if looked is None else looked.array
        ends = np.cumsum([each.numel() for each in self._buffers_here])
        parts = zip(np.split(flat, ends[:-1]), self._buffers_here, strict=True)
        scales, offsets, known, motions = (part.reshape(each.shape).tolist() for part, each in parts)
        for place, sums_K in enumerate(sums_TK.tolist()):
            if all(math.isfinite(each) for each in sums_K) and sums_K[4] > 0:
                before = scales[place], offsets[place]
                if (
                    not motions[place][0] and known[place][4]
                ):  # as in stores from before motion was followed: not young any more
                    motions[place][0] = FOLLOWED_STEPS
                scales[place], offset, known[place] = newton_step(before, known[place], sums_K[:6])
                moved, motions[place] = motion(motions[place], sums_K[6:])
                offsets[place] = min(max(offset - scales[place] * moved, OFFSETS[0]), OFFSETS[1])
        after = np.concatenate([np.ravel(each) for each in (scales, offsets, known, motions)]).astype(np.float32)
        there = sent(after, self.scale_T.device).tensor_split(ends[:-1].tolist())
        for buffer, part in zip(self._buffers_here, there, strict=True):
            buffer.copy_(part.view_as(buffer))


def motion(before: Sequence[float], sums: Sequence[float]) -> tuple[float, list[float]]:
    """By how much all logits are expected to move until the next step, and what is remembered of this one.

    They moved by the difference of the mean logits of two steps. The share of it that is more than chance is that of
    James and Stein; it fades, as the differences of later samples are the stream's own.
    """
    steps, mean_before, variance_before = before
    if steps >= FOLLOWED_STEPS:
        return 0.0, [steps, 0.0, 0.0]
    weight, of_logit, of_square, squared = sums
    mean = of_logit / weight
    variance = max(of_square / weight - mean * mean, 0.0) * squared / (weight * weight)
    moved = mean - mean_before if steps else 0.0
    chance = CHANCE * (variance + variance_before)
    share = 1 - chance / (moved * moved) if moved * moved > chance else 0.0
    return (1 - steps / FOLLOWED_STEPS) * share * moved, [steps + 1, mean, variance]


def newton_step(
    before: tuple[float, float], known: Sequence[float], sums: Sequence[float]
) -> tuple[float, float, list[float]]:
    """Scale and offset after a step, and the information that is remembered then.

    Information is relative to the mean weight of samples, so that a common factor of all weights changes nothing.
    """
    of_scale, of_offset, *new = sums
    unit = (known[3] + new[3]) / (known[2] + new[2])
    seen = min(known[4] + new[2] / unit, MAX_MEMORY / SHARE)
    memory = max(MEMORY, SHARE * seen) * unit
    kept = min(1.0, max(0.0, memory - new[2]) / known[2]) if known[2] > 0 else 0.0
    information = [*(old * kept + more for old, more in zip(known[:4], new, strict=True)), seen]
    both, pair, one = information[0] + DAMPING * unit, information[1], information[2] + DAMPING * unit
    determinant = both * one - pair * pair
    scale = before[0] - (one * of_scale - pair * of_offset) / determinant
    offset = before[1] - (both * of_offset - pair * of_scale) / determinant
    return min(max(scale, SCALES[0]), SCALES[1]), min(max(offset, OFFSETS[0]), OFFSETS[1]), information


@njit(nogil=True, cache=True)
def moments(logit_B, prediction_B, label_B, weight_B):  # type: ignore[no-untyped-def]
    """(K,) the sums of a batch. `logit_B` are the model's, `prediction_B` the calibrated probabilities (float32)."""
    of_scale = of_offset = both = pair = one = information_squared = weight = of_logit = of_square = squared = 0.0
    for b in range(len(logit_B)):
        w, z, p = np.float64(weight_B[b]), np.float64(logit_B[b]), np.float64(prediction_B[b])
        if w > 0:
            error, information = w * (p - np.float64(label_B[b])), w * p * (1 - p)
            of_scale += error * z
            of_offset += error
            both += information * z * z
            pair += information * z
            one += information
            information_squared += information * w
            weight += w
            of_logit += w * z
            of_square += w * z * z
            squared += w * w
    of_motion = weight, of_logit, of_square, squared
    return np.array([of_scale, of_offset, both, pair, one, information_squared, *of_motion])


def moments_reference(
    logits: Sequence[float], predictions: Sequence[float], labels: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """The plain twin of `moments`."""
    sums = [0.0] * SUMS
    for z, p, y, w in zip(logits, predictions, labels, weights, strict=True):
        if w > 0:
            v = w * p * (1 - p)
            new = w * (p - y) * z, w * (p - y), v * z * z, v * z, v, v * w, w, w * z, w * z * z, w * w
            sums = [a + b for a, b in zip(sums, new, strict=True)]
    return sums


def add_calibration(model: nn.Module, tasks: Sequence[str]) -> None:
    """Give a model the calibration of these tasks. Raises SpecError for a model that has something of that name."""
    if hasattr(model, NAME):
        raise SpecError(f"the model has an attribute {NAME!r}, as the trainer adds; rename it", "model")
    model.add_module(NAME, Calibration(tasks))
