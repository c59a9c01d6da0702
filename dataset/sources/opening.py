"""Opens the sources of a spec. Each kind is imported when it is first used."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import assert_never

from headrace.dataset.spec.config import AnySource, FilesSource, KafkaSource, SimulatedSource
from headrace.dataset.spec.epochs import split_epoch
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Source
from headrace.deadline import Deadline
from headrace.extras import require


def open_source(
    config: AnySource, *, folder: Path, job: str, seed: int, deadline: Deadline, known: Collection[str] | None = ()
) -> Source:
    """Open the source of `config`. `folder`: the spec's folder; `job`: default name of the Kafka group.

    `known`: names of the partitions that the job found before a restart; None: only segments of a plan are read.

    Raises SpecError if the configuration is wrong or a library is missing, SourceUnavailable without an answer in time.
    """
    if config.epochs > 1:
        from headrace.dataset.sources.repeated import RepeatedSource

        once, names = config.model_copy(update={"epochs": 1}), None if known is None else _own_names(known)
        source = open_source(once, folder=folder, job=job, seed=seed, deadline=deadline, known=names)
        return RepeatedSource(source, config.epochs)
    match config:
        case FilesSource():
            from headrace.dataset.sources.files import FileStream

            return FileStream(config, folder, known, deadline)
        case KafkaSource():
            require("kafka", "a source of Kafka", "sources.*.kind")
            from headrace.dataset.sources.kafka_source import KafkaStream

            return KafkaStream(config, job=job, folder=folder, deadline=deadline)
        case SimulatedSource():
            from headrace.dataset.sources.simulated import SimulatedStream

            return SimulatedStream(config, seed)
        case _:
            assert_never(config)


def _own_names(known: Collection[str]) -> list[str]:
    """The names of partitions without their epochs."""
    return list(dict.fromkeys(split_epoch(name)[0] for name in known))


def open_sources(
    configs: Mapping[str, AnySource],
    *,
    folder: Path,
    job: str,
    seed: int,
    deadline: Deadline,
    known: Collection[str] | None = (),
) -> Source:
    """The stream of a job: its one source, or several as one. Arguments and errors are those of `open_source`."""
    if len(configs) == 1:
        (config,) = configs.values()
        return open_source(config, folder=folder, job=job, seed=seed, deadline=deadline, known=known)
    from headrace.dataset.sources.composite import CompositeSource

    names, opened = SourceSet(configs), dict[str, Source]()
    own_known = None if known is None else names.split(dict.fromkeys(known, 0))
    try:
        for name, config in configs.items():
            own = None if own_known is None else own_known[name]
            opened[name] = open_source(config, folder=folder, job=job, seed=seed, deadline=deadline, known=own)
    except BaseException:
        for source in opened.values():
            source.close()
        raise
    return CompositeSource(names, opened)
