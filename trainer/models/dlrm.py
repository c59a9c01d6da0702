"""Deep learning recommendation model: inner products of all pairs of vectors, including that of the dense part.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019,
arXiv:1906.00091). Beyond the paper, first-order weights are added to the logit where the tables have them.
"""

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import AxisPart, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Fields, FirstOrder, Heads, Mlp, by_task, dense_axis
from headrace.trainer.models.settings import DlrmSettings


class Dlrm(nn.Module):
    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: DlrmSettings) -> None:
        super().__init__()
        self._fields, self._tasks, self._dense_axis = Fields(shape), shape.tasks, dense_axis(shape)
        dim, num_fields = self._fields.dim, self._fields.num_fields
        self.bottom = Mlp(shape.dense_size, (*settings.bottom, dim), settings.dropout) if shape.dense_size else None
        num_fields += self.bottom is not None
        row_P, column_P = torch.tril_indices(num_fields, num_fields, offset=-1)
        self.register_buffer("pair_P", row_P * num_fields + column_P, persistent=False)
        num_dense = dim if self.bottom is not None else 0
        # A single field has no pair: it is used as it is.
        self._alone = num_fields == 1
        width = dim if self._alone else num_dense + len(row_P)
        self.top = Mlp(width, settings.hidden, settings.dropout)
        self.heads = Heads(self.top.width, len(shape.tasks), settings.towers, settings.dropout)
        self.first_order = FirstOrder(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        bottom = {} if self.bottom is None else self.bottom.slot_axes("bottom", self._dense_axis)[0]
        top, axis = self.top.slot_axes("top", self._input_axis())
        return {**bottom, **top, **self.heads.slot_axes("heads", axis)}

    def _input_axis(self) -> list[AxisPart]:
        """The places of the dense part's vector and of the products of all pairs; or of the only vector."""
        dense = frozenset[str]().union(*(part.slots for part in self._dense_axis))
        fields = [(f"slot {name}", frozenset({name})) for name in self._fields.names]
        fields = [("the dense part", dense), *fields] if self.bottom is not None else fields
        if self._alone:
            ((name, slots),) = fields
            return [AxisPart(f"{name} alone", self._fields.dim, slots)]
        vector = [] if self.bottom is None else [AxisPart("the dense part", self._fields.dim, dense)]
        pairs = [
            AxisPart(" and ".join(sorted((row, column))), 1, row_slots | column_slots)
            for number, (row, row_slots) in enumerate(fields)
            for column, column_slots in fields[:number]
        ]
        return [*vector, *pairs]

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        fields_BFD, parts = self._fields(inputs), []
        if self.bottom is not None:
            dense_BD = self.bottom(inputs.dense_BC)
            fields_BFD = torch.cat([dense_BD.unsqueeze(1), fields_BFD], 1)
            parts.append(dense_BD)
        if self._alone:
            parts.append(fields_BFD.squeeze(1))
        else:
            products_BFF = torch.bmm(fields_BFD, fields_BFD.transpose(1, 2))
            parts.append(products_BFF.flatten(1).index_select(1, self.get_buffer("pair_P")))
        return by_task(self.first_order(inputs, self.heads(self.top(torch.cat(parts, 1)))), self._tasks)
