"""From rows of keys to cells of a model, and from gradients of cells back to gradients of keys.

Numba kernels do this on the CPU, torch operations on a GPU, with equal results up to rounding. Where rows are on the
device (`train.rows`), torch operations do it in the order of the kernels, and gradients stay there.

Shapes: as in trainer.features.lookup_kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.dataset.samples.batch import F32
from headrace.pserver.protocol.shards import Floats, Gradients
from headrace.pserver.rows.placed_rows import PlacedGradients
from headrace.trainer.device_copies import DeviceCopies, Later, sent
from headrace.trainer.features import lookup_kernels
from headrace.trainer.features.deduplication import TableLookup
from headrace.trainer.features.default_rows import DefaultRows, Readers
from headrace.trainer.features.training_batches import TrainingBatch

NO_CELLS, NO_SCALES = np.empty(0, np.int32), np.empty(0, np.float32)
"""Of a lookup whose occurrence n has cell n."""


Finite = bool | Later
"""Whether sums are finite: where they are on a device, the host hears of it later."""


class Pooling(Protocol):
    """Rows to cells and back, on one device."""

    def arrays(self, look: TableLookup) -> Sequence[NDArray[Any]]:
        """Those of a lookup that it reads on the device; not those of a part."""
        ...

    def cells(self, look: TableLookup, rows_UD: Floats) -> Tensor:
        """(C, D) cells of the first D floats of rows: a leaf tensor whose gradient autograd fills."""
        ...

    def gradients(self, look: TableLookup, leaf: Tensor) -> tuple[Floats, Finite]:
        """(U, D) gradients summed by key, and whether all are finite."""
        ...

    def zeros(self, look: TableLookup) -> Floats:
        """(U, D) sums of gradients before the first micro-batch."""
        ...

    def add_gradients(self, look: TableLookup, leaf: Tensor, sums_UD: Floats) -> Finite:
        """Add those of a micro-batch to (U, D) sums, in the order of occurrences. Returns whether all are finite."""
        ...


class _HostSums:
    """Sums of gradients in arrays."""

    def zeros(self, look: TableLookup) -> F32:
        return np.zeros((len(look.keys.keys_U), look.table.width), np.float32)


class KernelPooling(_HostSums):
    """Pooling by Numba kernels, on ranges of rows in a few threads. The number of threads does not change results."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pooling")

    def arrays(self, look: TableLookup) -> tuple[()]:
        return ()

    def cells(self, look: TableLookup, rows_UD: Floats) -> Tensor:
        rows_UD = _array(rows_UD)
        shape = (look.num_cells, look.table.width)
        if look.cell_N is None:
            leaf = torch.empty(shape)
            array_CD = leaf.numpy()
            self._ranges(shape[0], lambda a, b: lookup_kernels.expand(rows_UD, look.inverse_N, a, b, array_CD))
        else:
            leaf = torch.zeros(shape)
            array_CD = leaf.numpy()
            lookup_kernels.pool(rows_UD, look.inverse_N, look.cell_N, look.scale_N, 0, len(look.inverse_N), array_CD)
        return leaf.requires_grad_()

    def gradients(self, look: TableLookup, leaf: Tensor) -> tuple[F32, bool]:
        num_unique = len(look.keys.keys_U)
        shape = (num_unique, look.table.width)
        if leaf.grad is None:  # the model did not use this table
            return np.zeros(shape, np.float32), True
        grads_UD = np.empty(shape, np.float32)
        grad_CD = leaf.grad.contiguous().numpy()
        if look.cell_N is None:
            finite = self._ranges(
                num_unique, lambda a, b: lookup_kernels.sum_single(grad_CD, look.order_N, look.start_U1, a, b, grads_UD)
            )
        else:
            cell_N, scale_N = look.cell_N, look.scale_N
            finite = self._ranges(
                num_unique,
                lambda a, b: lookup_kernels.sum_pooled(
                    grad_CD, look.order_N, look.start_U1, cell_N, scale_N, a, b, grads_UD
                ),
            )
        return grads_UD, all(finite)

    def add_gradients(self, look: TableLookup, leaf: Tensor, sums_UD: Floats) -> bool:
        if leaf.grad is None:
            return True
        cell_N = NO_CELLS if look.cell_N is None else look.cell_N
        scale_N = NO_SCALES if look.scale_N is None else look.scale_N
        grad_CD = leaf.grad.contiguous().numpy()
        return bool(lookup_kernels.add_cells(grad_CD, look.inverse_N, cell_N, scale_N, _array(sums_UD)))

    def _ranges(self, total: int, work: Callable[[int, int], bool]) -> list[bool]:
        if self._num_threads == 1 or total < 4096:
            return [work(0, total)]
        bounds = np.linspace(0, total, self._num_threads + 1).astype(np.int64)
        futures = [self._pool.submit(work, int(a), int(b)) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
        return [work(int(bounds[0]), int(bounds[1])), *(future.result() for future in futures)]


class TorchPooling(_HostSums):
    """Pooling by torch operations, on any device."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._device, self._there = copies.device, copies.there

    def arrays(self, look: TableLookup) -> Sequence[NDArray[Any]]:
        return look.inverse_N, *_scaled(look)

    def cells(self, look: TableLookup, rows_UD: Floats) -> Tensor:
        """The leaf holds the cells of occurrences; `gradients` sums their gradients."""
        rows = sent(_array(rows_UD)[:, : look.table.width], self._device)
        expanded = rows.index_select(0, self._there(look.inverse_N))
        if look.cell_N is not None and look.scale_N is not None:
            cells = torch.zeros((look.num_cells, look.table.width), device=self._device)
            scaled = expanded * self._there(look.scale_N)[:, None]
            expanded = cells.index_add_(0, self._there(look.cell_N), scaled)
        return expanded.requires_grad_()

    def gradients(self, look: TableLookup, leaf: Tensor) -> tuple[F32, bool]:
        grads = torch.zeros((len(look.keys.keys_U), look.table.width), device=self._device)
        if leaf.grad is not None:
            by_occurrence = leaf.grad
            if look.cell_N is not None and look.scale_N is not None:
                by_occurrence = leaf.grad.index_select(0, self._there(look.cell_N))
                by_occurrence = by_occurrence * self._there(look.scale_N)[:, None]
            grads.index_add_(0, self._there(look.inverse_N), by_occurrence)
        grads_UD = grads.cpu().numpy()
        return grads_UD, bool(np.isfinite(grads_UD).all())

    def add_gradients(self, look: TableLookup, leaf: Tensor, sums_UD: Floats) -> bool:
        """Each micro-batch is summed on the device first."""
        grads_UD, _ = self.gradients(look, leaf)
        sums = _array(sums_UD)
        sums += grads_UD
        return bool(np.isfinite(sums).all())


class DevicePooling:
    """Pooling of rows that are on a device, by torch operations that add in the order of the kernels.

    Rows of a batch that is only predicted come from the shard, and travel. Gradients stay on the device.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._device, self._there, self._copies = copies.device, copies.there, copies

    def arrays(self, look: TableLookup) -> Sequence[NDArray[Any]]:
        return look.inverse_N, look.order_N, look.start_U1, *_scaled(look)

    def cells(self, look: TableLookup, rows_UD: Floats) -> Tensor:
        rows = rows_UD if isinstance(rows_UD, Tensor) else self._there(_array(rows_UD))
        expanded = rows[:, : look.table.width].index_select(0, self._there(look.inverse_N))
        if look.cell_N is None or look.scale_N is None:
            return expanded.requires_grad_()
        cells = torch.zeros((look.num_cells, look.table.width), device=self._device)
        scaled = expanded * self._there(look.scale_N)[:, None]
        return cells.index_add_(0, self._there(look.cell_N), scaled).requires_grad_()

    def gradients(self, look: TableLookup, leaf: Tensor) -> tuple[Tensor, Finite]:
        if leaf.grad is None or not len(look.inverse_N):
            return self.zeros(look), True
        by_key = self._of_occurrences(look, leaf.grad).index_select(0, self._there(look.order_N))
        begins, first = self._there(look.start_U1).long(), -0.0 if look.cell_N is None else 0.0
        # -0 and a number are that number, with its sign
        sums = torch.segment_reduce(by_key, "sum", offsets=begins, initial=first, unsafe=True)
        return sums, self._finite(sums)

    def zeros(self, look: TableLookup) -> Tensor:
        return torch.zeros((len(look.keys.keys_U), look.table.width), device=self._device)

    def add_gradients(self, look: TableLookup, leaf: Tensor, sums_UD: Floats) -> Finite:
        assert isinstance(sums_UD, Tensor), "its own"
        if leaf.grad is not None:
            sums_UD.index_add_(0, self._there(look.inverse_N), self._of_occurrences(look, leaf.grad))
        return self._finite(sums_UD)

    def _of_occurrences(self, look: TableLookup, grad_CD: Tensor) -> Tensor:
        """(N, D) the gradient of each occurrence."""
        if look.cell_N is None or look.scale_N is None:
            return grad_CD
        return grad_CD.index_select(0, self._there(look.cell_N)) * self._there(look.scale_N)[:, None]

    def _finite(self, sums: Tensor) -> Later:
        return self._copies.later(torch.isfinite(sums).all())


def _scaled(look: TableLookup) -> Sequence[NDArray[Any]]:
    return () if look.cell_N is None or look.scale_N is None else (look.cell_N, look.scale_N)


def _array(floats: Floats) -> F32:
    assert isinstance(floats, np.ndarray), "rows are not on a device"
    return floats


def pooling_for(
    device: torch.device, num_threads: int, copies: DeviceCopies | None = None, *, rows_on_device: bool = False
) -> Pooling:
    """The pooling for a device. `copies`: those of the trainer."""
    copies = copies or DeviceCopies(device)
    if rows_on_device:
        return DevicePooling(copies)
    return KernelPooling(num_threads) if device.type == "cpu" else TorchPooling(copies)


@dataclass(slots=True)
class RowSums:
    """The gradients of the rows of a step, summed over its micro-batches."""

    grads_UD: dict[str, Floats]
    """By table."""
    flags: list[Finite] = field(default_factory=list)
    """Whether these and all losses are finite."""
    readers: Readers = field(default_factory=dict)
    """Keys that read a default row, by table with a learnt default row."""

    @classmethod
    def of(cls, batch: TrainingBatch) -> "RowSums":
        """No gradients of a batch yet."""
        return cls({})

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite. On a device the host waits for it."""
        return all(bool(each.array) if isinstance(each, Later) else each for each in self.flags)

    def add(self, batch: TrainingBatch, leaves: Mapping[str, Tensor], pooling: Pooling) -> None:
        """Add those of a micro-batch; `leaves`: its cells by table, after the backward pass."""
        for look in batch.lookups:
            name = look.table.name
            if look.is_part:
                if name not in self.grads_UD:
                    self.grads_UD[name] = pooling.zeros(look)
                finite = pooling.add_gradients(look, leaves[name], self.grads_UD[name])
            else:
                self.grads_UD[name], finite = pooling.gradients(look, leaves[name])
            self.flags.append(finite)

    def gradients(self, batch: TrainingBatch, default_rows: DefaultRows, loss_scale: float) -> dict[str, Gradients]:
        """The push of the whole batch, without the loss scale. Default rows get their gradients, with it."""
        found: dict[str, Gradients] = {}
        for look in batch.lookups:
            grads_UD, statistics = self.grads_UD[look.table.name], (look.show_U, look.click_U)
            if isinstance(grads_UD, Tensor):
                if look.table.name in self.readers:
                    default_rows.learn(look.table.name, grads_UD.cpu().numpy(), self.readers)
                if loss_scale != 1:
                    grads_UD = grads_UD / torch.full((), loss_scale, device=grads_UD.device)
                found[look.table.name] = PlacedGradients(
                    np.empty((len(look.show_U), 0), np.float32), *statistics, grads_UD
                )
                continue
            sums_UD = _array(grads_UD)
            default_rows.learn(look.table.name, sums_UD, self.readers)
            if loss_scale != 1:
                sums_UD /= np.float32(loss_scale)
            found[look.table.name] = Gradients(sums_UD, *statistics)
        return found
