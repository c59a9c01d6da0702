"""Filters of items: which ones may be found, by their ids and by their fields in the catalogue.

Shapes: I items.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field

from headrace.errors import BadInput
from headrace.keys import are_among, sign_of_text
from headrace.trainer.serving.item_catalogue import ItemCatalogue
from headrace.trainer.serving.item_index import Bools
from headrace.validation import nearest

MAX_IDS = 100_000
"""Most ids in one list of a filter."""
MAX_CONDITIONS = 64
"""Most conditions on fields in a filter."""

ItemId = str | int
ItemValue = str | int | float | bool


class FilterRefused(BadInput):
    """A filter that does not fit the catalogue."""


class RetrievalMessage(BaseModel):
    """A part of a request for items, or of its answer."""

    model_config = {"extra": "forbid", "use_attribute_docstrings": True, "frozen": True}


class ItemRange(RetrievalMessage):
    """Bounds of a field; both are within it."""

    min: ItemValue | None = None
    max: ItemValue | None = None


class ItemFilter(RetrievalMessage):
    """Which items may be found: those that fulfil all of it."""

    allowed: Annotated[list[ItemId], Field(max_length=MAX_IDS)] | None = None
    """Only these ids. Ids without an item are passed over."""
    excluded: Annotated[list[ItemId], Field(max_length=MAX_IDS)] = []
    """None of these ids."""
    equal: Annotated[dict[str, ItemValue | list[ItemValue]], Field(max_length=MAX_CONDITIONS)] = {}
    """By field of the catalogue: the value, or one of the values. A field that is a list has to hold one of them."""
    range: Annotated[dict[str, ItemRange], Field(max_length=MAX_CONDITIONS)] = {}
    """By field of the catalogue: the least and the greatest value."""


def opened(catalogue: ItemCatalogue, asked: ItemFilter) -> Bools:
    """(I,) the items that a filter lets through. Raises FilterRefused."""
    open_I = np.ones(len(catalogue), np.bool_)
    if asked.allowed is not None:
        open_I &= _among(catalogue, asked.allowed, "allowed")
    if asked.excluded:
        open_I &= ~_among(catalogue, asked.excluded, "excluded")
    for field, wanted in asked.equal.items():
        open_I &= _equal(_field(catalogue, field), field, wanted if isinstance(wanted, list) else [wanted])
    for field, bounds in asked.range.items():
        open_I &= _within(_field(catalogue, field), field, bounds)
    return open_I


def _among(catalogue: ItemCatalogue, ids: Sequence[ItemId], what: str) -> Bools:
    is_text = not pa.types.is_integer(catalogue.id_I.type)
    for each in ids:
        if isinstance(each, str) != is_text or (isinstance(each, int) and not 0 <= each < 1 << 64):
            raise FilterRefused(
                f"filter.{what}: {each!r:.100} is no id; ids are {'texts' if is_text else 'whole numbers from 0'}"
            )
    try:
        signs = [sign_of_text(each.encode()) if isinstance(each, str) else each for each in ids]
    except UnicodeEncodeError:
        raise FilterRefused(f"filter.{what}: a text has half a surrogate pair, which is not UTF-8") from None
    return are_among(catalogue.sign_I, np.unique(np.array(signs, np.uint64)))


def _field(catalogue: ItemCatalogue, name: str) -> pa.Array:
    if name not in catalogue.fields.column_names:
        raise FilterRefused(
            f"filter: items have no field {name!r:.100}; {nearest(name, catalogue.fields.column_names)}"
        )
    column = catalogue.fields[name]
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _equal(column: pa.Array, field: str, wanted: Sequence[ItemValue]) -> Bools:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        is_one = _equal(column.flatten(), field, wanted)
        parents = np.asarray(pc.list_parent_indices(column))
        found = np.zeros(len(column), np.bool_)
        found[parents[is_one]] = True
        return found
    if pa.types.is_integer(column.type):  # 2.0 is 2, and nothing is 2.5
        wanted = [
            int(each) if isinstance(each, float) and each.is_integer() else each
            for each in wanted
            if not isinstance(each, float) or each.is_integer()
        ]
    return _mask(pc.is_in(column, _typed(wanted, column.type, f"filter.equal.{field}")))


def _within(column: pa.Array, field: str, bounds: ItemRange) -> Bools:
    found = np.ones(len(column), np.bool_)
    for bound, compare in ((bounds.min, pc.greater_equal), (bounds.max, pc.less_equal)):
        if bound is not None:
            typed = _typed([bound], column.type, f"filter.range.{field}")[0]
            is_rounded = pa.types.is_floating(typed.type) and pa.types.is_integer(column.type)
            try:
                found &= _mask(compare(column.cast(typed.type, safe=False) if is_rounded else column, typed))
            except pa.ArrowException:
                raise FilterRefused(f"filter.range.{field}: the field is {column.type}, which has no order") from None
    return found


def _typed(wanted: Sequence[ItemValue], kind: pa.DataType, place: str) -> pa.Array:
    """Values of a filter as those of a field. Raises FilterRefused."""
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_timestamp(kind)
    for each in wanted:
        fits = (
            isinstance(each, str)
            if is_text
            else isinstance(each, bool)
            if pa.types.is_boolean(kind)
            else (isinstance(each, int | float) and not isinstance(each, bool))
        )
        if not fits:
            raise FilterRefused(f"{place}: {each!r:.100} cannot be compared; the field is {kind}")
    try:
        if pa.types.is_integer(kind) and any(isinstance(each, float) for each in wanted):
            return pa.array([float(each) for each in wanted], pa.float64())
        return pa.array(list(wanted)).cast(kind)
    except (pa.ArrowException, OverflowError) as error:
        raise FilterRefused(f"{place}: cannot be compared: {error}") from None


def _mask(found: pa.Array) -> Bools:
    return np.asarray(pc.fill_null(found, False))
