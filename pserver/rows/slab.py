"""The floats of rows in one array: weights, then the optimizer's state.

pserver.rows.split_slab is the variant for tables whose rows get their vector later. `RowFloats` is the protocol of
both; pserver.rows.table_rows numbers the rows, pserver.tables.table decides what may run at the same time.

Shapes: U rows chosen, R rows of a table, W floats of a row as commits have them, D weights of a row, W' words of a row.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows import kernels, row_format
from headrace.pserver.rows.arrays import allocate, grown
from headrace.pserver.rows.digest import digest_rows, join
from headrace.pserver.rows.row_settings import FirstSteps, RowSettings

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Columns = tuple[NDArray[Any], ...]
"""Columns of rows for digests and words; see pserver.rows.table_rows.bits_of."""


class RowFloats(Protocol):
    """The floats of R rows by number. `begin` and `end` restrict a call to rows_U[begin:end].

    Threads: `gather`, `learn`, `pack`, `unpack` and `digest` on disjoint ranges at the same time; a row is written by
    one thread at a time. Calls that make, free or grow rows run within a table's `numbering`.
    """

    room: int
    """Number of rows that fit."""
    row_bytes: int
    """Memory for each row number."""

    @property
    def more_bytes(self) -> int:
        """Memory of rows beyond `row_bytes` each."""
        ...

    def set(self, settings: RowSettings) -> None:
        """Use other settings from here on."""
        ...

    def grow(self, used: int, room: int) -> None:
        """Grow to `room` rows, of which the first `used` are kept; within `moving`."""
        ...

    def start(self, begin: int, end: int, keys_R: U64, group_R: U16) -> None:
        """Initialise new rows `begin` .. `end` - 1."""
        ...

    def start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        """Initialise new rows, anywhere."""
        ...

    def free(self, rows_U: I32) -> None:
        """Free rows; before any other use each must be initialised or held for words."""
        ...

    def gather(self, rows_U: I32, begin: int, end: int, out_UD: F32) -> None:
        """Copy weights; zeros for a missing vector."""
        ...

    def gather_present(self, changed_R: U32, rows_U: I32, out_UD: F32) -> None:
        """Copy weights of all `rows_U`, with the settings' `absent` for EMPTY and reserved rows."""
        ...

    def learn(
        self, rows_U: I32, grads_UD: F32, group_R: U16, begin: int, end: int, passes_U: U32 | None = None
    ) -> None:
        """Apply gradients to rows; the gradient of a missing vector is dropped. `passes_U`: as RowSettings.learn."""
        ...

    def join(self, rows_U: I32, columns: dict[str, NDArray[Any]], nonclk: np.float32, clk: np.float32) -> None:
        """After a push, with statistics in `columns`: add a vector to each row whose score is high enough now.

        Within `moving`. `nonclk` and `clk` are the weights of a show without a click and of a click in the score.
        """
        ...

    def pack(self, columns: Columns, rows_U: I32, begin: int, end: int, keys_U: U64, words_UW: U32) -> None:
        """Write keys and words (pserver.rows.row_format)."""
        ...

    def hold(self, words_UW: U32, rows_U: I32) -> None:
        """Before `unpack`: make room for the rows of these words."""
        ...

    def unpack(self, words_UW: U32, rows_U: I32, begin: int, end: int, columns: Columns) -> None:
        """The inverse of `pack`, without keys, into new rows; within `moving`, unless memory is bounded."""
        ...

    def digest(self, columns: Columns, rows_U: I32, multipliers: U64) -> int:
        """128-bit hash of rows."""
        ...


class Slab:
    """All floats of a row contiguous, (R, W). See RowFloats."""

    def __init__(self, room: int, settings: RowSettings, table_seed: np.uint64) -> None:
        self._settings, self._seed = settings, table_seed
        self._width = len(settings.start_W)
        self.room, self.row_bytes, self.more_bytes = room, 4 * self._width, 0
        self.slab_RW = allocate((room, self._width), np.float32)

    def set(self, settings: RowSettings) -> None:
        self._settings = settings

    def grow(self, used: int, room: int) -> None:
        self.slab_RW, self.room = grown(self.slab_RW, used, room), room

    def start(self, begin: int, end: int, keys_R: U64, group_R: U16) -> None:
        self._settings.initialise(self.slab_RW, keys_R, group_R, begin, end, self._seed)

    def start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        slab_UW = np.empty((len(rows_U), self._width), np.float32)
        self._settings.initialise(slab_UW, np.array(keys_U), np.array(group_U), 0, len(rows_U), self._seed)
        self.slab_RW[rows_U] = slab_UW

    def free(self, rows_U: I32) -> None:
        """Does nothing."""

    def gather(self, rows_U: I32, begin: int, end: int, out_UD: F32) -> None:
        kernels.gather(self.slab_RW, rows_U, begin, end, out_UD)

    def gather_learning(self, rows_U: I32, begin: int, end: int, group_R: U16, steps: FirstSteps, out_UE: F32) -> None:
        """Copy weights, and of which size their first-order steps are."""
        by_group = group_R, self._settings.class_G, steps.rests_G, steps.rates_C2
        kernels.gather_learning(self.slab_RW, rows_U, begin, end, self._settings.absent, *by_group, out_UE)

    def gather_present(self, changed_R: U32, rows_U: I32, out_UD: F32) -> None:
        kernels.gather_present(self.slab_RW, changed_R, rows_U, self._settings.absent, out_UD)

    def learn(
        self, rows_U: I32, grads_UD: F32, group_R: U16, begin: int, end: int, passes_U: U32 | None = None
    ) -> None:
        self._settings.learn(self.slab_RW, rows_U, grads_UD, group_R, begin, end, passes_U)

    def put(self, rows_U: I32, rows_UD: F32) -> None:
        """Write the weights of rows, bit for bit; within `moving`."""
        self.slab_RW.view(np.uint32)[rows_U, : rows_UD.shape[1]] = rows_UD.view(np.uint32)

    def join(self, rows_U: I32, columns: dict[str, NDArray[Any]], nonclk: np.float32, clk: np.float32) -> None:
        """Does nothing: rows start with their vectors."""

    def pack(self, columns: Columns, rows_U: I32, begin: int, end: int, keys_U: U64, words_UW: U32) -> None:
        row_format.pack(self.slab_RW.view(np.uint32), columns, rows_U, begin, end, keys_U, words_UW)

    def hold(self, words_UW: U32, rows_U: I32) -> None:
        """Does nothing."""

    def unpack(self, words_UW: U32, rows_U: I32, begin: int, end: int, columns: Columns) -> None:
        row_format.unpack(words_UW, rows_U, begin, end, self.slab_RW.view(np.uint32), columns)

    def digest(self, columns: Columns, rows_U: I32, multipliers: U64) -> int:
        return join(*digest_rows(self.slab_RW.view(np.uint32), columns, rows_U, multipliers))


class SlabMaker(Protocol):
    """Makes the array of a table's floats: `Slab`, or one whose rows learn elsewhere (pserver.rows.placed_rows)."""

    def __call__(self, room: int, settings: RowSettings, table_seed: np.uint64, /) -> Slab:
        """A slab with room for so many rows."""
        ...
