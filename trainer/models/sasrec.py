"""Self-attention over a sequence: the items before it say what each item means, the newest one speaks for the user.

Kang and McAuley, "Self-Attentive Sequential Recommendation" (ICDM 2018); with block = "hstu", the layer of Zhai et al.,
"Actions Speak Louder than Words" (ICML 2024), without its bias by relative position. Beyond the papers, which rank by
the product of user and item alone, a perceptron reads both vectors and all other slots, and first-order weights are
added where the tables have them.

Shapes: as in trainer.models.layers; N heads of attention, E length of a vector's part for one of them.
"""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.trainer.models.contract import AxisPart, Inputs, SequenceInput, Shape, SlotAxes
from headrace.trainer.models.layers import Heads, Mlp, StackedInput, TaskScale, Wide, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import SasrecSettings, without


class Positions(nn.Module):
    """Adds to each item a vector for its place, counted from the newest item."""

    def __init__(self, max_len: int, dim: int, *, newest_last: bool) -> None:
        super().__init__()
        self._newest_last = newest_last
        self.places_LD = nn.Parameter(0.02 * torch.randn(max_len, dim))
        self.register_buffer("order_L", torch.arange(max_len), persistent=False)

    def forward(self, items_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """(B, L, D); zeros where there is no item."""
        place_L = self.get_buffer("order_L")
        if self._newest_last:
            place_BL = (mask_BL.sum(1, keepdim=True) - 1 - place_L).clamp(min=0)
            items_BLD = items_BLD + functional.embedding(place_BL, self.places_LD)
        else:
            items_BLD = items_BLD + self.places_LD
        return items_BLD.masked_fill(~mask_BL.unsqueeze(2), 0.0)


def weighted_sum(query_BNLE: Tensor, key_BNLE: Tensor, value_BNLE: Tensor, allowed_B1LL: Tensor) -> Tensor:
    """Softmax attention: (B, N, L, E). Each place must be allowed at least one: itself."""
    scores_BNLL = query_BNLE @ key_BNLE.transpose(2, 3) / math.sqrt(query_BNLE.shape[3])
    scores_BNLL = scores_BNLL.masked_fill(~allowed_B1LL, torch.finfo(scores_BNLL.dtype).min)
    return torch.softmax(scores_BNLL, 3) @ value_BNLE


def pointwise_sum(query_BNLE: Tensor, key_BNLE: Tensor, value_BNLE: Tensor, allowed_B1LL: Tensor) -> Tensor:
    """Attention without softmax: (B, N, L, E). The layer normalises it, so it is not divided by the length."""
    scores_BNLL = functional.silu(query_BNLE @ key_BNLE.transpose(2, 3) / math.sqrt(query_BNLE.shape[3]))
    return scores_BNLL.masked_fill(~allowed_B1LL, 0.0) @ value_BNLE


class _Heads(nn.Module):
    """Cuts vectors into heads, and joins them again."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads

    def cut(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, N, L, E)."""
        return torch.stack(x_BLD.chunk(self._num_heads, 2), 1)

    def joined(self, x_BNLE: Tensor) -> Tensor:
        """The inverse of `cut`."""
        return torch.cat(x_BNLE.unbind(1), 2)


class SasrecBlock(_Heads):
    """Softmax attention, then a perceptron at each place; both normalised before and added (section III B)."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__(num_heads)
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projections, self.output = Linear(dim, 3 * dim), Linear(dim, dim)
        self.perceptron = nn.Sequential(Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, allowed_B1LL: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        projected = self.projections(self.attention_norm(x_BLD)).chunk(3, 2)
        query, key, value = (self.cut(each) for each in projected)
        attended_BNLE = weighted_sum(query, key, value, allowed_B1LL)
        x_BLD = x_BLD + self.dropout(self.output(self.joined(attended_BNLE)))
        learnt_BLD: Tensor = self.dropout(self.perceptron(self.perceptron_norm(x_BLD)))
        return x_BLD + learnt_BLD


class HstuBlock(_Heads):
    """Attention by SiLU of the products, normalised and gated by the item itself (equations 1 to 3)."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__(num_heads)
        self.input_norm, self.sum_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projections, self.output = Linear(dim, 4 * dim), Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, allowed_B1LL: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        gate_BLD, *projected = functional.silu(self.projections(self.input_norm(x_BLD))).chunk(4, 2)
        query, key, value = (self.cut(each) for each in projected)
        attended_BNLE = pointwise_sum(query, key, value, allowed_B1LL)
        learnt_BLD: Tensor = self.dropout(self.output(self.sum_norm(self.joined(attended_BNLE)) * gate_BLD))
        return x_BLD + learnt_BLD


class SequenceEncoder(nn.Module):
    """The vector of a user, from a sequence: what the blocks make of its newest item. Zeros for an empty sequence."""

    def __init__(self, max_len: int, dim: int, settings: SasrecSettings) -> None:
        super().__init__()
        newest_last, block = settings.newest == "last", SasrecBlock if settings.block == "sasrec" else HstuBlock
        self.positions = Positions(max_len, dim, newest_last=newest_last)
        self.blocks = nn.ModuleList(
            block(dim, settings.attention_heads, settings.dropout) for _ in range(settings.blocks)
        )
        self.norm = nn.LayerNorm(dim)
        past_LL = torch.ones(max_len, max_len).tril() if newest_last else torch.ones(max_len, max_len).triu()
        self.register_buffer("past_LL", past_LL.bool(), persistent=False)
        self.register_buffer("self_LL", torch.eye(max_len).bool(), persistent=False)
        self._newest_last = newest_last

    def forward(self, sequence: SequenceInput) -> Tensor:
        """(B, D)."""
        mask_BL = sequence.mask_BL
        # A place without an item sees itself, so that no softmax is empty; no item sees it.
        allowed_BLL = (self.get_buffer("past_LL") & mask_BL.unsqueeze(1)) | self.get_buffer("self_LL")
        x_BLD = self.positions(sequence.vectors_BLD, mask_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, allowed_BLL.unsqueeze(1))
        picked_BL = mask_BL & ~self._newer_exists(mask_BL)
        return torch.bmm(picked_BL.to(x_BLD.dtype).unsqueeze(1), self.norm(x_BLD)).squeeze(1)

    def _newer_exists(self, mask_BL: Tensor) -> Tensor:
        """(B, L) whether a neighbour of this place holds a newer item."""
        none_B1 = torch.zeros_like(mask_BL[:, :1])
        parts = [mask_BL[:, 1:], none_B1] if self._newest_last else [none_B1, mask_BL[:, :-1]]
        return torch.cat(parts, 1)


class Sasrec(nn.Module):
    """SASRec: attention over a sequence, from left to right."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: SasrecSettings) -> None:
        super().__init__()
        target, sequence = settings.slots(shape)
        self._target, self._sequence, self._tasks = target.name, sequence.name, shape.tasks
        self._others = StackedInput(without(shape, [sequence]))
        self.encoder = SequenceEncoder(sequence.max_len, sequence.dim, settings)
        self.deep = Mlp(self._others.width + 2 * sequence.dim, settings.hidden, settings.dropout)
        self.heads = Heads(self.deep.width, len(shape.tasks), settings.towers, settings.dropout)
        self.product = TaskScale(len(shape.tasks))
        self.wide = Wide(shape)

    def slot_axes(self) -> SlotAxes:
        """The blocks stay with their sequence, and with the target that it is compared with."""
        user, both = frozenset({self._sequence}), frozenset({self._sequence, self._target})
        dim = self.encoder.positions.places_LD.shape[1]
        products = AxisPart(f"products {self._sequence} and {self._target}", dim, both)
        axis = [*self._others.axis, AxisPart(f"user {self._sequence}", dim, user), products]
        first, deep = self.deep.slot_axes("deep", axis)
        places = {"encoder.positions.places_LD": (None, [AxisPart(f"items {self._sequence}", dim, user)])}
        return {**places, **first, **self.heads.slot_axes("heads", deep), **self.wide.slot_axes("wide")}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        target_BD, user_BD = inputs.vectors[self._target], self.encoder(inputs.sequences[self._sequence])
        products_BD = user_BD * target_BD
        trunk_BH = self.deep(torch.cat([*self._others.parts(inputs), user_BD, products_BD], 1))
        product_BT = self.product(products_BD.sum(1, keepdim=True))
        return by_task(self.heads(trunk_BH) + self.wide(inputs) + product_BT, self._tasks)
