"""Kafka groups of runs beside a job: they must not move the positions that the job's own group shows. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from dataset.spec.config import KafkaSource
from trainer.config import TrainerJob


def group_overrides(job: TrainerJob, suffix: str) -> list[str]:
    """Overrides that give each Kafka source of a job's run a group of its own."""
    return [
        f"sources.{name}.group={json.dumps((source.group or job.name) + suffix)}"
        for name, source in job.sources.items()
        if isinstance(source, KafkaSource)
    ]


def with_own_groups(raw: Mapping[str, Any], job: TrainerJob, suffix: str) -> dict[str, Any]:
    """`raw`, the spec of `job`, with such groups. A source that starts where the group stands starts at its begin."""
    sources = dict(raw["sources"])
    for name, source in job.sources.items():
        if isinstance(source, KafkaSource):
            own = {**sources[name], "group": (source.group or job.name) + suffix}
            sources[name] = {key: value for key, value in own.items() if (key, value) != ("start", "group")}
    return {**raw, "sources": sources}
