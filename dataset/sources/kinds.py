"""The kinds of sources, each a section of the job file that opens its own stream; and the stream of a job."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.dataset.spec.config import Opening, SourceSection
from headrace.dataset.spec.epochs import split_epoch
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Source
from headrace.registry import Registry

SOURCES = Registry(
    kind="source",
    group="headrace.sources",
    base=SourceSection,
    own={
        "files": "dataset.sources.files:FilesSource",
        "kafka": "dataset.sources.kafka:KafkaSource",
        "simulated": "dataset.sources.simulated:SimulatedSource",
    },
)

if TYPE_CHECKING:
    AnySource = SourceSection
else:
    AnySource = SOURCES.union()


def open_source(config: SourceSection, opening: Opening) -> Source:
    """The source of `config`, read `config.epochs` times. Errors are those of SourceSection.open."""
    if config.epochs == 1:
        return config.open(opening)
    from headrace.dataset.sources.repeated import RepeatedSource

    known = opening.known and list(dict.fromkeys(split_epoch(name)[0] for name in opening.known))
    return RepeatedSource(config.open(replace(opening, known=known)), config.epochs)


def open_sources(configs: Mapping[str, SourceSection], opening: Opening) -> Source:
    """The stream of a job: its one source, or several as one. Errors are those of SourceSection.open."""
    if len(configs) == 1:
        (config,) = configs.values()
        return open_source(config, opening)
    from headrace.dataset.sources.composite import CompositeSource

    names, opened = SourceSet(configs), dict[str, Source]()
    own_known = None if opening.known is None else names.split(dict.fromkeys(opening.known, 0))
    try:
        for name, config in configs.items():
            known = None if own_known is None else own_known[name]
            opened[name] = open_source(config, replace(opening, known=known))
    except BaseException:
        for source in opened.values():
            source.close()
        raise
    return CompositeSource(names, opened)
