"""Answers requests for the best items of users: `POST /v2/models/NAME/retrieve`.

The messages are here, the index is trainer.replica.item_index. One answer is of one version: the users' vectors are
computed from the rows and weights by which the items' were.

Shapes: B users, I items.
"""

import base64
import binascii
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, Field, JsonValue

from headrace.errors import BadInput
from headrace.keys import are_among, sign_of_text
from headrace.trainer.replica.inference_handler import check_name
from headrace.trainer.replica.inference_messages import LENGTHS, TEXT, WEIGHT, InvalidInference, RequestReader
from headrace.trainer.replica.item_catalogue import ItemCatalogue
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState
from headrace.trainer.replica.serving_model import ServingModel
from headrace.validation import nearest

MAX_K = 10_000
"""Most items of one page."""
MAX_USERS = 1024
MAX_SAMPLES = 4096
"""Most samples of the events of one request."""
MAX_FOUND = 1 << 17
"""Most items of one answer, for all users together."""
MAX_IDS = 100_000
"""Most ids in one list of a filter."""
MAX_CONDITIONS = 64
"""Most conditions on fields in a filter."""
TRIES = 10
"""Tries of one request while the model keeps changing."""
CURSOR = struct.Struct("<fq")
"""Score and place of the last item of a page."""

Bools = NDArray[np.bool_]
ItemId = str | int
ItemValue = str | int | float | bool


class _Message(BaseModel):
    model_config = {"extra": "forbid", "use_attribute_docstrings": True, "frozen": True}


class ItemRange(_Message):
    """Bounds of a field; both are within it."""

    min: ItemValue | None = None
    max: ItemValue | None = None


class ItemFilter(_Message):
    """Which items may be found: those that fulfil all of it."""

    allowed: Annotated[list[ItemId], Field(max_length=MAX_IDS)] | None = None
    """Only these ids. Ids without an item are passed over."""
    excluded: Annotated[list[ItemId], Field(max_length=MAX_IDS)] = []
    """None of these ids."""
    equal: Annotated[dict[str, ItemValue | list[ItemValue]], Field(max_length=MAX_CONDITIONS)] = {}
    """By field of the catalogue: the value, or one of the values. A field that is a list has to hold one of them."""
    range: Annotated[dict[str, ItemRange], Field(max_length=MAX_CONDITIONS)] = {}
    """By field of the catalogue: the least and the greatest value."""


class RetrievalRequest(_Message):
    """The users, and how many items each is to get. Either users or events."""

    users: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_USERS)] | None = None
    """Each user's slots: a value or a list of values. Slots that the job fills may be left out."""
    events: Annotated[list[JsonValue], Field(max_length=MAX_USERS)] | None = None
    """Raw events instead, with `pipe.kind = "columns"`: the user is that of an event's first sample."""
    event_time: list[float] | None = None
    """Unix seconds of the events, at which windows of counters end; default: now."""
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    """Most items for each user."""
    filter: ItemFilter = ItemFilter()
    cursor: list[str | None] | None = None
    """Next page: for each user the cursor of its last answer; null: from the best item on."""


class UserItems(_Message):
    """The items of one user, best first."""

    items: list[ItemId]
    scores: list[float]
    """The product of the user's and the item's vector: their cosine with the model two_tower."""
    cursor: str | None
    """For the next page; null after the last one."""


class RetrievalAnswer(_Message):
    """The items of all users, by one version."""

    model_name: str
    model_version: str
    results: list[UserItems]
    """In the order of the request."""


class RetrievalUnavailable(NoVersionLoaded):
    """Items cannot be searched now."""


class Retrieval:
    """Answers requests for items. Any thread."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._reader: RequestReader | None = None

    def answer(self, name: str, asked: RetrievalRequest) -> RetrievalAnswer:
        """Raises NoSuchModel, NoVersionLoaded, BadInput."""
        check_name(self._state, name)
        for _ in range(TRIES):
            model = self._state.model()
            told = model.described.get("retrieval")
            if told is None:
                raise InvalidInference(f"model {name!r} retrieves no items: its job file has no section [retrieval]")
            reader = self._reader_of(model)
            inputs = reader.inputs(request_of(asked, model, told["item_slots"]))
            done = self._state.users(model, inputs)
            if done is None:  # the model changed meanwhile
                continue
            kept, index, user_BV = done
            if index is None:
                why = self._state.index_trouble or "no catalogue was read yet"
                raise RetrievalUnavailable(f"no items can be searched: {why}")
            if inputs.events is not None:
                user_BV = user_BV[_firsts(inputs.events)]
            if not np.isfinite(user_BV).all():
                raise BadInput("a user's vector is not finite for these inputs")
            if len(user_BV) * asked.k > MAX_FOUND:
                raise InvalidInference(
                    f"{len(user_BV)} users with {asked.k} items each; at most {MAX_FOUND:,} in one request"
                )
            open_I = index.there_I & opened(index.catalogue, asked.filter)
            found = index.search(user_BV, asked.k, open_I, begins(asked.cursor, len(user_BV)))
            results = [_items(index.catalogue, scores, places, asked.k) for scores, places in found]
            return RetrievalAnswer(model_name=name, model_version=self._state.name_of(kept), results=results)
        raise NoVersionLoaded("the model keeps changing; try again")

    def _reader_of(self, model: ServingModel) -> RequestReader:
        reader = self._reader
        if reader is None or reader.model is not model:
            self._reader = reader = RequestReader(model, MAX_SAMPLES)
        return reader


def request_of(asked: RetrievalRequest, model: ServingModel, item_slots: Sequence[str]) -> dict[str, Any]:
    """The request for inference with these users, without values of the item. Raises InvalidInference."""
    if (asked.users is None) == (asked.events is None):
        raise InvalidInference('a request has either "users" or "events"')
    if asked.events is not None:
        times = {} if asked.event_time is None else {"event_time": asked.event_time}
        return {"events": asked.events, **times}
    users = asked.users or []
    if not users:
        raise InvalidInference('"users" is empty; send at least one')
    if asked.event_time is not None:
        raise InvalidInference('"event_time" goes with "events"')
    of_users = [slot for slot in model.slots if slot["name"] not in item_slots and slot["kind"] != "meta"]
    known = [slot["name"] for slot in of_users] + [slot["name"] + WEIGHT for slot in of_users if slot.get("weighted")]
    for number, user in enumerate(users):
        if unknown := [name for name in user if name not in known]:
            what = "is a slot of the item" if unknown[0] in item_slots else f"is no slot; {nearest(unknown[0], known)}"
            raise InvalidInference(f"users[{number}]: {unknown[0]!r:.100} {what}")
    tensors: list[dict[str, Any]] = []
    for slot in model.slots:
        if slot["name"] in item_slots:
            tensors.append(_nothing(slot, len(users)))
        elif slot["kind"] != "meta":
            tensors += _tensors(slot, users, may_lack=slot["name"] in model.memories)
    return {"inputs": tensors}


def _nothing(slot: Mapping[str, Any], num_users: int) -> dict[str, Any]:
    if slot["kind"] == "dense":
        size = int(slot["size"])
        return {
            "name": slot["name"],
            "datatype": "FP32",
            "shape": [num_users, size],
            "data": [0.0] * (num_users * size),
        }
    kind = TEXT if slot["values"] == "string" else "UINT64"
    return {"name": slot["name"], "datatype": kind, "shape": [num_users, 0], "data": []}


def _tensors(
    slot: Mapping[str, Any], users: Sequence[Mapping[str, Any]], *, may_lack: bool
) -> Iterator[dict[str, Any]]:
    """The tensors of one slot of the users."""
    name = slot["name"]
    lists = [_listed(user.get(name)) for user in users]
    if may_lack and all(each is None for each in lists):
        return
    for number, each in enumerate(lists):
        if each is None:
            raise InvalidInference(f"users[{number}]: has no {name!r}; write an empty list for a slot without values")
    values = [value for each in lists for value in each or ()]
    if slot["kind"] == "dense":
        size = int(slot["size"])
        if wrong := [number for number, each in enumerate(lists) if len(each or ()) != size]:
            raise InvalidInference(
                f"users[{wrong[0]}]: {name!r} has {len(lists[wrong[0]] or ())} numbers; the slot has {size}"
            )
        yield {"name": name, "datatype": "FP64", "shape": [len(users), size], "data": values}
        return
    kind = TEXT if slot["values"] == "string" else "UINT64"
    yield {"name": name, "datatype": kind, "shape": [len(values)], "data": values}
    lengths = [len(each or ()) for each in lists]
    yield {"name": name + LENGTHS, "datatype": "INT64", "shape": [len(users)], "data": lengths}
    weights = [_listed(user.get(name + WEIGHT)) for user in users]
    if any(each is not None for each in weights):
        data = [value for each, count in zip(weights, lengths, strict=True) for value in each or [1.0] * count]
        yield {"name": name + WEIGHT, "datatype": "FP32", "shape": [len(data)], "data": data}


def _listed(value: Any) -> list[Any] | None:
    return value if value is None or isinstance(value, list) else [value]


def _firsts(events: Sequence[int]) -> list[int]:
    """The number of each event's first sample."""
    return [at for at, event in enumerate(events) if not at or event != events[at - 1]]


def opened(catalogue: ItemCatalogue, asked: ItemFilter) -> Bools:
    """(I,) the items that a filter lets through. Raises InvalidInference."""
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
            raise InvalidInference(
                f"filter.{what}: {each!r:.100} is no id; ids are {'texts' if is_text else 'whole numbers from 0'}"
            )
    try:
        signs = [sign_of_text(each.encode()) if isinstance(each, str) else each for each in ids]
    except UnicodeEncodeError:
        raise InvalidInference(f"filter.{what}: a text has half a surrogate pair, which is not UTF-8") from None
    return are_among(catalogue.sign_I, np.unique(np.array(signs, np.uint64)))


def _field(catalogue: ItemCatalogue, name: str) -> pa.Array:
    if name not in catalogue.fields.column_names:
        raise InvalidInference(
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
                raise InvalidInference(
                    f"filter.range.{field}: the field is {column.type}, which has no order"
                ) from None
    return found


def _typed(wanted: Sequence[ItemValue], kind: pa.DataType, place: str) -> pa.Array:
    """Values of a filter as those of a field. Raises InvalidInference."""
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
            raise InvalidInference(f"{place}: {each!r:.100} cannot be compared; the field is {kind}")
    try:
        if pa.types.is_integer(kind) and any(isinstance(each, float) for each in wanted):
            return pa.array([float(each) for each in wanted], pa.float64())
        return pa.array(list(wanted)).cast(kind)
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInference(f"{place}: cannot be compared: {error}") from None


def _mask(found: pa.Array) -> Bools:
    return np.asarray(pc.fill_null(found, False))


def begins(cursors: Sequence[str | None] | None, num_users: int) -> list[tuple[float, int]]:
    """By user the score and place after which a page begins. Raises InvalidInference."""
    if cursors is None:
        return [(float("inf"), -1)] * num_users
    if len(cursors) != num_users:
        raise InvalidInference(f'"cursor" has {len(cursors)} entries for {num_users} users; write null for one without')
    return [(float("inf"), -1) if each is None else _begin(each) for each in cursors]


def _begin(cursor: str) -> tuple[float, int]:
    try:
        score, place = CURSOR.unpack(base64.urlsafe_b64decode(cursor.encode("ascii")))
    except (struct.error, binascii.Error, ValueError):
        raise InvalidInference(f"{cursor!r:.100} is no cursor; send one of an answer as it is") from None
    if not np.isfinite(score):
        raise InvalidInference(f"{cursor!r:.100} is no cursor; send one of an answer as it is")
    return float(score), int(place)


def _items(catalogue: ItemCatalogue, score_K: NDArray[np.float32], at_K: NDArray[np.int64], most: int) -> UserItems:
    ids = catalogue.id_I.take(pa.array(at_K)).to_pylist()
    full = len(ids) == most
    cursor = base64.urlsafe_b64encode(CURSOR.pack(score_K[-1], at_K[-1])).decode() if full else None
    return UserItems(items=ids, scores=score_K.tolist(), cursor=cursor)
