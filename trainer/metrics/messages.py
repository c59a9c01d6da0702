"""Messages of ranks to rank 0 at a close, as columns of bytes with JSON. Nothing is pickled."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import documents
from headrace.trainer.metrics.samples import Columns
from headrace.trainer.metrics.slices import Candidates
from headrace.trainer.metrics.tensor_totals import TensorTotal


def columns_of(
    tensors: Mapping[str, TensorTotal], parts: Mapping[int, int], candidates: Mapping[str, Candidates]
) -> dict[str, NDArray[Any]]:
    """The message of one rank. It has the same names and types on every rank."""
    said = {
        "tensors": {name: total.to_json() for name, total in tensors.items()},
        "parts": {str(part): count for part, count in parts.items()},
        "slices": {
            slot: [[str(value), count, each.text[value]] for value, count in each.count.items()]
            for slot, each in candidates.items()
        },
    }
    return {"said": np.frombuffer(json.dumps(said).encode(), np.uint8)}


def _said(columns: Columns) -> dict[str, Any]:
    return documents.parse_object(columns["said"].tobytes(), "what a trainer measured")


def merge_tensors(ranks: Sequence[Columns]) -> dict[str, TensorTotal]:
    """Totals of the tensors of all ranks."""
    merged: dict[str, TensorTotal] = {}
    for columns in ranks:
        for name, row in _said(columns)["tensors"].items():
            merged.setdefault(name, TensorTotal()).merge(TensorTotal.of_json(row))
    return merged


def merge_times(ranks: Sequence[Columns]) -> dict[int, int]:
    """Number of samples of all ranks by part of the window."""
    merged: dict[int, int] = {}
    for columns in ranks:
        for part, count in _said(columns)["parts"].items():
            merged[int(part)] = merged.get(int(part), 0) + count
    return merged


def candidates_of(columns: Columns, slot: str) -> Candidates:
    """A rank's candidates for the values of a slice."""
    rows = _said(columns)["slices"][slot]
    return Candidates({int(v): count for v, count, _ in rows}, {int(v): text for v, _, text in rows})
