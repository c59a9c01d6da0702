"""Whether a job's model has the tensors that a prediction asks for, said by a process that has torch.

python -m trainer.predict.trying < {"job": ..., "folder": ..., "request": ...}   ->   {} or {"error": ...}
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.errors import MillraceError
from trainer.apart import answer_of
from trainer.predict.config import PredictionRequest

EMPTY = 8
"""Samples of the empty batch that the model is tried with."""


def try_outputs(job: Mapping[str, Any], folder: Path, request: PredictionRequest) -> None:
    """Raise SpecError for an output that the model does not have, or where it cannot be built."""
    asked = {"job": job, "folder": str(folder), "request": request.model_dump(mode="json")}
    answer_of("trainer.predict.trying", asked)


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    from dataset.schema import Schema
    from millrace.config import validate
    from trainer.config import TrainerJob
    from trainer.embedding import tables_of
    from trainer.predict.batches import FixedBatches
    from trainer.predict.predictor import Predictor

    try:
        job = validate(TrainerJob, asked["job"], only_known=True)
        request = validate(PredictionRequest, asked["request"])
        schema = Schema.of(job.slots)
        predictor = Predictor(job, schema, Path(asked["folder"]), request.outputs)
        predictor.try_out(FixedBatches(tables_of(schema, job.tables, None), EMPTY), EMPTY)
    except MillraceError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps(_answer(documents.parse_object(sys.stdin.buffer.read(), "the question"))))
