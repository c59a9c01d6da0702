"""Scores retrieved items by a ranking model: another model that the replica serves, with rows and versions of its own.

A candidate is a sample of the ranking model: slots that the catalogue has come from the item, all others from the user.

Shapes: B users, N candidates of all users.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.trainer.replica.inference_messages import (
    MAX_VALUES,
    WEIGHT,
    InvalidInference,
    RequestReader,
    checked_outputs,
)
from headrace.trainer.replica.replica_state import NoVersionLoaded, ReplicaState
from headrace.trainer.replica.request_tensors import tensors_of, times_of
from headrace.trainer.replica.serving_model import ServingModel
from headrace.trainer.serving.item_catalogue import ItemCatalogue
from headrace.trainer.serving.slot_layout import F32, I64
from headrace.validation import no_such

MAX_RANKED = 1 << 13
"""Most candidates of one request, for all users together."""
TRIES = 10
"""Tries of one request while the ranking model keeps changing."""


class CandidateRanker:
    """A ranking model that follows its own job. Any thread."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._reader: RequestReader | None = None

    @property
    def name(self) -> str | None:
        """The name of its job; None before a version is loaded."""
        served = self._state.served
        return None if served is None else served.version.job

    @property
    def version(self) -> str | None:
        """The served version."""
        served = self._state.served
        return None if served is None else self._state.name_of(served)

    def slots(self) -> list[str]:
        """The slots that it reads. Raises NoVersionLoaded."""
        return [slot["name"] for slot in self._state.model().slots if slot["kind"] != "meta"]

    def score(
        self,
        users: Sequence[Mapping[str, Any]],
        catalogue: ItemCatalogue,
        found: Sequence[I64],
        output: str | None,
        time_s: Sequence[float] | None = None,
    ) -> tuple[str, list[F32]]:
        """The version, and by user the scores of the items at the places `found`. `time_s`: of the users.

        Raises InvalidInference, NoVersionLoaded, BadInput.
        """
        for _ in range(TRIES):
            model = self._state.model()
            wanted = output or model.outputs[0]
            if wanted not in model.outputs:
                raise InvalidInference(f"rank_output: {no_such('output', wanted, model.outputs)}")
            reader = self._reader_of(model)
            inputs = reader.inputs({"inputs": _tensors(model, users, catalogue, found, time_s)})
            done = self._state.predict(model, inputs)
            if done is None:  # the model changed meanwhile
                continue
            kept, outputs = done
            score_N: NDArray[np.float32] = checked_outputs(outputs, [wanted], None)[wanted]
            if score_N.ndim != 1:
                raise InvalidInference(f"rank_output: {wanted!r} has not one number for each candidate")
            ends = np.cumsum([len(each) for each in found])[:-1]
            return self._state.name_of(kept), np.split(score_N, ends)
        raise NoVersionLoaded("the ranking model keeps changing; try again")

    def _reader_of(self, model: ServingModel) -> RequestReader:
        reader = self._reader
        if reader is None or reader.model is not model:
            self._reader = reader = RequestReader(model, MAX_RANKED)
        return reader


def ranker_of(rankers: Sequence[CandidateRanker], name: str) -> CandidateRanker:
    """The ranker of a name. Raises InvalidInference, and NoVersionLoaded while some have no version yet."""
    for each in rankers:
        if each.name == name:
            return each
    names = [each.name for each in rankers]
    if None in names:
        raise NoVersionLoaded(f"rank_by: no version of {name!r} is loaded yet; try again soon")
    if not rankers:
        raise InvalidInference("rank_by: this replica serves no ranking model; start it with --ranker")
    raise InvalidInference(f"rank_by: {no_such('ranking model', name, [each for each in names if each])}")


def _tensors(
    model: ServingModel,
    users: Sequence[Mapping[str, Any]],
    catalogue: ItemCatalogue,
    found: Sequence[I64],
    time_s: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """The tensors of all candidates. Raises InvalidInference."""
    slots = [slot for slot in model.slots if slot["kind"] != "meta"]
    of_items = [
        name
        for slot in slots
        for name in (slot["name"], slot["name"] + WEIGHT)
        if name in catalogue.fields.column_names
    ]
    for slot in slots:
        name = slot["name"]
        if name in of_items or name in model.memories:
            continue
        for number, user in enumerate(users):
            if user.get(name) is None:
                raise InvalidInference(
                    f"users[{number}]: has no {name!r}; the ranking model reads it, and items have no such field"
                )
    names = {name for slot in slots for name in (slot["name"], slot["name"] + WEIGHT)} - {*of_items}
    num_values = sum(len(at_K) * _num_values(user, names) for user, at_K in zip(users, found, strict=True))
    if num_values > MAX_VALUES:
        raise InvalidInference(
            f"the candidates have {num_values:,} values of their users; at most {MAX_VALUES:,}: ask for fewer "
            '"candidates", or send shorter lists'
        )
    places = pa.array(np.concatenate([np.empty(0, np.int64), *found]))
    items = catalogue.fields.select(of_items).take(places).to_pylist() if of_items else [{}] * len(places)
    owners = [number for number, each in enumerate(found) for _ in range(len(each))]
    candidates = [
        {**users[owner], **{name: [] if value is None else value for name, value in item.items()}}
        for owner, item in zip(owners, items, strict=True)
    ]
    tensors = [*times_of(model, None if time_s is None else [time_s[owner] for owner in owners])]
    for slot in slots:
        tensors += tensors_of(slot, candidates, may_lack=slot["name"] in model.memories)
    return tensors


def _num_values(user: Mapping[str, Any], names: Set[str]) -> int:
    """Values of a user's slots of these names."""
    return sum(len(user[name]) if isinstance(user[name], list) else 1 for name in names if name in user)
