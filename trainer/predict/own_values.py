"""The values of a job's own metrics over all parts, computed in a process of its own: they are the user's code.

python -m headrace.trainer.predict.own_values < {"own": [...], "folder": ..., "vectors": {task: {metric: [...]}}}
-> {"values": {task: {metric: value}}} or {"error": ...}
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.trainer.models.torch_subprocess import answer_of, reply
from headrace.trainer.own_metrics import metrics_of


def own_values(own: Sequence[str], folder: Path, vectors: Mapping[str, Mapping[str, list[int]]]) -> dict[str, Any]:
    """By task and name: the value, None where it is not defined. Raises SpecError, HeadraceError."""
    if not any(vectors.values()):
        return {}
    asked = {"own": list(own), "folder": str(folder), "vectors": vectors}
    found: dict[str, Any] = answer_of("headrace.trainer.predict.own_values", asked)["values"]
    return found


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {metric.name: metric for metric in metrics_of(asked["own"], Path(asked["folder"]))}
    return {
        "values": {
            task: {name: metrics[name].value(np.array(vector, np.int64)) for name, vector in vectors.items()}
            for task, vectors in asked["vectors"].items()
        }
    }


if __name__ == "__main__":
    reply(_answer)
