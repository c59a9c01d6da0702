"""The job spec: composes the sections that the packages declare, and loads a spec from its file.

What sections say about each other is checked by service.checks; each section checks itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import load_toml, validate
from service.checks import check_places, check_references
from service.config import ClusterSection
from trainer.config import TrainerJob
from trainer.predict.after import check_after
from trainer.predict.config import PredictionRequest


class Job(TrainerJob):
    """A job, as a user writes it."""

    cluster: ClusterSection = ClusterSection()
    """Processes."""
    predict: PredictionRequest | None = None
    """What the newest version predicts once the stream has ended and all is trained."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A spec that has passed every check, and where it lies."""

    spec: Job
    raw: dict[str, Any]
    """As the user wrote it, overrides applied: what workers are given."""
    folder: Path
    """The spec's folder, absolute: relative paths start there."""
    store: Path
    """The store's folder, absolute; it need not exist."""


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """The job at `path`, with each `a.b=value` of `overrides` in its place. Raises SpecError."""
    return job_of(load_toml(path, overrides), path.resolve().parent)


def job_of(raw: Mapping[str, Any], folder: Path) -> LoadedJob:
    """The job that `raw` describes; its relative paths start at `folder`, an absolute one. Raises SpecError."""
    spec = validate(Job, raw)
    check_references(spec)
    if spec.predict is not None:
        check_after(spec.predict, spec)
    store = (folder / spec.store.path).resolve()
    check_places(spec, store, folder)
    return LoadedJob(spec=spec, raw=dict(raw), folder=folder, store=store)
