"""Layers that models share: concatenated inputs, first-order terms, perceptrons, task heads.

Shapes: B samples, F pooled slots, D length of a vector, L longest sequence, C dense values, W width of the stacked
input, H width of a trunk, T tasks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Axis, AxisPart, Inputs, SequenceInput, Shape, SlotAxes
from headrace.trainer.models.linear import KernelUser, Linear, linear


def mean_over_sequence(values_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Mean over the places that hold an id: (B, L, D), (B, L) -> (B, D); zeros for an empty sequence."""
    share_BL = mask_BL / mask_BL.sum(1, keepdim=True).clamp(min=1)
    return torch.bmm(share_BL.to(values_BLD.dtype).unsqueeze(1), values_BLD).squeeze(1)


def sequence_vector(sequence: SequenceInput) -> Tensor:
    """(B, D) the masked mean of a sequence."""
    return mean_over_sequence(sequence.vectors_BLD, sequence.mask_BL)


def dense_axis(shape: Shape) -> list[AxisPart]:
    """The places of the dense values, in the order of the spec."""
    return [AxisPart(f"dense {name}", size, frozenset({name})) for name, size in shape.dense]


def stacked_axis(shape: Shape) -> list[AxisPart]:
    """The places of all inputs side by side: pooled vectors, means of sequences, dense values."""
    vectors = [AxisPart(f"vector {slot.name}", slot.dim, frozenset({slot.name})) for slot in shape.pooled]
    means = [AxisPart(f"sequence {slot.name}", slot.dim, frozenset({slot.name})) for slot in shape.sequences]
    return [part for part in (*vectors, *means, *dense_axis(shape)) if part.size]


def deep_axis(width: int) -> list[AxisPart]:
    """The places of a hidden layer's output."""
    return [AxisPart("deep", width)]


class StackedInput:
    """All inputs concatenated: pooled vectors in the order of the spec, means of sequences, dense values."""

    def __init__(self, shape: Shape) -> None:
        self._pooled = [slot.name for slot in shape.pooled if slot.dim]
        self._sequences = [slot.name for slot in shape.sequences if slot.dim]
        self._has_dense = shape.dense_size > 0
        pooled = [sum(slot.dim for slot in shape.pooled)] if self._pooled else []
        dense = [shape.dense_size] if self._has_dense else []
        self.part_widths = [*pooled, *(slot.dim for slot in shape.sequences if slot.dim), *dense]
        self.width = sum(self.part_widths)
        self.axis = stacked_axis(shape)
        """Its places."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """(B, W), in one copy."""
        return _side_by_side(self.parts(inputs))

    def parts(self, inputs: Inputs) -> list[Tensor]:
        """The same in parts, for `Mlp.over`, without a copy if all vectors are stacked already."""
        parts: list[Tensor] = []
        if inputs.vectors_BFD is not None and self._pooled:
            parts.append(inputs.vectors_BFD.flatten(1))
        elif self._pooled:
            parts.append(_side_by_side([inputs.vectors[name] for name in self._pooled]))
        parts.extend(sequence_vector(inputs.sequences[name]) for name in self._sequences)
        if self._has_dense:
            parts.append(inputs.dense_BC)
        return parts


class ChosenInput:
    """Some of the inputs concatenated: pooled vectors, means of sequences, dense values, in the order of the spec."""

    def __init__(self, whole: Shape, part: Shape) -> None:
        """`part`: the slots, of those of `whole`."""
        self._pooled = [slot.name for slot in part.pooled if slot.dim]
        self._sequences = [slot.name for slot in part.sequences if slot.dim]
        chosen, begin = {name for name, _ in part.dense}, 0
        self._dense: list[tuple[int, int]] = []
        for name, size in whole.dense:
            if name in chosen:
                self._dense.append((begin, begin + size))
            begin += size
        self.width = sum(slot.dim for slot in part.pooled + part.sequences) + part.dense_size
        self.axis = stacked_axis(part)
        """Its places."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """(B, W)."""
        parts = [inputs.vectors[name] for name in self._pooled]
        parts += [sequence_vector(inputs.sequences[name]) for name in self._sequences]
        parts += [inputs.dense_BC[:, begin:end] for begin, end in self._dense]
        return _side_by_side(parts)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


class Fields:
    """All slots with vectors, of one length, for models with interactions: pooled slots, then means of sequences."""

    def __init__(self, shape: Shape) -> None:
        slots = [slot for slot in shape.pooled + shape.sequences if slot.dim]
        self._num_pooled = sum(slot.dim > 0 for slot in shape.pooled)
        self._sequences = [slot.name for slot in shape.sequences if slot.dim]
        self.names = [slot.name for slot in slots]
        """The slots, in order."""
        self.num_fields, self.dim = len(slots), slots[0].dim

    def __call__(self, inputs: Inputs) -> Tensor:
        """(B, fields, D)."""
        parts: list[Tensor] = []
        if self._num_pooled:
            assert inputs.vectors_BFD is not None, "the dims are equal"
            parts.append(inputs.vectors_BFD)
        parts.extend(sequence_vector(inputs.sequences[name]).unsqueeze(1) for name in self._sequences)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class TaskScale(nn.Module):
    """A term that all tasks share. With several tasks it is scaled by a learnt factor for each, 1 at first."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.scale_T = nn.Parameter(torch.ones(num_tasks)) if num_tasks > 1 else None

    def forward(self, term_B1: Tensor) -> Tensor:
        """(B, 1) -> (B, T)."""
        return term_B1 if self.scale_T is None else term_B1 * self.scale_T


class FirstOrder(nn.Module):
    """The sum of a sample's first-order weights; a sequence adds its mean. Nothing if no table has such weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._pooled = any(slot.first_order for slot in shape.pooled)
        self._sequences = [slot.name for slot in shape.sequences if slot.first_order]
        self.present = self._pooled or bool(self._sequences)
        self.scale = TaskScale(len(shape.tasks)) if self.present else None

    def forward(self, inputs: Inputs, logits_BT: Tensor) -> Tensor:
        """The logits with the term added."""
        if self.scale is None:
            return logits_BT
        terms = [inputs.first_order_BF.sum(1, keepdim=True)] if self._pooled else []
        for name in self._sequences:
            sequence = inputs.sequences[name]
            terms.append(mean_over_sequence(sequence.first_order_BL.unsqueeze(2), sequence.mask_BL))
        total_B1 = terms[0]
        for term_B1 in terms[1:]:
            total_B1 = total_B1 + term_B1
        term_BT: Tensor = self.scale(total_B1)
        return logits_BT + term_BT


class Wide(nn.Module, KernelUser):
    """The linear model: first-order weights, a linear map of the dense values (initially zeros), a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num_tasks = len(shape.tasks)
        self.first_order = FirstOrder(shape)
        self.bias_T = nn.Parameter(torch.zeros(num_tasks))
        self.dense_TC = nn.Parameter(torch.zeros(num_tasks, shape.dense_size)) if shape.dense_size else None
        self.sizes = [(shape.dense_size, num_tasks)] if shape.dense_size else []
        self._dense_axis = dense_axis(shape)

    def slot_axes(self, name: str) -> SlotAxes:
        """`name` of this module."""
        return {} if self.dense_TC is None else {f"{name}.dense_TC": (None, self._dense_axis)}

    def forward(self, inputs: Inputs) -> Tensor:
        """(B, T)."""
        if self.dense_TC is None:
            logits_BT = self.bias_T.expand(inputs.num_samples, -1)
        else:
            logits_BT = linear(inputs.dense_BC, self.dense_TC, self.bias_T, self.kernels)
        added_BT: Tensor = self.first_order(inputs, logits_BT)
        return added_BT


class Mlp(nn.Sequential):
    """Linear, ReLU, dropout for each width. Without layers, the output is the input."""

    def __init__(self, width: int, hidden: Sequence[int], dropout: float = 0.0, parts: Sequence[int] = ()) -> None:
        """`parts`: widths of the parts of the input, for `over`."""
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [Linear(width, size, parts=() if layers else parts), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = size
        super().__init__(*layers)
        self.width = width

    def slot_axes(self, name: str, axis: Axis) -> tuple[SlotAxes, Axis]:
        """`axis` of its input, and of its output. `name` of this module."""
        return ({f"{name}.0.weight": (None, axis)}, deep_axis(self.width)) if len(self) else ({}, axis)

    def forward(self, x: Tensor, begin: int = 0) -> Tensor:
        """(..., I) -> (..., O), from the layer number `begin` on."""
        for layer in list(self)[begin:]:
            x = layer(x)
        return x

    def blocks(self) -> list[nn.Module]:
        """Its layers, each with what follows up to the next one."""
        layers = list(self)
        begins = [at for at, each in enumerate(layers) if isinstance(each, Linear)]
        return [nn.Sequential(*layers[at:end]) for at, end in zip(begins, [*begins[1:], len(layers)], strict=True)]

    def over(self, parts: Sequence[Tensor]) -> Tensor:
        """The perceptron on parts of its input. The first layer is a sum over the parts, so they are not concatenated.

        This saves the copy, and the copy of its gradient that autograd would make.
        """
        if len(parts) == 1 or not len(self):
            output: Tensor = self(_side_by_side(parts))
            return output
        first = self[0]
        assert isinstance(first, Linear)
        return self.forward(first(*parts), 1)


def tower_axes(name: str, tower: nn.Sequential, axis: Axis) -> SlotAxes:
    """The places of `tower`, a perceptron and a linear layer, at `name`; `axis` of its input."""
    deep = tower[0]
    assert isinstance(deep, Mlp)
    first, after = deep.slot_axes(f"{name}.0", axis)
    return first or {f"{name}.1.weight": (None, after)}


class Heads(nn.Module):
    """From the shared trunk to one logit for each task: a linear map, or a tower of layers (Caruana 1997)."""

    def __init__(self, width: int, num_tasks: int, towers: Sequence[int] = (), dropout: float = 0.0) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [nn.Sequential(tower := Mlp(width, towers, dropout), Linear(tower.width, 1)) for _ in range(num_tasks)]
            if towers
            else [Linear(width, num_tasks)]
        )

    def slot_axes(self, name: str, axis: Axis) -> SlotAxes:
        """`axis` of its input. `name` of this module."""
        first = "weight" if isinstance(self.towers[0], Linear) else "0.0.weight"
        return {f"{name}.towers.{number}.{first}": (None, axis) for number in range(len(self.towers))}

    def forward(self, trunk_BH: Tensor) -> Tensor:
        """(B, H) -> (B, T)."""
        logits = [tower(trunk_BH) for tower in self.towers]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


def beside(axis: Axis, deep: Axis) -> list[AxisPart]:
    """The places of two outputs side by side; the second may have the same names."""
    return [*axis, *(replace(part, name=f"deep: {part.name}") for part in deep)]


def pairwise_sum(fields_BFD: Tensor) -> Tensor:
    """Sum of the inner products of all pairs of fields: (B, F, D) -> (B, 1).

    In linear time, as in Rendle, "Factorization Machines" (ICDM 2010), lemma 3.1.
    """
    total_BD = fields_BFD.sum(1)
    squares_B1 = (fields_BFD * fields_BFD).sum((1, 2)).unsqueeze(1)
    return 0.5 * ((total_BD * total_BD).sum(1, keepdim=True) - squares_B1)


def by_task(logits_BT: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
    """The return value of a model: (B,) under the name of each task."""
    return dict(zip(tasks, logits_BT.unbind(1), strict=True))
