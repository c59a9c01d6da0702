"""Learnt default rows: one row in each table for all keys without a row, learnt with the dense part.

Shards return a mark instead of weights for keys without a row (pserver.protocol.shards.absent): in a training batch for
keys that are not admitted, in a predicted batch for every key without a row. This module puts the default row in place
of the marks before pooling, and sums the gradients of the keys that read it. The row is a parameter of the dense
strategy, which sums its gradient over ranks, updates it and saves it. Shards drop those gradients, since they have no
row.

Shapes: U unique keys of a batch in one table, D weights of a row: the first-order weight, if any, then the vector.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.dataset.samples.batch import F32
from headrace.dataset.spec.schema import Schema
from headrace.kernel_cache import njit
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import ABSENT_BITS, Floats, absent
from headrace.trainer.device_copies import sent

PREFIX = "default_row."
"""Prefix before the table's name, in the names of dense tensors and in `headrace import --dense`."""

Readers = Mapping[str, NDArray[np.bool_]]
"""By table with a learnt default row: (U,) whether each key of a batch reads it."""


def widths_of(schema: Schema, tables: Mapping[str, TableSection]) -> dict[str, int]:
    """D of each table that slots use and whose default row is learnt, sorted by name."""
    used = {slot.sparse.table for slot in schema.sparse}
    return {
        name: table.num_weights for name, table in sorted(tables.items()) if name in used and table.learns_default_row
    }


def without_marks(rows_UD: F32, default_D: F32) -> tuple[F32, NDArray[np.bool_]]:
    """The rows with `default_D` in place of marked ones, and (U,) which ones were marked. Rows may be longer."""
    absent_U, rows_UD = absent(rows_UD), rows_UD.copy()
    rows_UD[absent_U, : len(default_D)] = default_D
    return rows_UD, absent_U


@njit(nogil=True, cache=True)
def sum_chosen(grads_UD, chosen_U, out_D):  # type: ignore[no-untyped-def]
    """Add the chosen rows in order, in double precision, and round once."""
    total_D = np.zeros(grads_UD.shape[1], np.float64)
    for u in range(len(chosen_U)):
        if chosen_U[u]:
            for d in range(grads_UD.shape[1]):
                total_D[d] += np.float64(grads_UD[u, d])
    for d in range(grads_UD.shape[1]):
        out_D[d] = np.float32(total_D[d])


def sum_chosen_reference(grads_UD: F32, chosen_U: NDArray[np.bool_], out_D: F32) -> None:
    """The twin of `sum_chosen`."""
    total_D = np.zeros(grads_UD.shape[1])
    for grad_D, chosen in zip(grads_UD, chosen_U, strict=True):
        if chosen:
            total_D = total_D + grad_D
    out_D[:] = total_D


def _without_marks(rows_UD: Floats, default_D: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    """As `without_marks`, wherever the rows are."""
    if isinstance(rows_UD, np.ndarray):
        return without_marks(rows_UD, default_D.cpu().numpy())
    assert isinstance(rows_UD, Tensor), "rows are an array or a tensor"
    absent_U = rows_UD.view(torch.int32)[:, :1] == int(ABSENT_BITS.view(np.int32))
    width = len(default_D)
    filled_UD = torch.where(absent_U, default_D, rows_UD[:, :width])
    return torch.cat([filled_UD, rows_UD[:, width:]], 1), absent_U[:, 0].cpu().numpy()


class DefaultRows:
    """The default rows of a job's tables. A table whose default row is zeros has none here, at no cost."""

    def __init__(self, widths: Mapping[str, int], device: torch.device) -> None:
        self._rows = {name: nn.Parameter(torch.zeros(width, device=device)) for name, width in widths.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The rows by their names in the dense part."""
        return {PREFIX + name: row for name, row in self._rows.items()}

    def filled(self, rows: Mapping[str, Floats]) -> tuple[Mapping[str, Floats], Readers]:
        """From pulled rows by table to rows as the model reads them; and which keys read a default row."""
        if not self._rows:
            return rows, {}
        found, readers = dict(rows), dict[str, NDArray[np.bool_]]()
        for name, row in self._rows.items():
            if name in rows:
                found[name], readers[name] = _without_marks(rows[name], row.detach())
        return found, readers

    def learn(self, table: str, grads_UD: F32, readers: Readers) -> None:
        """Add the gradients of a table's keys to that of its default row. Both still include the loss scale."""
        if table not in readers:
            return
        row, sum_D = self._rows[table], np.empty(grads_UD.shape[1], np.float32)
        sum_chosen(grads_UD, readers[table], sum_D)
        gradient = sent(sum_D, row.device)
        if row.grad is None:
            row.grad = gradient
        else:
            row.grad.add_(gradient)


def default_rows_of(tensors: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, F32]:
    """The rows by table, from the tensors of a dense strategy."""
    return {name: tensors[f"model.{PREFIX}{name}"].detach().cpu().numpy() for name in widths}
