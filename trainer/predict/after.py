"""What a job may ask to be predicted once it has trained, checked before it begins.

The request is a PredictionRequest as any other (section `predict` of the job file). Imports no torch; names of tensors,
which only the model knows, are tried by trainer.predict.trying.
"""

from dataset.config import AnySource, FilesSource, KafkaSource
from dataset.schema import Schema
from millrace.errors import SpecError
from trainer.config import TrainerJob
from trainer.predict.columns import Columns
from trainer.predict.config import LIVE, PredictionRequest
from trainer.predict.plan import source_config, under

SECTION = "predict"


def check_after(request: PredictionRequest, job: TrainerJob) -> None:
    """Raise SpecError where `job` cannot end with this prediction."""
    for key in ("spec", "base"):
        if getattr(request, key) is not None:
            raise SpecError("the job file is the spec; leave it out", f"{SECTION}.{key}")
    if request.version != LIVE:
        raise SpecError(
            f'is {request.version!r}; what has just been trained predicts, which is "live": leave it out, or use '
            "`millrace predict` for another version",
            f"{SECTION}.version",
        )
    (source,) = job.sources.values()
    if not ends(source):
        raise SpecError(
            "the stream never ends, so there is no end to predict at; bound the source, or use `millrace predict` "
            "while the job trains",
            SECTION,
        )
    try:
        source_config(request.input, job)
        Columns.of(request, job, Schema.of(job.slots))
    except SpecError as error:
        raise under(error, f"{SECTION}.{error.path}") from None


def ends(source: AnySource) -> bool:
    """Whether a stream has an end."""
    if isinstance(source, FilesSource):
        return not source.follow
    if isinstance(source, KafkaSource):
        return source.end != "never"
    return source.events is not None


def names_tensors(request: PredictionRequest, job: TrainerJob) -> bool:
    """Whether it asks for more of the model than its predictions."""
    return not {*request.outputs} <= {task.name for task in job.tasks}
