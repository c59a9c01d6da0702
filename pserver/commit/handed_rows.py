"""The changed rows of a table, as a shard hands them to the shards of the next generation when a job is resized.

One file of a table and shard. It holds what changed since the last commit, and is read on the same machine or in a
shared folder moments later. It is not synced: after a crash nobody reads it, and the passes are trained again.

    <folder of the handover>/shard-<k>/<table>.rows.safetensors

Shapes: U unique changed keys, W words of a row, G deleted keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headrace.keys import NUM_BUCKETS
from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.protocol.shards import U16, U64, ShardCommitPart
from headrace.pserver.store.row_store import U32

FILE = "{}.rows.safetensors"
"""File of a table's rows."""


def is_handed(parts: Iterable[ShardCommitPart]) -> bool:
    """Whether these are parts of a handover, not of a commit."""
    return any(facts.handed is not msgspec.UNSET for part in parts for facts in part.tables.values())


@dataclass(frozen=True, slots=True)
class HandedRows:
    """The changes of a table since a commit."""

    keys_U: U64
    words_UW: U32
    gone_G: U64
    """Deleted keys; some may have rows again, and are in `keys_U` then."""
    gone_group_G: U16

    def of_buckets(self, begin: int, end: int) -> "HandedRows":
        """Those of a range of buckets."""
        inside_U, inside_G = _inside(self.keys_U, begin, end), _inside(self.gone_G, begin, end)
        words_UW = self.words_UW if inside_U.all() else self.words_UW[inside_U]
        return HandedRows(self.keys_U[inside_U], words_UW, self.gone_G[inside_G], self.gone_group_G[inside_G])

    def write(self, path: Path) -> None:
        """Write the file. Raises StoreFailed."""
        arrays = {"keys": self.keys_U, "words": self.words_UW, "gone": self.gone_G, "gone_groups": self.gone_group_G}
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
        except (SafetensorError, OSError) as error:
            raise StoreFailed(f"{path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "HandedRows":
        """The inverse of `write`. Raises StoreDamaged."""
        try:
            arrays = load_file(path)
            return cls(arrays["keys"], arrays["words"], arrays["gone"], arrays["gone_groups"])
        except (SafetensorError, OSError, KeyError) as error:
            raise StoreDamaged(f"{path}: cannot be read: {error}") from error


def _inside(keys_N: U64, begin: int, end: int) -> NDArray[np.bool_]:
    bucket_N = keys_N % np.uint64(NUM_BUCKETS)
    inside_N: NDArray[np.bool_] = (begin <= bucket_N) & (bucket_N < end)
    return inside_N
