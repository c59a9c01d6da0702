"""Checks of epochs, shuffling and kept samples against the other sections of a spec. Pure."""

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.trainer.config import TrainerJob


def check_order(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError where events are read again, or in another order, and something depends on their order."""
    passes = job.passes
    repeated = next((name for name, source in job.sources.items() if source.epochs > 1), None)
    if passes.shuffle and not job.pipe.traced:
        raise SpecError(
            'orders samples by their events, and those of protocol = "multislot" cannot be traced to events; use '
            'protocol = "arrow", or leave it out',
            "passes.shuffle",
        )
    if passes.keep and repeated is None and passes.keep_in is None:
        raise SpecError(
            "keeps samples for the next epoch, and no source has one: set epochs of a source, or keep_in", "passes.keep"
        )
    path = "passes.shuffle" if passes.shuffle else f"sources.{repeated}.epochs"
    if schema.remembered and (passes.shuffle or repeated is not None):
        raise SpecError(
            f"does not go with slot {schema.remembered[0].name!r}, which is filled in the order of time: in a second "
            "epoch it would hold what comes later",
            path,
        )
    if job.join is not None and (passes.shuffle or repeated is not None):
        raise SpecError("does not go with a join, which follows the order of time", path)
