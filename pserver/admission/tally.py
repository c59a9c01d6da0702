"""What counts keys for one entry: a protocol, kept by pserver.admission.sketch and pserver.admission.exact.

Counts are kept by virtual bucket (the lowest bits of a key), each in its own equal part of the memory, so that what
happens to a key depends on the records of its bucket alone and not on how buckets lie on shards.

Shapes: U unique keys of a step, B buckets of this shard.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pserver.admission.amounts import Rates

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class Tally(Protocol):
    """Counts of keys in the buckets of one shard. One thread at a time."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """All that is kept, by name; each one's first axis is B."""

    units: tuple[str, ...]
    """Names of those arrays that hold units."""

    def record(
        self, keys_U: U64, show_U: F32, click_U: F32, rates: Rates, day: int, open_U: Flags, admitted_U: Flags
    ) -> None:
        """Count the records of open keys, in their order; those below the threshold are no longer `admitted_U`."""

    def estimate(self, key: int, day: int) -> int:
        """Units counted for a key as of a day; changes nothing."""

    def quality(self, key: int, day: int) -> dict[str, Any]:
        """How far the estimate may be off, in units, and why; JSON-able."""

    def forget(self, keys_U: U64) -> None:
        """Remove what is kept of these keys, where that is possible."""

    def digest(self) -> tuple[int, int]:
        """Two sums over buckets, each modulo 2**64."""
