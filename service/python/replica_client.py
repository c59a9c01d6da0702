"""`Replica`: predictions and items of a replica over HTTP, by KServe's Open Inference Protocol v2 with raw tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from headrace import documents
from headrace.errors import Refused, SpecError, Unavailable
from headrace.service.python.inference_columns import Columns, Event, predictions_of, request_of
from headrace.service.python.rest_client import bearer, parsed_url
from headrace.service.python.rest_paths import quoted
from headrace.trainer.replica.inference_messages import DTYPES

CALL_S = 30.0
"""Longest time for one answer."""
HEAD_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class RetrievedItems:
    """The items of users, by one version."""

    items: pa.Table
    """Columns user (the number in the request), item, score; each user's best item first."""
    version: str
    """The version that answered."""
    cursor: tuple[str | None, ...]
    """By user, for the next page; None after the last one."""
    ranker_version: str | None = None
    """The version of the ranking model, if one scored the items."""


class Replica:
    """A replica, by its address, as in `Replica("http://127.0.0.1:8090")`. Use it as a context, or close it.

    Any other server of the protocol with one model works as well, for columns.
    """

    def __init__(self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(base_url=parsed_url(url), headers=bearer(token), timeout=CALL_S, transport=transport)
        self._name = ""

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<headrace replica at {self._http.base_url}>"

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    @property
    def name(self) -> str:
        """The name of its model: that of the job."""
        if not self._name:
            models = self._value("POST", "/v2/repository/index", json={"ready": True})
            match models:
                case [{"name": str(name)}]:
                    self._name = name
                case list():
                    raise Refused(f"{self._http.base_url} serves {len(models)} models, not one")
                case _:
                    raise Refused(f"{self._http.base_url} answered no list of models: it is no replica")
        return self._name

    def model(self) -> dict[str, Any]:
        """Inputs, outputs, kept versions, and the version that is served, with its rows and its time."""
        found: dict[str, Any] = self._value("GET", f"/v2/models/{quoted(self.name)}")
        return found

    def predict(
        self,
        columns: Columns | None = None,
        *,
        events: Sequence[Event] | None = None,
        event_time: Sequence[float] | None = None,
        outputs: Sequence[str] = (),
    ) -> pa.Table:
        """Predict samples: a row for each, a column for each output; the version is in the table's metadata.

        `columns`: a number, a text, or a list of them for each sample and slot, as a dictionary or an Arrow table;
        slots that the job fills may be left out. `events`: raw events instead, of a job with pipe.kind = "columns";
        column "event" then has the number of each sample's event. `event_time`: unix seconds at which windows of
        counters end; default: now. Raises SpecError, Refused, Unavailable.
        """
        request = request_of(columns, events, event_time, outputs)
        raw = [each.pop("data") for each in request.get("inputs", ())]
        for tensor, data in zip(request.get("inputs", ()), raw, strict=True):
            tensor["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps({**request, "parameters": {"binary_data_output": True}}).encode()
        answer = self._asked(
            "POST",
            f"/v2/models/{quoted(self.name)}/infer",
            content=b"".join([head, *raw]),
            headers={HEAD_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"},
        )
        try:
            return _predictions(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # ValueError: also pyarrow's
            raise Refused(f"{self._http.base_url} answered no predictions of the protocol: {error!r:.200}") from None

    def retrieve(
        self,
        users: Sequence[Mapping[str, Any]] | None = None,
        *,
        events: Sequence[Event] | None = None,
        event_time: Sequence[float] | None = None,
        k: int = 10,
        allowed: Sequence[str | int] | None = None,
        excluded: Sequence[str | int] = (),
        equal: Mapping[str, Any] | None = None,
        range: Mapping[str, Mapping[str, Any]] | None = None,
        rank_by: str | None = None,
        rank_output: str | None = None,
        candidates: int | None = None,
        cursor: Sequence[str | None] | None = None,
    ) -> RetrievedItems:
        """The best items for users, of a job with `[retrieval]`.

        `users`: each user's slots, a value or a list of them; or raw `events`, as in `predict`. `event_time`: unix
        seconds of each of them, at which windows of counters end; default: now. `allowed`, `excluded`: ids of items.
        `equal`: by field of the catalogue, a value or several; `range`: {"min": .., "max": ..} by field. `rank_by`: a
        ranking model of the replica, which scores `candidates` retrieved items (default: k) by its `rank_output`
        (default: its first task). `cursor`: that of the page before, by user.
        Raises SpecError, Refused, Unavailable.
        """
        given: dict[str, Any] = {"users": users, "events": events, "event_time": event_time, "cursor": cursor}
        given |= {"rank_by": rank_by, "rank_output": rank_output, "candidates": candidates}
        conditions = {"allowed": allowed, "excluded": excluded or None, "equal": equal, "range": range}
        request: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        request |= {"k": k, "filter": {name: value for name, value in conditions.items() if value is not None}}
        answer = self._value("POST", f"/v2/models/{quoted(self.name)}/retrieve", json=request)
        try:
            return _retrieved(answer)
        except (KeyError, TypeError, ValueError) as error:  # ValueError: also pyarrow's
            raise Refused(f"{self._http.base_url} answered no items: {error!r:.200}") from None

    def _value(self, method: str, path: str, **more: Any) -> Any:
        return documents.parse(self._asked(method, path, **more).content, f"the answer of {path}")

    def _asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise Unavailable(f"{self._http.base_url} does not answer: {error}") from error
        if answer.is_success:
            return answer
        try:
            why = str(documents.parse_object(answer.content, path)["error"])
        except (documents.InvalidDocument, KeyError):
            why = f"answered with status {answer.status_code}"
        if answer.status_code in (400, 422):
            raise SpecError(why)
        raise (Unavailable if answer.status_code in (429, 502, 503) else Refused)(f"{self._http.base_url}: {why}")


def _retrieved(answer: Any) -> RetrievedItems:
    found = answer["results"]
    users = [number for number, each in enumerate(found) for _ in each["items"]]
    ids = [item for each in found for item in each["items"]]
    is_text = bool(ids) and isinstance(ids[0], str)
    columns = {
        "user": pa.array(users, pa.int64()),
        "item": pa.array(ids, pa.string() if is_text else pa.uint64()),
        "score": pa.array([score for each in found for score in each["scores"]], pa.float32()),
    }
    ranked, cursors = answer.get("ranked_by"), tuple(each["cursor"] for each in found)
    ranker = None if ranked is None else str(ranked["model_version"])
    return RetrievedItems(pa.table(columns), str(answer["model_version"]), cursors, ranker)


def _predictions(answer: httpx.Response) -> pa.Table:
    """The outputs of an answer."""
    length = int(answer.headers.get(HEAD_LENGTH, len(answer.content)))
    told: Mapping[str, Any] = documents.parse_object(answer.content[:length], "the answer")
    outputs, place = {}, length
    for each in told["outputs"]:
        kind = DTYPES[each["datatype"]]
        size = each.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = np.array(each["data"], kind)
        else:
            values = np.frombuffer(answer.content[place : place + size], kind)
            place += size
            if each["datatype"] == "BF16":
                values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        outputs[each["name"]] = values.reshape(each["shape"])
    return predictions_of(outputs, str(told.get("model_version", "")))
