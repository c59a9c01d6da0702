"""`ExportedItems`: searches the items of an export, as a replica does; it imports no torch."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

from headrace.errors import SpecError
from headrace.trainer.serving.item_filter import ItemFilter, opened
from headrace.trainer.serving.item_index import ItemIndex


class ExportedItems:
    """The items of an export, with their vectors by its version. `Export.index` makes it."""

    def __init__(self, index: ItemIndex, version: int) -> None:
        self._index, self.version = index, version

    def __len__(self) -> int:
        """Items that can be found."""
        return self._index.num_items

    def __repr__(self) -> str:
        return f"<headrace items of version {self.version}: {len(self)}>"

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return int(self._index.vectors_IV.shape[1])

    def table(self) -> pa.Table:
        """The fields of all items of the catalogue, in its order."""
        return self._index.catalogue.fields

    def vectors(self) -> NDArray[np.float32]:
        """(I, dim) the vectors of all items of the catalogue, in its order; zeros for items that cannot be found."""
        return self._index.vectors_IV.copy()

    def search(
        self,
        vectors: ArrayLike,
        k: int = 10,
        *,
        allowed: Sequence[str | int] | None = None,
        excluded: Sequence[str | int] = (),
        equal: Mapping[str, Any] | None = None,
        range: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> pa.Table:
        """The k best items for each user vector, (B, dim): columns user (its number), item, score; best first.

        Filters are those of `Replica.retrieve`, and so are the bits of scores. Raises SpecError, BadInput.
        """
        try:
            with np.errstate(over="ignore"):
                user_BV, k = np.asarray(vectors, np.float32), index(k)
        except (TypeError, ValueError) as error:
            raise SpecError(f"vectors are (users, {self.dim}) numbers, and k is a whole number: {error}") from None
        if user_BV.ndim != 2 or user_BV.shape[1] != self.dim:
            raise SpecError(f"vectors have the shape {list(user_BV.shape)}; (users, {self.dim}) is needed")
        if not np.isfinite(user_BV).all():
            raise SpecError("a vector has a number that is not finite")
        if k < 1:
            raise SpecError(f"k is {k}; at least 1")
        conditions = {"allowed": allowed, "excluded": list(excluded), "equal": equal or {}, "range": range or {}}
        try:
            asked = ItemFilter.model_validate(conditions)
        except ValidationError as error:
            first = error.errors()[0]
            raise SpecError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        items = self._index
        found = items.search(user_BV, min(k, len(items.catalogue)), items.there_I & opened(items.catalogue, asked))
        places = np.concatenate([np.empty(0, np.int64), *(at_K for _, at_K in found)])
        columns = {
            "user": pa.array(np.repeat(np.arange(len(found)), [len(at_K) for _, at_K in found])),
            "item": items.catalogue.id_I.take(pa.array(places)),
            "score": pa.array(np.concatenate([np.empty(0, np.float32), *(score_K for score_K, _ in found)])),
        }
        return pa.table(columns).replace_schema_metadata({"version": str(self.version)})
