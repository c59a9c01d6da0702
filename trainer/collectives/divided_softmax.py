"""Softmax over classes that are divided over ranks: each rank scores the users of all ranks against its own classes.

Users and labels of all ranks are gathered; maxima, sums and scores of right classes are put together in rank order; the
gradients of users are summed and go back to their ranks. The gradient of a class is complete where the class is, so it
never travels. Partial FC (An et al., CVPR 2022) and Paddle's margin_cross_entropy divide it like this.

Scores are made in blocks of classes, and made again in the backward pass, so they need little memory. Every rank makes
the same collectives, also one without a batch (`follow`).

Scores are scaled cosines, with a margin for the class that is right: it scores scale * (cos(m1 * angle + m2) - m3).
SphereFace (Liu et al., CVPR 2017) has m1, ArcFace (Deng et al., CVPR 2019) m2, CosFace (Wang et al., CVPR 2018) m3.

A step may draw classes: each by itself, by a hash of seed, step and class, so that no rank asks another. A class j is
drawn with a known probability q_j, so 1 / q_j corrects for how often it is drawn: the sum over the drawn classes of
exp(score) / q_j is right on average (Horvitz and Thompson 1952). The sum over all is reached where every q_j is 1.

Shapes: B samples of this rank, T of all ranks, M the most of one, W ranks, V length of a vector, N classes of this
rank, K those of the step, R classes of a block, P samples whose class is in the block.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, mix_reference
from headrace.seeds import derive
from headrace.trainer.collectives.ranks import Ranks

BLOCK = 8192
"""Classes that are scored at a time. Sums depend on it."""
SLICE_CLASSES = 16
"""Slices are a multiple of so many classes, but for the last one."""
DRAWN = 1024
"""Classes whose initial weights come from one seed."""
ALMOST_ONE = 1 - 1e-6
"""Cosines of larger size have no gradient through the angle, which would be infinite at 1."""
UNIT = 2.0**-53
"""The 53 high bits of a hash times this are from 0 to 1."""
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Sampler = Literal["uniform", "log_uniform"]


@dataclass(frozen=True, slots=True)
class Margins:
    """Scale and margins of the scores."""

    scale: float
    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    def of_target(self, cosine: Tensor) -> Tensor:
        """The scores of right classes by their cosines."""
        if self.m1 != 1 or self.m2:
            cosine = torch.cos(self.m1 * torch.acos(cosine.clamp(-ALMOST_ONE, ALMOST_ONE)) + self.m2)
        return self.scale * (cosine - self.m3)


def cosines(user_TV: Tensor, row_NV: Tensor) -> Tensor:
    """(T, N) cosines of vectors of length 1 with rows of any length."""
    return user_TV @ functional.normalize(row_NV, dim=1).t()


def scores(user_TV: Tensor, row_NV: Tensor, target: tuple[Tensor, Tensor], margins: Margins) -> Tensor:
    """(T, N) scores. `target`: (P,) samples and (P,) the columns of their classes."""
    cosine_TN = cosines(user_TV, row_NV)
    return (margins.scale * cosine_TN).index_put(target, margins.of_target(cosine_TN[target]))


def slice_of(num_classes: int, rank: int, world: int) -> tuple[int, int]:
    """The first class of a rank, and one past its last one."""
    size = -(-num_classes // (world * SLICE_CLASSES)) * SLICE_CLASSES
    return min(num_classes, rank * size), min(num_classes, (rank + 1) * size)


def initial_rows(seed: int, dim: int, begin: int, end: int) -> Tensor:
    """(N, V) the initial weights of the classes `begin` to `end`: normal, about 1 long."""
    rows_NV = torch.empty(end - begin, dim)
    for first in range(begin - begin % DRAWN, end, DRAWN):
        generator = torch.Generator().manual_seed(derive(seed, "classes", first))
        drawn = torch.randn(DRAWN, dim, generator=generator) / math.sqrt(dim)
        low, high = max(first, begin), min(first + DRAWN, end)
        rows_NV[low - begin : high - begin] = drawn[low - first : high - first]
    return rows_NV


class ClassRows:
    """The weights of the slice of one rank, with their gradients.

    Slices are of neighbouring classes, and equal, but for the last ones: rank r has those from r * size on. Initial
    weights are a function of seed and class alone, so they do not depend on the number of ranks. The softmax adds to
    the gradient, and the dense strategy learns from it and clears it.
    """

    def __init__(self, num_classes: int, dim: int, rank: int, world: int, seed: int, device: torch.device) -> None:
        self.num_classes, self.dim = num_classes, dim
        self.begin, self.end = slice_of(num_classes, rank, world)
        self.weights_NV = initial_rows(seed, dim, self.begin, self.end).to(device)
        self.place_K: Tensor | None = None
        """The classes with a gradient, from 0 in the slice; None: all."""
        self.gradient_KV: Tensor | None = None
        """None: there was no loss in the step."""
        self.step = 0
        """Number of losses of the job, from which draws follow: one a step, or one a micro-batch."""

    def clear(self) -> None:
        """Drop the gradient of the step."""
        self.place_K, self.gradient_KV = None, None

    def add(self, place_K: Tensor | None, gradient_KV: Tensor) -> None:
        """Add a gradient to that of the step; `place_K` as in the field, and always given or never."""
        if self.gradient_KV is None:
            self.place_K, self.gradient_KV = place_K, gradient_KV
        elif place_K is None or self.place_K is None:
            self.gradient_KV += gradient_KV
        else:
            both_K = torch.unique(torch.cat([self.place_K, place_K]))
            sum_KV = gradient_KV.new_zeros(len(both_K), self.dim)
            sum_KV[torch.searchsorted(both_K, self.place_K)] = self.gradient_KV
            sum_KV[torch.searchsorted(both_K, place_K)] += gradient_KV
            self.place_K, self.gradient_KV = both_K, sum_KV


def probabilities(sampler: Sampler, num_drawn: int, num_classes: int, begin: int, end: int) -> F64:
    """(N,) the probability of each of the classes `begin` to `end`, so that about `num_drawn` of all are drawn.

    "log_uniform" draws class j in proportion to log((j + 2) / (j + 1)): for classes numbered from the most common one.
    """
    if sampler == "uniform":
        return np.full(end - begin, min(1.0, num_drawn / num_classes))
    class_N = np.arange(begin, end, dtype=np.float64)
    share_N: F64 = np.log1p(1 / (class_N + 1)) / np.log1p(num_classes)
    return np.minimum(1.0, num_drawn * share_N)


class ClassDraws:
    """The draws of one rank's classes."""

    def __init__(self, probability_N: F64, begin: int, seed: int) -> None:
        """`begin`: number of the first class."""
        self._probability_N, self._begin, self._seed = probability_N, begin, seed
        self._drawn_N = np.zeros(len(probability_N), np.bool_)

    def of_step(self, step: int, always_P: I64) -> tuple[I64, F64]:
        """(K,) the classes of a step, from 0 in this rank's, ascending; and (K,) the logarithms of their probabilities.

        `always_P`: classes that are among them in any case, with probability 1.
        """
        draw(np.uint64(derive(self._seed, "classes", step)), self._begin, self._probability_N, self._drawn_N)
        self._drawn_N[always_P] = True
        place_K = np.flatnonzero(self._drawn_N)
        log_K = np.log(self._probability_N[place_K])
        log_K[np.searchsorted(place_K, always_P)] = 0.0
        return place_K, log_K


@njit(nogil=True, cache=True)
def draw(seed, begin, probability_N, drawn_N):  # type: ignore[no-untyped-def]
    """Write which of the classes from `begin` on are drawn."""
    for n in range(len(probability_N)):
        hashed = mix(seed + np.uint64(begin + n + 1) * np.uint64(GOLDEN))
        drawn_N[n] = np.float64(hashed >> np.uint64(11)) * UNIT < probability_N[n]


def draw_reference(seed: int, begin: int, probability_N: F64) -> list[bool]:
    """The plain twin of `draw`."""
    hash_of: Callable[[int], int] = lambda number: mix_reference((seed + (number + 1) * GOLDEN) & MASK)  # noqa: E731
    return [(hash_of(begin + n) >> 11) * UNIT < share for n, share in enumerate(probability_N.tolist())]


@dataclass(frozen=True, slots=True)
class _Step:
    """The samples of all ranks in a step."""

    user_TV: Tensor
    class_T: Tensor
    place_T: Tensor
    """Places of the samples among W * M."""
    most: int
    """M."""
    own: slice
    """The samples of this rank among T."""
    log_sum_T: Tensor
    place_K: Tensor | None
    """The classes of the step, from 0 in the slice; None: all."""
    correction_K: Tensor | None
    """Added to the scores of drawn classes; None: nothing."""


class DividedSoftmax:
    """The softmax of one rank. A step: `lose`, then `learn` in its backward pass; or `follow`.

    Gradients of several steps are summed in the rows until these are cleared.
    """

    def __init__(
        self, rows: ClassRows, margins: Margins, ranks: Ranks, draws: ClassDraws | None = None, *, ranks_of_labels: bool
    ) -> None:
        """`draws`: only these classes are scored, and those of the batch. `ranks_of_labels`: count better classes."""
        self._rows, self._margins, self._ranks, self._draws = rows, margins, ranks, draws
        self._counts = ranks_of_labels
        self._step: _Step | None = None

    def __call__(self, user_BV: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor]:
        """Collective. (B,) losses with a gradient, and (B,) how many classes have a higher cosine than the right one.

        `user_BV`: vectors of length 1.
        """
        lost_B, better_B = _Lost.apply(user_BV, class_B, self)
        return lost_B, better_B

    def follow(self) -> None:
        """Collective: take part in a step, forward and backward, without a batch."""
        device = self._rows.weights_NV.device
        self.lose(torch.zeros(0, self._rows.dim, device=device), torch.zeros(0, dtype=torch.int64, device=device))
        self.learn(torch.zeros(0, device=device))

    # -- forward

    def lose(self, user_BV: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: losses and counts of this rank's samples."""
        rows, sizes_W = self._rows, self._sizes(len(class_B))
        if not sizes_W.any():
            self._step = None
            return user_BV.new_zeros(0), user_BV.new_zeros(0)
        user_TV, class_T, place_T, most, own = self._gathered(user_BV.detach(), class_B, sizes_W)
        place_K, correction_K = self._drawn(class_T)
        rows.step += 1
        cosine_T = self._cosine_of_targets(user_TV, class_T)
        target_T = self._margins.of_target(cosine_T)
        most_T = torch.full_like(target_T, torch.finfo(target_T.dtype).min)
        total_T, better_T = torch.zeros_like(target_T, dtype=torch.float64), torch.zeros_like(target_T)
        for low, row_RV, target in self._blocks(class_T, place_K):
            cosine_TR = cosines(user_TV, row_RV)
            score_TR = cosine_TR * self._margins.scale
            if self._counts:
                cosine_TR[target] = -2.0
                better_T += (cosine_TR > cosine_T.unsqueeze(1)).sum(1)
            score_TR[target] = target_T[target[0]]
            if correction_K is not None:
                score_TR += correction_K[low : low + len(row_RV)]
            new_T = torch.maximum(most_T, score_TR.amax(1))
            total_T = total_T * (most_T - new_T).double().exp() + (score_TR - new_T.unsqueeze(1)).exp_().sum(1)
            most_T = new_T
        log_sum_T, better_T = self._together(most_T, total_T, better_T)
        self._step = _Step(user_TV, class_T, place_T, most, own, log_sum_T, place_K, correction_K)
        return (log_sum_T - target_T)[own], better_T[own]

    def _sizes(self, num_samples: int) -> I64:
        """Collective: (W,) the samples of each rank."""
        sizes_W = np.zeros(self._ranks.world, np.int64)
        sizes_W[self._ranks.rank] = num_samples
        return self._ranks.sum(sizes_W)

    def _gathered(self, user_BV: Tensor, class_B: Tensor, sizes_W: I64) -> tuple[Tensor, Tensor, Tensor, int, slice]:
        """Collective: vectors and classes of all ranks' samples, their places, M, and which are this rank's."""
        ranks, device, most = self._ranks, user_BV.device, int(sizes_W.max())
        class_WM = np.zeros((ranks.world, most), np.int64)
        class_WM[ranks.rank, : len(class_B)] = class_B.cpu().numpy()
        class_WM = ranks.sum(class_WM)
        place_T = torch.from_numpy(np.flatnonzero(np.arange(most) < sizes_W[:, None])).to(device)
        padded = user_BV.new_zeros(most, user_BV.shape[1])
        padded[: len(user_BV)] = user_BV
        user_TV = _of_ranks(ranks, padded).view(-1, user_BV.shape[1])[place_T]
        begin = int(sizes_W[: ranks.rank].sum())
        class_T = torch.from_numpy(class_WM.reshape(-1)).to(device)[place_T]
        return user_TV, class_T, place_T, most, slice(begin, begin + len(class_B))

    def _drawn(self, class_T: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Draw the classes of the step: (K,) which they are, and what is added to their scores."""
        rows = self._rows
        if self._draws is None:
            return None, None
        own_T = (class_T >= rows.begin) & (class_T < rows.end)
        always = np.unique(class_T[own_T].cpu().numpy() - rows.begin)
        place_K, log_K = self._draws.of_step(rows.step, always)
        device = class_T.device
        return torch.from_numpy(place_K).to(device), torch.from_numpy(-log_K).to(device, torch.float32)

    def _cosine_of_targets(self, user_TV: Tensor, class_T: Tensor) -> Tensor:
        """Collective: (T,) cosines of the samples with their own classes."""
        rows = self._rows
        own_P = torch.nonzero((class_T >= rows.begin) & (class_T < rows.end)).squeeze(1)
        row_PV = rows.weights_NV[class_T[own_P] - rows.begin]
        cosine_T = user_TV.new_zeros(len(user_TV))
        cosine_T[own_P] = (user_TV[own_P] * torch.nn.functional.normalize(row_PV, dim=1)).sum(1)
        return _of_ranks(self._ranks, cosine_T).sum(0)  # all but one are 0

    def _together(self, most_T: Tensor, total_T: Tensor, better_T: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: (T,) logarithms of the sums over all classes, and better classes of all ranks."""
        figures = torch.stack([most_T, total_T.float(), better_T])
        heard_W3T = _of_ranks(self._ranks, figures).double()
        most_T = heard_W3T[:, 0].amax(0)
        sum_T = torch.zeros_like(most_T)
        for rank_3T in heard_W3T:
            sum_T += rank_3T[1] * (rank_3T[0] - most_T).exp()
        return (most_T + sum_T.log()).float(), heard_W3T[:, 2].sum(0).float()

    def _blocks(self, class_T: Tensor, place_K: Tensor | None) -> Iterator[tuple[int, Tensor, tuple[Tensor, Tensor]]]:
        """Blocks of the step's classes: the first one's place, (R, V) weights, and the samples of which they are right,
        with their columns."""
        rows = self._rows
        of_step_T = class_T - rows.begin
        if place_K is not None:
            found_T = torch.searchsorted(place_K, of_step_T).clamp(max=max(0, len(place_K) - 1))
            is_own_T = (of_step_T >= 0) & (of_step_T < rows.end - rows.begin)
            of_step_T = torch.where(is_own_T, found_T, -1)
        num = len(rows.weights_NV) if place_K is None else len(place_K)
        for low in range(0, num, BLOCK):
            high = min(low + BLOCK, num)
            row_RV = rows.weights_NV[low:high] if place_K is None else rows.weights_NV[place_K[low:high]]
            sample_P = torch.nonzero((of_step_T >= low) & (of_step_T < high)).squeeze(1)
            yield low, row_RV, (sample_P, of_step_T[sample_P] - low)

    # -- backward

    def learn(self, grad_B: Tensor) -> Tensor:
        """Collective: the gradient of the users, from that of the losses. That of the classes is added to the rows."""
        step, rows, self._step = self._step, self._rows, None
        if step is None:  # no rank had samples
            return grad_B.new_zeros(0, rows.dim)
        padded_M = grad_B.new_zeros(step.most)
        padded_M[: len(grad_B)] = grad_B
        grad_T = _of_ranks(self._ranks, padded_M).view(-1)[step.place_T].unsqueeze(1)
        num = len(rows.weights_NV) if step.place_K is None else len(step.place_K)
        gradient_KV = torch.empty(num, rows.dim, device=grad_B.device)
        total_TV = torch.zeros_like(step.user_TV)
        for low, row_RV, target in self._blocks(step.class_T, step.place_K):
            user_TV, row_RV = step.user_TV.requires_grad_(), row_RV.detach().requires_grad_()
            with torch.enable_grad():
                score_TR = scores(user_TV, row_RV, target, self._margins)
            wanted_TR = score_TR.detach()
            if step.correction_K is not None:
                wanted_TR = wanted_TR + step.correction_K[low : low + len(row_RV)]
            wanted_TR = (wanted_TR - step.log_sum_T.unsqueeze(1)).exp_()
            wanted_TR[target] -= 1
            of_user_TV, of_row_RV = torch.autograd.grad(score_TR, (user_TV, row_RV), wanted_TR.mul_(grad_T))
            gradient_KV[low : low + len(row_RV)] = of_row_RV
            total_TV += of_user_TV
        rows.add(step.place_K, gradient_KV)
        return self._own_sum(total_TV, step)

    def _own_sum(self, total_TV: Tensor, step: _Step) -> Tensor:
        """Collective: the sum over ranks of the gradients of this rank's samples."""
        ranks = self._ranks
        flat = total_TV.new_zeros(ranks.world * step.most, self._rows.dim)
        flat[step.place_T] = total_TV
        flat = flat.view(-1)
        ranks.reduce_scatter(flat, ranks.world)()
        return flat.view(ranks.world, step.most, -1)[ranks.rank, : step.own.stop - step.own.start]


class _Lost(torch.autograd.Function):
    """`lose` and `learn` for autograd."""

    @staticmethod
    def forward(ctx: Any, user_BV: Tensor, class_B: Tensor, softmax: DividedSoftmax) -> tuple[Tensor, Tensor]:
        """(B,) losses and counts."""
        ctx.softmax = softmax
        lost_B, better_B = softmax.lose(user_BV, class_B)
        ctx.mark_non_differentiable(better_B)
        return lost_B, better_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor, _better: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the users."""
        return ctx.softmax.learn(grad_B), None, None


def _of_ranks(ranks: Ranks, mine: Tensor) -> Tensor:
    """Collective: (W, ...) a tensor of each rank, all of one shape."""
    flat = mine.new_zeros(ranks.world * mine.numel())
    flat.view(ranks.world, -1)[ranks.rank] = mine.reshape(-1)
    if flat.numel():
        ranks.all_gather_of_ranks(flat)()
    return flat.view(ranks.world, *mine.shape)
