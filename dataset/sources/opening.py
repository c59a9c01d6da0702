"""Opens the source of a spec. Each kind is imported when it is first used."""

from collections.abc import Collection
from pathlib import Path
from typing import assert_never

from dataset.spec.config import AnySource, FilesSource, KafkaSource, SimulatedSource
from dataset.stream.source import Source
from millrace.deadline import Deadline


def open_source(
    config: AnySource, *, folder: Path, job: str, seed: int, deadline: Deadline, known: Collection[str] | None = ()
) -> Source:
    """Open the source of `config`. `folder`: the spec's folder; `job`: default name of the Kafka group.

    `known`: names of the partitions that the job found before a restart; None: only segments of a plan are read.

    Raises SpecError if the configuration is wrong, SourceUnavailable without an answer in time.
    """
    match config:
        case FilesSource():
            from dataset.sources.files import FileStream

            return FileStream(config, folder, known)
        case KafkaSource():
            from dataset.sources.kafka_source import KafkaStream

            return KafkaStream(config, job=job, folder=folder, deadline=deadline)
        case SimulatedSource():
            from dataset.sources.simulated import SimulatedStream

            return SimulatedStream(config, seed)
        case _:
            assert_never(config)
