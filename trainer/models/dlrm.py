"""Deep learning recommendation model: inner products of all pairs of vectors, including that of the dense part.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019,
arXiv:1906.00091). Beyond the paper, first-order weights are added to the logit where the tables have them.
"""

import torch
from torch import Tensor, nn

from trainer.models.contract import Inputs, Shape
from trainer.models.layers import Fields, FirstOrder, Heads, Mlp, by_task
from trainer.models.settings import DlrmSettings


class Dlrm(nn.Module):
    """See module docstring."""

    Settings = DlrmSettings

    def __init__(self, shape: Shape, settings: DlrmSettings) -> None:
        super().__init__()
        self._fields, self._tasks = Fields(shape, "dlrm"), shape.tasks
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
