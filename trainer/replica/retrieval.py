"""Answers requests for the best items of users: `POST /v2/models/NAME/retrieve`.

The messages are here, filters are trainer.serving.item_filter, the index is trainer.serving.item_index. One answer is
of one version: the users' vectors are computed from the rows and weights by which the items' were.

Shapes: B users, I items.
"""

import base64
import binascii
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from headrace.errors import BadInput
from headrace.trainer.replica.candidate_ranking import MAX_RANKED, CandidateRanker, ranker_of
from headrace.trainer.replica.inference_handler import check_name
from headrace.trainer.replica.inference_messages import TEXT, WEIGHT, InvalidInference, RequestReader
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState
from headrace.trainer.replica.request_tensors import tensors_of, times_of
from headrace.trainer.replica.serving_model import ServingModel
from headrace.trainer.serving.item_catalogue import ItemCatalogue
from headrace.trainer.serving.item_filter import ItemFilter, ItemId, RetrievalMessage, opened
from headrace.validation import nearest

MAX_K = 10_000
"""Most items of one page."""
MAX_USERS = 1024
MAX_SAMPLES = 4096
"""Most samples of the events of one request."""
MAX_FOUND = 1 << 17
"""Most items of one answer, for all users together."""
TRIES = 10
"""Tries of one request while the model keeps changing."""
CURSOR = struct.Struct("<fq8s")
"""Score and place of the last item of a page, and `user_mark` of its user."""


class RetrievalRequest(RetrievalMessage):
    """The users, and how many items each is to get. Either users or events."""

    users: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_USERS)] | None = None
    """Each user's slots: a value or a list of values. Slots that the job fills may be left out."""
    events: Annotated[list[JsonValue], Field(max_length=MAX_USERS)] | None = None
    """Raw events instead, with `pipe.kind = "columns"`: the user is that of an event's first sample."""
    event_time: list[float] | None = None
    """Unix seconds of the users or events, at which windows of counters end; default: now."""
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    """Most items for each user."""
    filter: ItemFilter = ItemFilter()
    rank_by: str | None = None
    """The name of a ranking model that the replica serves (`--ranker`): it scores the retrieved items."""
    rank_output: str | None = None
    """The output of the ranking model that is the score; default: that of its first task."""
    candidates: Annotated[int, Field(ge=1, le=MAX_RANKED)] | None = None
    """With `rank_by`: items that are retrieved for each user, of which the k best by the ranking model come; default:
    k."""
    cursor: list[str | None] | None = None
    """Next page: for each user the cursor of its last answer; null: from the best item on. The user has to be the same,
    with all its values; the version may be another one."""


class UserItems(RetrievalMessage):
    """The items of one user, best first."""

    items: list[ItemId]
    scores: list[float]
    """The product of the user's and the item's vector: with the model two_tower their cosine, and its `popularity`, if
    it has that. With `rank_by`, the output of the ranking model."""
    cursor: str | None
    """For the next page; null after the last one."""


class RankingModel(RetrievalMessage):
    """The model that scored the items of an answer."""

    model_name: str
    model_version: str


class RetrievalAnswer(RetrievalMessage):
    """The items of all users, by one version."""

    model_name: str
    model_version: str
    results: list[UserItems]
    """In the order of the request."""
    ranked_by: RankingModel | None = None
    """The ranking model, where one was asked for, and its version."""


class RetrievalUnavailable(NoVersionLoaded):
    """Items cannot be searched now."""


class Retrieval:
    """Answers requests for items. Any thread."""

    def __init__(self, state: ReplicaState, rankers: Sequence[CandidateRanker] = ()) -> None:
        self._state, self._rankers = state, tuple(rankers)
        self._reader: RequestReader | None = None

    def answer(self, name: str, asked: RetrievalRequest) -> RetrievalAnswer:
        """Raises NoSuchModel, NoVersionLoaded, BadInput."""
        check_name(self._state, name)
        ranker = self._ranker(asked)
        for _ in range(TRIES):
            model = self._state.model()
            told = model.described.get("retrieval")
            if told is None:
                raise InvalidInference(f"model {name!r} retrieves no items: its job file has no section [retrieval]")
            reader = self._reader_of(model)
            also = () if ranker is None else ranker.slots()
            inputs = reader.inputs(request_of(asked, model, told["item_slots"], also))
            done = self._state.users(model, inputs)
            if done is None:  # the model changed meanwhile
                continue
            kept, index, user_BV = done
            if index is None:
                why = self._state.index_trouble or "no catalogue was read yet"
                raise RetrievalUnavailable(f"no items can be searched: {why}")
            told_of: Sequence[JsonValue] = asked.users or ()
            if inputs.events is not None:
                firsts = _firsts(inputs.events)
                user_BV, told_of = user_BV[firsts], [(asked.events or [])[inputs.events[at]] for at in firsts]
            if not np.isfinite(user_BV).all():
                raise BadInput("a user's vector is not finite for these inputs")
            most = asked.k if ranker is None else max(asked.k, asked.candidates or 0)
            room = MAX_FOUND if ranker is None else MAX_RANKED
            if len(user_BV) * most > room:
                raise InvalidInference(f"{len(user_BV)} users with {most} items each; at most {room:,} in one request")
            open_I = index.there_I & opened(index.catalogue, asked.filter)
            marks = [user_mark(each) for each in told_of]
            found = index.search(user_BV, most, open_I, begins(asked.cursor, marks))
            results = [
                _items(index.catalogue, scores, places, most, mark)
                for (scores, places), mark in zip(found, marks, strict=True)
            ]
            by = None
            if ranker is not None:
                results, by = _ranked(asked, ranker, index.catalogue, [at_K for _, at_K in found])
            version = self._state.name_of(kept)
            return RetrievalAnswer(model_name=name, model_version=version, results=results, ranked_by=by)
        raise NoVersionLoaded("the model keeps changing; try again")

    def _ranker(self, asked: RetrievalRequest) -> CandidateRanker | None:
        """Raises InvalidInference, NoVersionLoaded."""
        if asked.rank_by is None:
            if asked.candidates is not None or asked.rank_output is not None:
                raise InvalidInference('"candidates" and "rank_output" go with "rank_by"')
            return None
        if asked.users is None or asked.cursor is not None:
            raise InvalidInference('"rank_by" goes with "users", and without "cursor": ask for more candidates instead')
        return ranker_of(self._rankers, asked.rank_by)

    def _reader_of(self, model: ServingModel) -> RequestReader:
        reader = self._reader
        if reader is None or reader.model is not model:
            self._reader = reader = RequestReader(model, MAX_SAMPLES)
        return reader


def _ranked(
    asked: RetrievalRequest, ranker: CandidateRanker, catalogue: ItemCatalogue, found: Sequence[NDArray[np.int64]]
) -> tuple[list[UserItems], RankingModel]:
    """The k best of the retrieved items by the ranking model; equal ones as they were retrieved."""
    assert asked.rank_by is not None and asked.users is not None
    version, scores = ranker.score(asked.users, catalogue, found, asked.rank_output, asked.event_time)
    results = []
    for score_K, at_K in zip(scores, found, strict=True):
        best = np.argsort(-score_K, kind="stable")[: asked.k]
        ids = catalogue.id_I.take(pa.array(at_K[best])).to_pylist()
        results.append(UserItems(items=ids, scores=score_K[best].tolist(), cursor=None))
    return results, RankingModel(model_name=asked.rank_by, model_version=version)


def request_of(
    asked: RetrievalRequest, model: ServingModel, item_slots: Sequence[str], also: Sequence[str] = ()
) -> dict[str, Any]:
    """The request for inference with these users, without values of the item. `also`: slots that users may have for
    another model. Raises InvalidInference."""
    if (asked.users is None) == (asked.events is None):
        raise InvalidInference('a request has either "users" or "events"')
    if asked.events is not None:
        times = {} if asked.event_time is None else {"event_time": asked.event_time}
        return {"events": asked.events, **times}
    users = asked.users or []
    if not users:
        raise InvalidInference('"users" is empty; send at least one')
    if asked.event_time is not None and len(asked.event_time) != len(users):
        raise InvalidInference(f'"event_time" must be a list of {len(users)} numbers, one for each user')
    of_users = [slot for slot in model.slots if slot["name"] not in item_slots and slot["kind"] != "meta"]
    known = [slot["name"] for slot in of_users] + [slot["name"] + WEIGHT for slot in of_users if slot.get("weighted")]
    for number, user in enumerate(users):
        if unknown := [name for name in user if name not in known and name.removesuffix(WEIGHT) not in also]:
            what = "is a slot of the item" if unknown[0] in item_slots else f"is no slot; {nearest(unknown[0], known)}"
            raise InvalidInference(f"users[{number}]: {unknown[0]!r:.100} {what}")
    tensors = [*times_of(model, asked.event_time)]
    for slot in model.slots:
        if slot["name"] in item_slots:
            tensors.append(_nothing(slot, len(users)))
        elif slot["kind"] != "meta":
            tensors += tensors_of(slot, users, may_lack=slot["name"] in model.memories)
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


def _firsts(events: Sequence[int]) -> list[int]:
    """The number of each event's first sample."""
    return [at for at, event in enumerate(events) if not at or event != events[at - 1]]


def user_mark(told: JsonValue) -> bytes:
    """A hash of what a request says of a user: a cursor goes with it."""
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).digest()


def begins(cursors: Sequence[str | None] | None, marks: Sequence[bytes]) -> list[tuple[float, int]]:
    """By user the score and place after which a page begins. Raises InvalidInference."""
    if cursors is None:
        return [(float("inf"), -1)] * len(marks)
    if len(cursors) != len(marks):
        raise InvalidInference(
            f'"cursor" has {len(cursors)} entries for {len(marks)} users; write null for one without'
        )
    return [
        (float("inf"), -1) if each is None else _begin(each, number, mark)
        for number, (each, mark) in enumerate(zip(cursors, marks, strict=True))
    ]


def _begin(cursor: str, number: int, mark: bytes) -> tuple[float, int]:
    try:
        score, place, of = CURSOR.unpack(base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True))
    except (struct.error, binascii.Error, ValueError):
        raise InvalidInference(f"{cursor!r:.100} is no cursor; send one of an answer as it is") from None
    if not np.isfinite(score):
        raise InvalidInference(f"{cursor!r:.100} is no cursor; send one of an answer as it is")
    if of != mark:
        raise InvalidInference(
            f"cursor[{number}] is of another user, or its values have changed; send the same user, or null"
        )
    return float(score), int(place)


def _items(
    catalogue: ItemCatalogue, score_K: NDArray[np.float32], at_K: NDArray[np.int64], most: int, mark: bytes
) -> UserItems:
    ids = catalogue.id_I.take(pa.array(at_K)).to_pylist()
    full = len(ids) == most
    cursor = base64.urlsafe_b64encode(CURSOR.pack(score_K[-1], at_K[-1], mark)).decode() if full else None
    return UserItems(items=ids, scores=score_K.tolist(), cursor=cursor)
