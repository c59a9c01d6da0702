"""Kafka groups of runs beside a job: they must not move the positions that the job's own group shows. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from headrace.dataset.spec.config import KafkaSource
from headrace.trainer.config import TrainerJob


def group_overrides(job: TrainerJob, suffix: str) -> list[str]:
    """Overrides that give each Kafka source of a job's run a group of its own."""
    return [f"sources.{name}.group={json.dumps(group)}" for name, group in _own_groups(job, suffix).items()]


def with_own_groups(raw: Mapping[str, Any], job: TrainerJob, suffix: str) -> dict[str, Any]:
    """`raw`, the spec of `job`, with such groups. A source with start = "group" starts at its beginning instead."""
    sources = dict(raw["sources"])
    for name, group in _own_groups(job, suffix).items():
        own = {**sources[name], "group": group}
        sources[name] = {key: value for key, value in own.items() if (key, value) != ("start", "group")}
    return {**raw, "sources": sources}


def _own_groups(job: TrainerJob, suffix: str) -> dict[str, str]:
    """By Kafka source: the group of the run."""
    kafka = {name: source for name, source in job.sources.items() if isinstance(source, KafkaSource)}
    return {name: (source.group or job.name) + suffix for name, source in kafka.items()}
