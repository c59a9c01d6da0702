"""Opens the source that a spec names. Each kind is imported when it is first asked for."""

from collections.abc import Collection
from pathlib import Path
from typing import assert_never

from dataset.config import AnySource, FilesSource, KafkaSource, SimulatedSource
from dataset.source import Source
from millrace.deadline import Deadline


def open_source(
    config: AnySource, *, folder: Path, job: str, seed: int, deadline: Deadline, known: Collection[str] | None = ()
) -> Source:
    """The source of `config`; `folder` is the spec's, `job` the name Kafka's lag tools see unless it sets a group.

    `known` names the partitions that the job met before this process; None: only segments of a plan are read.

    Raises SpecError where it cannot be as written, SourceUnavailable where it does not answer in time.
    """
    match config:
        case FilesSource():
            from dataset.files import Files

            return Files(config, folder, known)
        case KafkaSource():
            from dataset.kafka import Kafka

            return Kafka(config, job=job, folder=folder, deadline=deadline)
        case SimulatedSource():
            from dataset.simulated import Simulated

            return Simulated(config, seed)
        case _:
            assert_never(config)
