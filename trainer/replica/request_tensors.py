"""Tensors of a request for inference, from users as people write them: a value or a list of values for each slot."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.trainer.replica.inference_messages import LENGTHS, TEXT, TIME, WEIGHT, InvalidInference, is_timed
from headrace.trainer.replica.serving_model import ServingModel


def tensors_of(
    slot: Mapping[str, Any], users: Sequence[Mapping[str, Any]], *, may_lack: bool
) -> Iterator[dict[str, Any]]:
    """The tensors of one slot of users; `may_lack`: whether all may leave it out. Raises InvalidInference."""
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


def times_of(model: ServingModel, time_s: Sequence[float] | None) -> Iterator[dict[str, Any]]:
    """The tensor of the samples' times; none for a model that does not take them."""
    if time_s is not None and is_timed(model):
        yield {"name": TIME, "datatype": "FP64", "shape": [len(time_s)], "data": [*time_s]}


def _listed(value: Any) -> list[Any] | None:
    return value if value is None or isinstance(value, list) else [value]
