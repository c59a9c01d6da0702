"""The weights of a job's model for other slots, from a subprocess with torch: the control plane does not import torch.

python -m headrace.trainer.importing.other_slots < {"old": ..., "new": ..., "folder": ...}
-> {"weights": [...]} or {"error": ...}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.trainer.models.torch_subprocess import answer_of, reply


class WeightChange(NamedTuple):
    """A weight that is other for other slots."""

    name: str
    old: list[int] | None
    """Its shape; None: it begins at its initial value."""
    new: list[int] | None
    """None: it is dropped."""
    kept: int
    """Values that are kept; other values of its new shape are zeros, or initial ones of a buffer."""


def weights_between(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> list[WeightChange]:
    """The weights that change from one full spec to another. Raises SpecError where the model is a new one."""
    question = {"old": old, "new": new, "folder": str(folder)}
    answer = answer_of("headrace.trainer.importing.other_slots", question)
    return [WeightChange(*each) for each in answer["weights"]]


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from headrace.config import validate
    from headrace.trainer.config import TrainerJob
    from headrace.trainer.train.commit_state import carried_between, weights_of

    folder = Path(request["folder"])
    old, new = (validate(TrainerJob, request[name], only_known=True) for name in ("old", "new"))
    plan = carried_between(old, weights_of(old, folder), new, weights_of(new, folder))
    return {"weights": [[each.name, each.old, each.new, each.num_kept] for each in plan if each.changes]}


if __name__ == "__main__":
    reply(_answer)
