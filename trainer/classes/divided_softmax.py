"""Softmax over classes that are divided over ranks: each rank scores the users of all ranks against its own classes.

Users and labels of all ranks are gathered; maxima, sums and scores of right classes are put together in rank order; the
gradients of users are summed and go back to their ranks. The gradient of a class is complete where the class is, so it
never travels. Partial FC (An et al., CVPR 2022) and Paddle's margin_cross_entropy divide it like this.

Scores are made in blocks of classes, and made again in the backward pass, so they need little memory. Every rank makes
the same collectives, also one without a batch (`follow`).

Shapes: B samples of this rank, T of all ranks, M the most of one, W ranks, V length of a vector, N classes of this
rank, K those of the step, R classes of a block, P samples whose class is in the block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.trainer.classes.class_draws import ClassDraws
from headrace.trainer.classes.class_rows import ClassRows
from headrace.trainer.classes.margins import Margins, cosines, scores
from headrace.trainer.collectives.ranks import Ranks

BLOCK = 8192
"""Classes that are scored at a time. Sums depend on it."""


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
    correction_K: Tensor | None
    """Added to the scores of drawn classes; None: nothing."""


class DividedSoftmax:
    """The softmax of one rank. A step: `lose`, then `learn` in its backward pass; or `follow`."""

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
        rows = self._rows
        user_TV, class_T, place_T, most, own = self._gathered(user_BV.detach(), class_B)
        rows.clear()
        correction_K = self._drawn(class_T)
        rows.step += 1
        cosine_T = self._cosine_of_targets(user_TV, class_T)
        target_T = self._margins.of_target(cosine_T)
        most_T = torch.full_like(target_T, torch.finfo(target_T.dtype).min)
        total_T, better_T = torch.zeros_like(target_T, dtype=torch.float64), torch.zeros_like(target_T)
        for low, row_RV, target in self._blocks(class_T):
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
        self._step = _Step(user_TV, class_T, place_T, most, own, log_sum_T, correction_K)
        return (log_sum_T - target_T)[own], better_T[own]

    def _gathered(self, user_BV: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor, Tensor, int, slice]:
        """Collective: vectors and classes of all ranks' samples, their places, M, and which are this rank's."""
        ranks, device = self._ranks, user_BV.device
        sizes_W = np.zeros(ranks.world, np.int64)
        sizes_W[ranks.rank] = len(class_B)
        sizes_W = ranks.sum(sizes_W)
        most = int(sizes_W.max())
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

    def _drawn(self, class_T: Tensor) -> Tensor | None:
        """Draw the classes of the step; what is added to their scores."""
        rows = self._rows
        if self._draws is None:
            return None
        own_T = (class_T >= rows.begin) & (class_T < rows.end)
        always = np.unique(class_T[own_T].cpu().numpy() - rows.begin)
        place_K, log_K = self._draws.of_step(rows.step, always)
        rows.place_K = torch.from_numpy(place_K).to(class_T.device)
        return torch.from_numpy(-log_K).to(class_T.device, torch.float32)

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

    def _blocks(self, class_T: Tensor) -> Iterator[tuple[int, Tensor, tuple[Tensor, Tensor]]]:
        """Blocks of the step's classes: the first one's place, (R, V) weights, and the samples of which they are right,
        with their columns."""
        rows, place_K = self._rows, self._rows.place_K
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
        """Collective: the gradient of the users, from that of the losses. That of the classes is then in the rows."""
        step, rows, self._step = self._step, self._rows, None
        assert step is not None, "after lose"
        padded_M = grad_B.new_zeros(step.most)
        padded_M[: len(grad_B)] = grad_B
        grad_T = _of_ranks(self._ranks, padded_M).view(-1)[step.place_T].unsqueeze(1)
        num = len(rows.weights_NV) if rows.place_K is None else len(rows.place_K)
        gradient_KV = torch.empty(num, rows.dim, device=grad_B.device)
        total_TV = torch.zeros_like(step.user_TV)
        for low, row_RV, target in self._blocks(step.class_T):
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
        rows.gradient_KV = gradient_KV
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
