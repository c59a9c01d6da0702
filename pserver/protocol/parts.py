"""The parts of an exchange: the dense slices may travel in messages of their own, each with a few of them.

A shard answers a part as soon as all ranks have pushed it, while others are still on their way. Each row is in one
part, and a part is merged in rank order, so no bit depends on how an exchange is split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.pserver.config import DENSE_SLICES

MAX_PARTS = 1 << 20
"""Most parts of an exchange on one shard: more slices than a job can have."""


class Part(NamedTuple):
    """The rows that one message of an exchange has."""

    is_split: bool = False
    """Whether dense slices travel apart from all other rows."""
    number: int = 0
    """0: all rows that do not travel apart. Others: some of the dense slices. The pushes of each number have an order
    of their own."""
    begin: int = 0
    end: int = 0
    """Of another number than 0: which slices, counted among those of the shard."""

    def of(self, table: str) -> slice | None:
        """The places of this part's rows among a batch's rows of a table on the shard; None: it has none of them."""
        if self.number:
            return slice(self.begin, self.end) if table == DENSE_SLICES else None
        return None if self.is_split and table == DENSE_SLICES else slice(None)


WHOLE = Part()
"""All rows in one message."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a rank splits its exchanges. All ranks of a job do it alike."""

    num_slices: Sequence[int]
    """Of each shard."""
    slices_each: int
    """Most slices of a message."""
    rows_first: bool
    """All other rows travel first, then slices in their order, which is that of the forward pass. If not: in the order
    in which the backward pass is done with them, so slices from the last to the first, then all other rows."""

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        """(shard, part) of each message, in the order in which they leave."""
        rows = [(shard, Part(is_split=True)) for shard in range(len(self.num_slices))]
        slices = [
            (shard, Part(True, 1 + begin // self.slices_each, begin, min(begin + self.slices_each, count)))
            for begin in range(0, max(self.num_slices), self.slices_each)
            for shard, count in enumerate(self.num_slices)
            if begin < count
        ]
        yield from [*rows, *slices] if self.rows_first else [*reversed(slices), *rows]
