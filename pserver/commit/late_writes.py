"""Rows that are in memory and not yet in the store of their table: the next commit of this shard writes them.

An advance takes rows over from a commit. Where all rows are in memory, nobody reads the store before that, so that
training may begin, or a later advance may replace the rows, without a write.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pserver.store.row_store import U32, U64, RowStore

MAX_PIECES = 16
"""Most pieces that wait; beyond it they are joined, so that each key waits once."""


@dataclass(frozen=True, slots=True)
class LatePiece:
    """One write that waits: rows of unique keys, and deleted keys."""

    keys_U: U64
    rows_UW: U32
    gone_G: U64


@dataclass(slots=True)
class LateWriter:
    """See RowWriter; `write` begins nothing. One thread calls. The arrays that it gets must not change."""

    store: RowStore
    _pieces: list[LatePiece] = field(default_factory=list)

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        """See RowWriter."""
        self.finish()
        return self.store.get(keys_U)

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
        """See RowWriter."""
        self._pieces.append(LatePiece(keys_U, rows_UW, keys_U[:0] if gone_G is None else gone_G))
        if len(self._pieces) > MAX_PIECES:
            self._pieces = [joined(self._pieces)]

    def finish(self) -> None:
        """Write everything that waits. Raises StoreFailed; then it waits still."""
        if self._pieces:
            self._pieces = [joined(self._pieces)]
            piece = self._pieces[0]
            self.store.write(piece.keys_U, piece.rows_UW, piece.gone_G)
            self._pieces = []


def joined(pieces: list[LatePiece]) -> LatePiece:
    """One write with the effect of all, in their order: of each key the last one counts."""
    seen_S = np.empty(0, np.uint64)
    kept: list[LatePiece] = []
    for piece in reversed(pieces):
        keys_U, gone_G = (np.isin(keys, seen_S, invert=True) for keys in (piece.keys_U, piece.gone_G))
        kept.append(LatePiece(piece.keys_U[keys_U], piece.rows_UW[keys_U], piece.gone_G[gone_G]))
        seen_S = np.concatenate([seen_S, kept[-1].keys_U, kept[-1].gone_G])
    return LatePiece(
        np.concatenate([each.keys_U for each in kept]),
        np.concatenate([each.rows_UW for each in kept]),
        np.concatenate([each.gone_G for each in kept]),
    )
