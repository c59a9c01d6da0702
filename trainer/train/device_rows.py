"""Rows in the memory of the trainer's device: `train.rows = "device"`.

A row gets a place on the device when a step first reads it, if there is room, and keeps it over passes. Steps read,
sum and learn there. At a close the rows that the pass changed return to the shard's slab, so hashes, commits, exports
and the feed read the shard as ever. Between two closes the slab has the values of the earlier one.

- *Ahead of the step*: the loader announces each batch (`expect`), while earlier ones train, those of the next pass
  included. Rows without a place, and with their final value in the slab, then travel to the device beside the step.
- *Bounded memory* (`train.rows_memory`): a row that finds no room has its step on the shard's arrays, with the same
  arithmetic: its floats and its gradient travel for that step. After a pass in which this happened, the rows that
  most steps read keep or get the places.
- *Other writers*: a row that is deleted, loaded or made anew in the slab loses its place.

Placement changes no bit: learning in torch has the bits of the kernels (trainer.train.row_learning).

Shapes: U rows of a step, M of them without a place, R rows of the table, C places, D weights of a row, W floats of it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import F32, U16, U64, Floats
from headrace.pserver.protocol.table_stats import DeviceRows
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import FreeNumbers, frozen, grown
from headrace.pserver.rows.gradient_merge import frozen_gradients, merge
from headrace.pserver.rows.placed_rows import GradientScale, PlacedGradients, PlacedMaker, PlacedSlab
from headrace.pserver.rows.row_settings import FirstSteps, RowSettings
from headrace.pserver.server.step_floats import ComingFloats
from headrace.trainer.device_copies import DeviceCopies, sent
from headrace.trainer.train.row_learning import LEARNERS, Numbers, by_show, clipped, root

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
NONE = -1
"""In place of a place: the row has none."""
START_PLACES = 1 << 12
MAX_AHEAD = 8
"""Batches whose rows travel ahead; those of further ones travel at their step."""


class RowMemory:
    """Memory of the device for the rows of all tables."""

    def __init__(self, most: int | None) -> None:
        """`most`: bytes; None: no bound."""
        self.most, self._used = most, 0

    def has_room(self, row_bytes: int) -> bool:
        """Whether there is room for one more row."""
        return self.most is None or self._used + row_bytes <= self.most

    def room(self, wanted: int, had: int, row_bytes: int) -> int:
        """Take room for `wanted` rows in place of `had`, or for fewer; returns for how many."""
        if self.most is not None:
            wanted = min(wanted, had + (self.most - self._used) // row_bytes)
        self._used += (wanted - had) * row_bytes
        return wanted


class _Sent(NamedTuple):
    """Rows of a batch on their way to the device."""

    at_M: I64
    """Which rows of the batch, ascending."""
    floats: Callable[[], Tensor]
    """(M, W)."""
    num_writes: int
    """`DeviceSlab._num_writes` when they left."""
    num_closes: int
    """Closes until then."""


class DeviceSlab(PlacedSlab):
    """The rows of one table. One lock guards the places; the device's floats are the step's alone."""

    def __init__(
        self,
        room: int,
        settings: RowSettings,
        table_seed: np.uint64,
        device: torch.device,
        memory: RowMemory,
    ) -> None:
        super().__init__(room, settings, table_seed)
        self._copies, self._memory, self._device = DeviceCopies(device), memory, device
        self._lock = threading.Lock()
        self._place_R = np.full(room, NONE, np.int32)
        self._apart_R = np.zeros(room, np.bool_)
        """Rows that learnt on the shard in the open pass; their value is final at its close."""
        self._uses_R = np.zeros(room if memory.most is not None else 0, np.float32)
        """Steps that read the row, each pass half as much as the next; kept only where memory is bounded."""
        self._free, self._num_places, self._next_place = FreeNumbers(), 0, 0
        self._floats_CW = torch.empty((0, self._width), device=device)
        self._sent: dict[bytes, _Sent] = {}
        self._num_writes = 0
        """How often rows of the slab have changed but by `settle`."""
        self._num_closes = 0
        self._num_read = self._num_apart = 0
        self._numbers_C2R = self._numbers()

    # --- the slab ----------------------------------------------------------------------------------------------------

    @override
    def set(self, settings: RowSettings) -> None:
        super().set(settings)
        self._numbers_C2R = self._numbers()

    def _numbers(self) -> Tensor:
        return self._there(np.stack([each.settings for each in self._settings.optimizers]))

    @override
    def grow(self, used: int, room: int) -> None:
        with self._lock:
            for name in ("_place_R", "_apart_R", "_uses_R"):
                array = getattr(self, name)
                if len(array):
                    array = grown(array, used, room)
                    array[used:] = NONE if name == "_place_R" else 0
                    setattr(self, name, array)
        super().grow(used, room)

    @override
    def start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        super().start_at(rows_U, keys_U, group_U)
        self._written(rows_U)

    @override
    def free(self, rows_U: I32) -> None:
        self._written(rows_U)

    @override
    def put(self, rows_U: I32, rows_UD: F32) -> None:
        super().put(rows_U, rows_UD)
        self._written(rows_U)

    @override
    def hold(self, words_UW: U32, rows_U: I32) -> None:
        self._written(rows_U)

    def _written(self, rows_U: I32) -> None:
        """Another writer has changed these rows: the slab has their value."""
        if len(rows_U):
            with self._lock:
                self._num_writes += 1
                self._give_up(rows_U)
                self._apart_R[rows_U] = False

    def _give_up(self, rows_U: I32) -> None:
        """Take the places of rows; within the lock."""
        places_U = self._place_R[rows_U]
        self._free.put(places_U[places_U != NONE])
        self._place_R[rows_U] = NONE

    # --- steps -------------------------------------------------------------------------------------------------------

    @override
    def open_pass(self) -> None:
        self._num_read = self._num_apart = 0

    @override
    def expect(self, rows_U: I32) -> None:
        with self._lock:
            if len(self._sent) >= MAX_AHEAD or self._is_full:
                return
            number_U = np.maximum(rows_U, 0)
            waits_U = (self._place_R[number_U] == NONE) & ~self._apart_R[number_U]
            at_M = np.flatnonzero(waits_U & (rows_U != kernels.EMPTY))
            now = self._num_writes, self._num_closes
        if len(at_M):
            sent = _Sent(at_M, self._copies.send(self._of_slab(rows_U[at_M])), *now)
            with self._lock:
                self._sent[rows_U.tobytes()] = sent

    def _of_slab(self, rows_M: I32) -> F32:
        """(M, W) whole rows, as the slab has them."""
        floats_MW = np.empty((len(rows_M), self._width), np.float32)
        kernels.gather(self.slab_RW, frozen(rows_M), 0, len(rows_M), floats_MW)
        return floats_MW

    @override
    def read(self, rows_U: I32, group_R: U16, steps: FirstSteps | None) -> Tensor:
        known_U = rows_U != kernels.EMPTY
        place_U = np.where(known_U, self._placed(rows_U, known_U), NONE)
        self._num_read += int(known_U.sum())
        whole_UW = self._floats_CW.index_select(0, self._index(np.maximum(place_U, 0))) if self._num_places else None
        if whole_UW is None:
            whole_UW = torch.zeros((len(rows_U), self._width), device=self._device)
        apart_M = np.flatnonzero(known_U & (place_U == NONE))
        if len(apart_M):
            self._num_apart += len(apart_M)
            floats_MW = self._there(self._of_slab(rows_U[apart_M]))
            whole_UW.index_copy_(0, self._index(apart_M), floats_MW)
        num_weights, absent_M = self._settings.num_weights, np.flatnonzero(~known_U)
        read_UD = whole_UW[:, :num_weights]
        if len(absent_M):
            read_UD = read_UD.clone()
            bits = self._there(np.full((len(absent_M), num_weights), self._settings.absent))
            read_UD.index_copy_(0, self._index(absent_M), bits)
        if steps is None:
            return read_UD.contiguous()
        return torch.cat([read_UD, self._first_steps(rows_U, known_U, whole_UW, group_R, steps)], 1)

    def _first_steps(
        self, rows_U: I32, known_U: NDArray[np.bool_], whole_UW: Tensor, group_R: U16, steps: FirstSteps
    ) -> Tensor:
        """(U, 2) of which size the rows' first-order steps are: the twin of kernels.gather_learning."""
        group_U = group_R[np.maximum(rows_U, 0)]
        rate_U2 = steps.rates_C2[self._settings.class_G[group_U]]
        learns_U = known_U & (rate_U2[:, 0] > 0)
        if len(steps.rests_G):
            learns_U &= ~steps.rests_G[group_U]
        rate, epsilon = self._there(rate_U2).unbind(1)
        learns, one = self._there(learns_U), torch.ones((), device=self._device)
        length = (root(whole_UW[:, self._settings.num_weights]) + epsilon) / rate
        never = torch.full((), torch.inf, device=self._device)
        columns = torch.where(learns, length * length, never), torch.where(learns, one / (rate * rate), 0 * one)
        return torch.stack(columns, 1)

    def _placed(self, rows_U: I32, known_U: NDArray[np.bool_]) -> I32:
        """(U,) places of the rows of a step. Rows without one get one as far as there is room."""
        with self._lock:
            sent = self._sent.pop(rows_U.tobytes(), None)
            if len(self._uses_R):
                self._uses_R[rows_U[known_U]] += 1
            missing_M = np.flatnonzero(known_U & (self._place_R[np.maximum(rows_U, 0)] == NONE))
            missing_M = missing_M[: self._make_room(len(missing_M))]
            rows_M = rows_U[missing_M]
            self._place_R[rows_M] = self._take(len(rows_M))
            place_U = self._place_R[np.maximum(rows_U, 0)]
            if sent is not None and sent.num_writes != self._num_writes:
                sent = None
        if len(rows_M):
            at = self._index(place_U[missing_M])
            self._floats_CW.index_copy_(0, at, self._arriving(sent, missing_M, rows_M))
        return place_U

    def _arriving(self, sent: _Sent | None, missing_M: I64, rows_M: I32) -> Tensor:
        """(M, W) rows of a batch on the device: those that were sent ahead, if all of them were, else from the slab."""
        if sent is not None:
            place_M = np.minimum(np.searchsorted(sent.at_M, missing_M), len(sent.at_M) - 1)
            if np.array_equal(sent.at_M[place_M], missing_M):
                return sent.floats().index_select(0, self._index(place_M))
        return self._there(self._of_slab(rows_M))

    @property
    def _is_full(self) -> bool:
        """Whether no row can get a place."""
        no_place = self._next_place == self._num_places and not self._free.count
        return no_place and not self._memory.has_room(self.row_bytes)

    def _make_room(self, wanted: int) -> int:
        """Have room for so many more rows, or for fewer: returns for how many; within the lock."""
        here = self._free.count + self._num_places - self._next_place
        if wanted > here:
            had, row_bytes = self._num_places, self.row_bytes
            goal = max(START_PLACES, 2 * had, had + wanted - here)
            room = self._memory.room(goal, had, row_bytes)
            if room > had:
                self._grow_places(room)
        return min(wanted, self._free.count + self._num_places - self._next_place)

    def _grow_places(self, room: int) -> None:
        """Move the rows to a larger array. Raises SpecError where the device has no memory for it."""
        try:
            larger_CW = torch.zeros((room, self._width), device=self._device)
        except torch.OutOfMemoryError as error:
            raise SpecError(
                f"the device has no memory for {room:,} rows of {self.row_bytes} bytes beside the model: set a bound "
                "below its memory",
                "train.rows_memory",
            ) from error
        larger_CW[: self._num_places] = self._floats_CW
        self._floats_CW, self._num_places = larger_CW, room

    def _take(self, count: int) -> I32:
        """So many places, freed ones first; within the lock."""
        again_M = np.array(self._free.take(count))
        begin, self._next_place = self._next_place, self._next_place + count - len(again_M)
        return np.concatenate([again_M, np.arange(begin, self._next_place, dtype=np.int32)])

    def _index(self, numbers: NDArray[Any]) -> Tensor:
        return self._there(numbers.astype(np.int64))

    def _there(self, array: NDArray[Any]) -> Tensor:
        return sent(array, self._device)

    @override
    def to_host(self, floats_UD: Floats) -> F32:
        assert isinstance(floats_UD, Tensor), "its own"
        return floats_UD.cpu().numpy()

    @override
    def merged(self, pushes: Sequence[tuple[I32, PlacedGradients]]) -> tuple[I32, PlacedGradients]:
        parts = [self._tensor_of(push) for _, push in pushes]
        rows_M, counted = merge([(frozen(rows_U), frozen_gradients(push)) for rows_U, push in pushes])
        first, *others = parts
        if not others:
            return pushes[0][0], replace(pushes[0][1], tensor=first, at_U=None)
        order_M, seen_M = np.argsort(rows_M), np.zeros(len(rows_M), np.bool_)
        sums_MD = torch.empty((len(rows_M), first.shape[1]), device=self._device)
        for (rows_U, _), grads_UD in zip(pushes, parts, strict=True):
            place_U = order_M[np.searchsorted(rows_M, rows_U, sorter=order_M)]
            again_U = seen_M[place_U]
            for chosen_U, adds in ((~again_U, False), (again_U, True)):
                at, some_KD = (
                    self._index(place_U[chosen_U]),
                    grads_UD.index_select(0, self._index(chosen_U.nonzero()[0])),
                )
                sums_MD.index_copy_(0, at, sums_MD.index_select(0, at) + some_KD if adds else some_KD)
            seen_M[place_U] = True
        return rows_M, PlacedGradients(counted.grads_UD, counted.show_U, counted.click_U, sums_MD)

    def _tensor_of(self, push: PlacedGradients) -> Tensor:
        """(U, D) the gradients of a push, which are here by now."""
        grads = push.tensor.take() if isinstance(push.tensor, ComingFloats) else push.tensor
        assert isinstance(grads, Tensor), "gradients come from the device"
        return grads if push.at_U is None else grads.index_select(0, self._index(push.at_U))

    @override
    def learn_placed(
        self, rows_U: I32, push: PlacedGradients, scale: GradientScale, group_R: U16, passes_U: U32 | None
    ) -> None:
        grads_UD = self._scaled(push, scale)
        with self._lock:
            place_U = self._place_R[rows_U]
            apart_M = np.flatnonzero(place_U == NONE)
            self._apart_R[rows_U[apart_M]] = True
            self._num_writes += bool(len(apart_M))
        if len(apart_M):
            self._learn_apart(rows_U, grads_UD, apart_M, group_R, passes_U)
            here_M = np.flatnonzero(place_U != NONE)
            rows_U, place_U, grads_UD = rows_U[here_M], place_U[here_M], grads_UD.index_select(0, self._index(here_M))
            passes_U = None if passes_U is None else passes_U[here_M]
        if len(rows_U):
            at = self._index(place_U)
            learnt_UW = self._learnt(self._floats_CW.index_select(0, at), grads_UD, rows_U, group_R, passes_U)
            self._floats_CW.index_copy_(0, at, learnt_UW)

    def _learn_apart(self, rows_U: I32, grads_UD: Tensor, apart_M: I64, group_R: U16, passes_U: U32 | None) -> None:
        """Rows without a place learn in the slab."""
        grads_MD = grads_UD.index_select(0, self._index(apart_M)).cpu().numpy()
        passes_M = None if passes_U is None else frozen(passes_U[apart_M])
        self.learn(frozen(rows_U[apart_M]), frozen(grads_MD), group_R, 0, len(apart_M), passes_M)

    def _scaled(self, push: PlacedGradients, scale: GradientScale) -> Tensor:
        """(U, D) the gradients as the optimizer takes them: the twin of ShardTable._scaled."""
        grads_UD = self._tensor_of(push)
        if scale.kind == "show":
            grads_UD = by_show(grads_UD, self._there(np.array(push.show_U)), scale.batch_samples)
        elif scale.kind == "sum":
            grads_UD = grads_UD * float(scale.batch_samples)
        return grads_UD if scale.most is None else clipped(grads_UD, scale.most)

    def _learnt(self, rows_UW: Tensor, grads_UD: Tensor, rows_U: I32, group_R: U16, passes_U: U32 | None) -> Tensor:
        """The twin of RowSettings.learn."""
        settings, class_U = self._settings, None
        if passes_U is not None and settings.kept != 1:
            factor = self._there(_powers(settings.kept, passes_U))[:, None]
            weights, state = torch.split(rows_UW, [settings.num_weights, self._width - settings.num_weights], 1)
            rows_UW = torch.cat([weights * factor, state], 1)
        if settings.l2:
            grads_UD = grads_UD + rows_UW[:, : settings.num_weights] * float(settings.l2)
        if len(settings.optimizers) > 1:
            class_U = self._index(settings.class_G[group_R[rows_U]])
        name = settings.classes.sections[0].optimizer.on_device
        assert name is not None, "checked with the job file"
        numbers = Numbers(self._numbers_C2R, class_U, settings.first_order, settings.num_weights)
        return LEARNERS[name](rows_UW, grads_UD, numbers)

    # --- closes ------------------------------------------------------------------------------------------------------

    @override
    def settle(self, rows_U: I32) -> None:
        with self._lock:
            place_U = self._place_R[rows_U]
        here_U = place_U != NONE
        if here_U.any():
            floats_UW = self._floats_CW.index_select(0, self._index(place_U[here_U])).cpu().numpy()
            self.slab_RW.view(np.uint32)[rows_U[here_U]] = floats_UW.view(np.uint32)
        with self._lock:
            self._apart_R[rows_U] = False
            self._num_closes += 1
            # a batch that was announced two closes ago is never read
            self._sent = {key: sent for key, sent in self._sent.items() if sent.num_closes > self._num_closes - 2}
            if self._num_apart:
                self._keep_most_used()
            self._uses_R *= np.float32(0.5)

    def _keep_most_used(self) -> None:
        """Take the places of rows that fewer steps read than as many others; within the lock. All values are settled.

        Of equal ones, those that have a place keep it.
        """
        placed_P = np.flatnonzero(self._place_R != NONE)
        waiting_Q = np.flatnonzero((self._uses_R > 0) & (self._place_R == NONE))
        rows_N = np.concatenate([placed_P, waiting_Q])
        order_N = np.argsort(-self._uses_R[rows_N], kind="stable")
        leaves_N = order_N[self._num_places :]
        self._give_up(rows_N[leaves_N[leaves_N < len(placed_P)]].astype(np.int32))
        self._sent.clear()

    @override
    def figures(self) -> DeviceRows:
        with self._lock:
            num_rows = self._next_place - self._free.count
            return DeviceRows(num_rows, self._num_places * self.row_bytes, self._num_read, self._num_apart)


def _powers(kept: np.float32, passes_U: U32) -> F32:
    """(U,) `kept` to the power of each number of passes, by repeated squares: as pserver.rows.weight_decay.decay."""
    powers_U = np.ones(len(passes_U), np.float32)
    for passes in np.unique(passes_U):
        factor, square, left = np.float32(1), np.float32(kept), int(passes)
        while left:
            factor = factor * square if left & 1 else factor
            square, left = square * square, left >> 1
        powers_U[passes_U == passes] = factor
    return powers_U


def placed_tables(tables: Mapping[str, TableSection], device: torch.device, most: int | None) -> dict[str, PlacedMaker]:
    """How the slab of each table is made; together they have at most `most` bytes of the device."""
    memory = RowMemory(most)
    return {name: partial(DeviceSlab, device=device, memory=memory) for name in tables}
