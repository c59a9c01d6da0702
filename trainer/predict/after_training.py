"""Checks the prediction that a job makes once it has trained, and its evaluator, before the job begins.

The request is an ordinary PredictionRequest (section `predict` of the job file). This module imports no torch. Only the
model knows the names of its tensors, so a process that has torch tries them:

    python -m headrace.trainer.predict.after_training < {"job": ..., "folder": ..., "request": ...}
    -> {} or {"error": ...}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.trainer.config import TrainerJob
from headrace.trainer.exports.scores import EVALUATOR
from headrace.trainer.models.torch_subprocess import answer_of, reply
from headrace.trainer.predict.config import LIVE, EvaluatorSection, PredictionRequest
from headrace.trainer.predict.prediction_plan import error_at, source_config

SECTION = "predict"
EMPTY = 8
"""Samples of the empty batch that the model is tried with."""


def check_after(request: PredictionRequest, job: TrainerJob) -> None:
    """Raise SpecError where `job` cannot end with this prediction."""
    from headrace.trainer.predict.output_columns import OutputColumns  # late: every check of a job imports this module

    for key in ("spec", "base"):
        if getattr(request, key) is not None:
            raise SpecError("the job file is the spec; leave it out", f"{SECTION}.{key}")
    if request.version != LIVE:
        raise SpecError(
            f'is {request.version!r}; the model that was just trained predicts, which is "live": leave it out, or use '
            "`headrace predict` for another version",
            f"{SECTION}.version",
        )
    if not all(source.ends for source in job.sources.values()):
        raise SpecError(
            "the stream never ends, so the prediction would never start; bound the source, or use `headrace predict` "
            "while the job trains",
            SECTION,
        )
    try:
        source_config(request.input, job)
        OutputColumns.of(request, job, Schema.of(job.slots))
    except SpecError as error:
        raise error_at(error, f"{SECTION}.{error.path}") from None


def gated_streams(job: TrainerJob) -> list[str]:
    """The names of the streams whose exports wait for a score of the evaluator."""
    return [name for name, stream in job.exports.items() if stream.gates.evaluator is not None]


def check_evaluator(section: EvaluatorSection | None, job: TrainerJob) -> None:
    """Raise SpecError where an evaluator cannot measure versions of `job`, or a gate asks for one that is not there."""
    gated = gated_streams(job)
    if section is None:
        for name in gated:
            raise SpecError(
                "compares with scores of the evaluator, and the job has none: add a section [evaluator] with its input",
                f"exports.{name}.gates.evaluator",
            )
        return
    if section.of == "exports" and not gated:
        raise SpecError(
            'is "exports", and no export waits for a score: set exports.<stream>.gates.evaluator, or of = "commits"',
            f"{EVALUATOR}.of",
        )
    try:
        source_config(section.input, job)
    except SpecError as error:
        raise error_at(error, f"{EVALUATOR}.{error.path}") from None


def check_outputs(request: PredictionRequest, job: TrainerJob, full: Mapping[str, Any], folder: Path) -> None:
    """Build the model of `full`, the spec of `job`, where the request names other tensors than predictions.

    Raises SpecError for an output that the model does not have, or where it cannot be built.
    """
    if not {*request.outputs} <= {task.name for task in job.tasks}:
        asked = {"job": full, "folder": str(folder), "request": request.model_dump(mode="json")}
        answer_of("headrace.trainer.predict.after_training", asked)


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    from headrace.config import validate
    from headrace.dataset.spec.schema import Schema
    from headrace.trainer.features.deduplication import tables_of
    from headrace.trainer.predict.fixed_batches import FixedBatches
    from headrace.trainer.predict.predictor import Predictor

    job = validate(TrainerJob, asked["job"], only_known=True)
    request = validate(PredictionRequest, asked["request"])
    schema = Schema.of(job.slots)
    predictor = Predictor(job, schema, Path(asked["folder"]), request.outputs)
    predictor.try_out(FixedBatches(tables_of(schema, job.tables, None), EMPTY), EMPTY)
    return {}


if __name__ == "__main__":
    reply(_answer)
