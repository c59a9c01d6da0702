"""Rows that are in memory and not yet in the store of their table: the next commit of this shard writes them.

An advance takes rows over from a commit. Where all rows are in memory, nobody reads the store before that, so that
training may begin, or a later advance may replace the rows, without a write.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.store.row_store import U32, U64, RowStore

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
    """`write` begins nothing. One thread calls. The arrays that it gets must not change."""

    store: RowStore
    _pieces: list[LatePiece] = field(default_factory=list)

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        self.finish()
        return self.store.get(keys_U)

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
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
    newest_first = pieces[::-1]
    parts = [keys for each in newest_first for keys in (each.keys_U, each.gone_G)]
    _, first_U = np.unique(np.concatenate(parts), return_index=True)
    counts_S = np.zeros(sum(map(len, parts)), np.bool_)
    counts_S[first_U] = True
    last = np.split(counts_S, np.cumsum([len(keys) for keys in parts])[:-1])
    return LatePiece(
        np.concatenate([each.keys_U[kept_U] for each, kept_U in zip(newest_first, last[::2], strict=True)]),
        np.concatenate([each.rows_UW[kept_U] for each, kept_U in zip(newest_first, last[::2], strict=True)]),
        np.concatenate([each.gone_G[kept_G] for each, kept_G in zip(newest_first, last[1::2], strict=True)]),
    )
