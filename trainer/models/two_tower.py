"""Two perceptrons, one for the user and one for the item, which meet in the product of two vectors alone.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys 2019): beside the
loss of the first task, each positive sample is to find its item among those of the batch (softmax). An item is among
them as often as it comes in the stream, so the logarithm of its share is taken from its score. The paper estimates the
share by the steps between two occurrences; here it is a count that decays, in hashed counters. They are buffers of the
model, so commits hold them and a replay repeats them. Beyond the paper, first-order weights are added to the logit.

A batch has few items. With `cached` the items of the samples before it are candidates, too: their vectors as they were
then, which move slowly (Wang et al., "Cross-Batch Negative Sampling for Training Two-Tower Recommenders", SIGIR 2021).

Without the correction, the product learns how much likelier an item is for this user than for all: the logarithm of
P(item | user) / P(item). With `popularity` the logarithm of P(item), over the last positive samples, is added where
items are retrieved: the vectors have one more number each, whose product is the temperature times that logarithm. It
moves with every sample, and the towers need not learn it.

Shapes: as in trainer.models.layers; P positive samples, V length of the vectors of users and items, M cached items.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape, SlotAxes, Targets
from headrace.trainer.models.item_counts import NUM_ROWS, PART, counters_of, mixed
from headrace.trainer.models.layers import ChosenInput, FirstOrder, Mlp, by_task, tower_axes
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import TwoTowerSettings

FORGOTTEN = 1e-6


class Tower(nn.Module):
    """The vector of a user or an item, of length 1."""

    def __init__(self, whole: Shape, part: Shape, settings: TwoTowerSettings) -> None:
        super().__init__()
        self._inputs = ChosenInput(whole, part)
        deep = Mlp(self._inputs.width, settings.hidden, settings.dropout)
        self.net = nn.Sequential(deep, Linear(deep.width, settings.dim))

    def slot_axes(self, name: str) -> SlotAxes:
        """`name` of this module."""
        return tower_axes(f"{name}.net", self.net, self._inputs.axis)

    def forward(self, inputs: Inputs) -> Tensor:
        """(B, V)."""
        return functional.normalize(self.net(self._inputs(inputs)), dim=1)


class ItemFrequency(nn.Module):
    """The share of each item in the stream: hashed counters, in which older samples weigh less."""

    def __init__(self, num_buckets: int, memory: int) -> None:
        super().__init__()
        self._num_buckets, self._memory = num_buckets, memory
        self.register_buffer("count_K", torch.zeros(num_buckets))

    def buckets_of(self, sign_B: Tensor) -> Tensor:
        """(B,) the counters of items: a hash of all bits of their signs."""
        bucket_B: Tensor = mixed(sign_B) % self._num_buckets
        return bucket_B

    def log_share(self, sign_B: Tensor, *cached: Tensor, learn: bool) -> Tensor:
        """(B + M,) the logarithm of the share of the items of a batch, with it counted, and of those `cached`, (M,).

        `learn`: keep the count.
        """
        bucket_B = self.buckets_of(sign_B)
        count_K, num_samples = self.get_buffer("count_K"), len(sign_B)
        kept = max(0.0, 1 - num_samples / self._memory)
        new_K = count_K * kept + torch.bincount(bucket_B, minlength=self._num_buckets)
        if learn:
            count_K.copy_(new_K)
        buckets = torch.cat([bucket_B, *map(self.buckets_of, cached)])
        return torch.log(new_K[buckets] / new_K.sum())


class ItemPopularity(nn.Module):
    """How often each item came in the last positive samples: hashed counters, in which older samples weigh less."""

    def __init__(self, num_counters: int, memory: int) -> None:
        super().__init__()
        self._kept = 1 - 1 / memory
        self.register_buffer("count_DK", torch.zeros(NUM_ROWS, num_counters))

    def add(self, sign_P: Tensor) -> None:
        """Count the items of positive samples. Counts near 0 are forgotten: processors are slow with them."""
        count_DK = self.get_buffer("count_DK")
        num_counters = count_DK.shape[1]
        count_DK.mul_(self._kept ** len(sign_P))
        count_DK.masked_fill_(count_DK < FORGOTTEN, 0.0)
        for row, counter_P in enumerate(counters_of(sign_P, num_counters)):
            count_DK[row] += torch.bincount(counter_P, minlength=num_counters)


class ItemCache(nn.Module):
    """The last items of the stream, newest first: their vectors as they were, and their signs."""

    def __init__(self, num_items: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("vectors_MV", torch.zeros(num_items, dim))
        self.register_buffer("sign_M", torch.zeros(num_items, dtype=torch.int64))
        self.register_buffer("used_M", torch.zeros(num_items, dtype=torch.bool))

    def items(self) -> tuple[Tensor, Tensor]:
        """(M, V) vectors and (M,) signs of the items that are there."""
        used_M = self.get_buffer("used_M")
        return self.get_buffer("vectors_MV")[used_M], self.get_buffer("sign_M")[used_M]

    def add(self, item_BV: Tensor, sign_B: Tensor) -> None:
        """Keep the items of a batch; the oldest ones make room."""
        news = (item_BV.detach(), sign_B, torch.ones_like(sign_B, dtype=torch.bool))
        for name, new in zip(("vectors_MV", "sign_M", "used_M"), news, strict=True):
            kept = self.get_buffer(name)
            kept.copy_(torch.cat([new, kept])[: len(kept)])

    def forget(self, sign_N: Tensor) -> None:
        """Drop these items."""
        gone_M = torch.isin(self.get_buffer("sign_M"), sign_N)
        for name in ("vectors_MV", "sign_M", "used_M"):
            self.get_buffer(name)[gone_M] = 0


class TwoTower(nn.Module):
    """The product of a user's and an item's vector."""

    parameters_in_calls = True
    for_losses = served = ("user_vector", "item_vector")

    def __init__(self, shape: Shape, settings: TwoTowerSettings) -> None:
        super().__init__()
        user, item = settings.sides(shape)
        self._settings, self._tasks, self._item = settings, shape.tasks, settings.item[0]
        self.user, self.item = Tower(shape, user, settings), Tower(shape, item, settings)
        self.factor_T = nn.Parameter(torch.ones(len(shape.tasks)))
        self.bias_T = nn.Parameter(torch.zeros(len(shape.tasks)))
        self.first_order = FirstOrder(shape)
        corrected = settings.softmax and settings.correct_frequency and not settings.popularity
        self.frequency = ItemFrequency(settings.frequency_buckets, settings.frequency_memory) if corrected else None
        popularity, length = settings.popularity, settings.dim + bool(settings.popularity)
        self.popularity = ItemPopularity(settings.frequency_buckets, popularity) if popularity else None
        self.cache = ItemCache(settings.cached, length) if settings.cached else None

    def forget(self, signs: Mapping[str, Sequence[int]]) -> None:
        """Drop items from the cache."""
        if self.cache is not None and (found := signs.get(self._item)):
            device = self.cache.get_buffer("sign_M").device
            self.cache.forget(torch.from_numpy(np.array(found, np.uint64).view(np.int64)).to(device))

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        return {**self.user.slot_axes("user"), **self.item.slot_axes("item")}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task, and the vectors for `losses`."""
        user_BV, item_BV = self.user(inputs), self.item(inputs)
        product_B1 = (user_BV * item_BV).sum(1, keepdim=True) / self._settings.temperature
        logits_BT = self.first_order(inputs, product_B1 * self.factor_T + self.bias_T)
        if self.popularity is not None:
            weight = self._settings.temperature * self._settings.popularity_weight
            user_BV = functional.pad(user_BV, (0, 1), value=weight / PART)
            item_BV = functional.pad(item_BV, (0, 1))  # trainer.exports.item_tower writes it
        return by_task(logits_BT, self._tasks) | {"user_vector": user_BV, "item_vector": item_BV}

    def losses(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """The in-batch softmax of each positive sample of the first task (equations 2 to 5); 0 for the others."""
        if not self._settings.softmax:
            return {}
        sign_B, item_BV = targets.sign_B[self._item], outputs["item_vector"].float()
        vectors, signs = item_BV, sign_B
        if self.cache is not None:
            cached_MV, cached_M = self.cache.items()
            vectors, signs = torch.cat([item_BV, cached_MV]), torch.cat([sign_B, cached_M])
            if torch.is_grad_enabled():
                self.cache.add(item_BV, sign_B)
        scores = self._scores(outputs, vectors)
        if self.frequency is not None:
            cached = signs[len(sign_B) :]
            scores = scores - self.frequency.log_share(sign_B, cached, learn=torch.is_grad_enabled())
        lost_B = functional.cross_entropy(
            _without_twins(scores, sign_B, signs), torch.arange(len(sign_B), device=sign_B.device), reduction="none"
        )
        positive_B = targets.label_B[self._tasks[0]] > 0
        if self.popularity is not None and torch.is_grad_enabled():
            self.popularity.add(sign_B[positive_B])
        return {"in_batch_softmax": torch.where(positive_B, lost_B, 0.0) * self._settings.softmax}

    def measures(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """By name "recall_at_<k>", (P,): whether the item of a positive sample is among the k best of the batch."""
        sign_B, positive_B = targets.sign_B[self._item], targets.label_B[self._tasks[0]] > 0
        scores_BB = _without_twins(self._scores(outputs, outputs["item_vector"].float()), sign_B, sign_B)
        better_BB = (scores_BB > scores_BB.diagonal().unsqueeze(1)) & _first_of_each(sign_B)
        rank_P = better_BB.sum(1)[positive_B]
        return {f"recall_at_{k}": (rank_P < k).float() for k in self._settings.recall_at}

    def _scores(self, outputs: dict[str, Tensor], vectors: Tensor) -> Tensor:
        """(B, N): row b has the scores of the user of sample b with the items whose vectors are (N, V)."""
        return outputs["user_vector"].float() @ vectors.t() / self._settings.temperature


def _without_twins(scores: Tensor, sign_B: Tensor, signs: Tensor) -> Tensor:
    """The scores (B, N) without those of other places with the row's own item: they are no wrong answers.

    `signs`: (N,), those of the items; the first B are those of the batch.
    """
    same = sign_B.unsqueeze(1) == signs
    same.fill_diagonal_(False)
    return scores.masked_fill(same, torch.finfo(scores.dtype).min)


def _first_of_each(sign_B: Tensor) -> Tensor:
    """(B,) whether a sample is the first one of its item: one sample of each item is a candidate."""
    before_BB = (sign_B.unsqueeze(1) == sign_B).tril(-1)
    return ~before_BB.any(1)
