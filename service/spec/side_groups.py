"""Runs beside a job: they must not move what others see of it, such as the positions of its Kafka group. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from headrace.service.spec.job import LoadedJob, job_of
from headrace.trainer.config import TrainerJob


def group_overrides(job: TrainerJob, suffix: str) -> list[str]:
    """Overrides that give each Kafka source of a job's run a group of its own."""
    own = ((name, source.beside(job.name, suffix)) for name, source in job.sources.items())
    return [f"sources.{name}.{key}={json.dumps(value)}" for name, keys in own for key, value in keys.items()]


def with_own_groups(raw: Mapping[str, Any], job: TrainerJob, suffix: str) -> dict[str, Any]:
    """`raw`, the spec of `job`, with such groups. A source with start = "group" starts at its beginning instead."""
    own = {name: {**raw["sources"][name], **each.beside(job.name, suffix)} for name, each in job.sources.items()}
    return {**raw, "sources": {**raw["sources"], **own}}


def beside(job: LoadedJob, suffix: str) -> LoadedJob:
    """The job with such groups."""
    return job_of(with_own_groups(job.whole(), job.spec, suffix), job.folder)
