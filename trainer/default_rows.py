"""Learnt default rows: one row a table for all keys that have none, learnt with the dense part.

Shards tell which keys have no row, by a mark in place of its weights (pserver.client.absent): in a training batch those
that are not admitted, in one that is only predicted every key without a row. Here the row takes the marks' place before
pooling, and the gradients of its readers are summed for it. It is a parameter of trainer.dense.DensePart, which sums it
over ranks, has it learn, and keeps it; shards drop the same gradients, as they are of no row of theirs.

Shapes: U unique keys of a batch in one table, D weights of a row: the first-order weight, if any, then the vector.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from dataset.batch import F32
from dataset.schema import Schema
from pserver.client import absent
from pserver.config import TableSection

PREFIX = "default_row."
"""Before a table's name: how the dense part's tensors and `millrace import --dense` name its row."""

Readers = Mapping[str, NDArray[np.bool_]]
"""By table with a learnt default row: (U,) which keys of a batch read it."""


def widths_of(schema: Schema, tables: Mapping[str, TableSection]) -> dict[str, int]:
    """D of each table that slots use and whose default row is learnt; in one order, however the spec has them."""
    used = {slot.sparse.table for slot in schema.sparse}
    return {
        name: int(table.first_order) + table.dim
        for name, table in sorted(tables.items())
        if name in used and table.learns_default_row
    }


def without_marks(rows_UD: F32, default_D: F32) -> tuple[F32, NDArray[np.bool_]]:
    """Rows with `default_D` where they are marked, and where that is."""
    absent_U = absent(rows_UD)
    return np.where(absent_U[:, None], default_D, rows_UD), absent_U


@njit(nogil=True, cache=True)
def sum_chosen(grads_UD, chosen_U, out_D):  # type: ignore[no-untyped-def]
    """Add the chosen rows in their order: in double precision, rounded once."""
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


class DefaultRows:
    """The rows of one job's tables; of tables whose default row is zeros there are none, and nothing is done."""

    def __init__(self, widths: Mapping[str, int], device: torch.device) -> None:
        self._rows = {name: nn.Parameter(torch.zeros(width, device=device)) for name, width in widths.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the dense part."""
        return {PREFIX + name: row for name, row in self._rows.items()}

    def filled(self, rows: Mapping[str, F32]) -> tuple[Mapping[str, F32], Readers]:
        """Rows as pulled, by table, to rows as a model reads them; and which keys read a default row."""
        if not self._rows:
            return rows, {}
        found, readers = dict(rows), dict[str, NDArray[np.bool_]]()
        for name, row in self._rows.items():
            if name in rows:
                found[name], readers[name] = without_marks(rows[name], row.detach().cpu().numpy())
        return found, readers

    def learn(self, table: str, grads_UD: F32, readers: Readers) -> None:
        """Add what a table's keys say to the gradient of its default row, times the loss scale as they are."""
        if table not in readers:
            return
        row, sum_D = self._rows[table], np.empty(grads_UD.shape[1], np.float32)
        sum_chosen(grads_UD, readers[table], sum_D)
        gradient = torch.from_numpy(sum_D).to(row.device)
        if row.grad is None:
            row.grad = gradient
        else:
            row.grad.add_(gradient)


def saved_rows(tensors: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, F32]:
    """The rows by table, out of the tensors of trainer.dense.DensePart.tensors."""
    return {name: tensors[f"model.{PREFIX}{name}"].detach().cpu().numpy() for name in widths}
