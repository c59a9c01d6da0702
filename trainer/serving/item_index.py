"""The index of items: their vectors by one version, searched exactly.

trainer.exports.item_tower computes the vectors; an export holds them as trainer.exports.item_file has them.

Shapes: I items, G blocks of LANES items, V length of a vector, W up to a multiple, B users, K best items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.serving.item_catalogue import ItemCatalogue
from headrace.trainer.serving.item_search_kernels import F64, I8, rounded, search
from headrace.trainer.serving.slot_layout import F32, I64

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ItemIndex:
    """The vectors of all items by one version."""

    catalogue: ItemCatalogue
    vectors_IV: F32
    """In the order of the catalogue; zeros for items that are not found."""
    there_I: Bools
    """Whether an item can be found."""
    rounded: tuple[I8, F32, F64, F64]
    """The vectors as the pass over all items reads them."""

    @classmethod
    def of(cls, catalogue: ItemCatalogue, vectors_IV: F32, there_I: Bools) -> "ItemIndex":
        """The index of these vectors."""
        vectors_IV = np.ascontiguousarray(vectors_IV, np.float32)
        return cls(catalogue, vectors_IV, there_I, rounded(vectors_IV))

    @property
    def num_items(self) -> int:
        """Items that can be found."""
        return int(np.count_nonzero(self.there_I))

    def search(
        self, user_BV: F32, most: int, open_I: Bools, after: Sequence[tuple[float, int]] = ()
    ) -> list[tuple[F32, I64]]:
        """Scores and places of the best items of each user among the open ones, best first.

        `after`: by user, the score and place after which to begin.
        """
        num_users = len(user_BV)
        score_BK, at_BK = np.zeros((num_users, most), np.float32), np.zeros((num_users, most), np.int64)
        count_B = np.zeros(num_users, np.int64)
        begins = after or [(float("inf"), -1)] * num_users
        after_B = np.array([score for score, _ in begins], np.float32)
        at_B = np.array([at for _, at in begins], np.int64)
        user_BV = np.ascontiguousarray(user_BV, np.float32)
        search(self.vectors_IV, *self.rounded, open_I, user_BV, after_B, at_B, score_BK, at_BK, count_B)
        return [(score_BK[b, : count_B[b]], at_BK[b, : count_B[b]]) for b in range(num_users)]
