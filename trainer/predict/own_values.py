"""The values of a job's own metrics over all parts, computed in a process of its own: they are the user's code.

python -m headrace.trainer.predict.own_values < {"own": [...], "folder": ..., "vectors": {task: {metric: [...]}}}
-> {"values": {task: {metric: value}}} or {"error": ...}
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace import documents
from headrace.errors import HeadraceError
from headrace.trainer.models.torch_subprocess import answer_of
from headrace.trainer.own_metrics import metrics_of


def own_values(own: Sequence[str], folder: Path, vectors: Mapping[str, Mapping[str, list[int]]]) -> dict[str, Any]:
    """By task and name: the value, None where it is not defined. Raises SpecError, HeadraceError."""
    if not any(vectors.values()):
        return {}
    asked = {"own": list(own), "folder": str(folder), "vectors": vectors}
    found: dict[str, Any] = answer_of("headrace.trainer.predict.own_values", asked)["values"]
    return found


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        metrics = {metric.name: metric for metric in metrics_of(asked["own"], Path(asked["folder"]))}
        return {
            "values": {
                task: {name: metrics[name].value(np.array(vector, np.int64)) for name, vector in vectors.items()}
                for task, vectors in asked["vectors"].items()
            }
        }
    except HeadraceError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(_answer(documents.parse_object(sys.stdin.buffer.read(), "the vectors"))))
