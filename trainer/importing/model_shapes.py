"""The shapes of a job's dense tensors, from a subprocess with torch: the control plane does not import torch.

python -m headrace.trainer.importing.model_shapes < {"job": ..., "folder": ...}
-> {"tensors": {name: shape}} or {"error": ...}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.trainer.models.torch_subprocess import answer_of, reply


def shapes_of(job: Mapping[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the model's weights and buffers, and of learnt default rows.

    Raises SpecError if the model cannot be built.
    """
    answer = answer_of("headrace.trainer.importing.model_shapes", {"job": job, "folder": str(folder)})
    return {name: tuple(shape) for name, shape in answer["tensors"].items()}


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from headrace.config import validate
    from headrace.dataset.spec.schema import Schema
    from headrace.trainer.config import TrainerJob
    from headrace.trainer.features.default_rows import PREFIX, widths_of
    from headrace.trainer.train.model_building import build_model

    job = validate(TrainerJob, request["job"], only_known=True)
    schema = Schema.of(job.slots)
    model = build_model(job, schema, Path(request["folder"]), torch.device("cpu"))
    default_rows = {PREFIX + name: [width] for name, width in widths_of(schema, job.tables).items()}
    return {"tensors": {name: list(tensor.shape) for name, tensor in model.state_dict().items()} | default_rows}


if __name__ == "__main__":
    reply(_answer)
