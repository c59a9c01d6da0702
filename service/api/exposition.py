"""Statuses of jobs as figures for Prometheus. tests/golden/metrics.txt fixes names and labels.

The fields of trainer.job_status.Status declare their metrics; what is computed from several fields is added here.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args, get_type_hints

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace.http.accepted import Encoder, metrics_encoder
from headrace.service.monitor.alarms import METRICS, Alarm, alarms
from headrace.trainer.exposed_figures import Entries, Exposed, gauge
from headrace.trainer.job_status import LearningDelay, Status

log = logging.getLogger(__name__)

BROKEN = Status(state="broken")
FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Exposition(Response):
    """Figures as a page: in OpenMetrics where the client accepts it, else in the text format of Prometheus."""

    media_type = CONTENT_TYPE_LATEST

    @classmethod
    def of(cls, write: Callable[[Encoder], bytes], accept: str) -> "Exposition":
        """The page that `write` makes, for a client with this header Accept."""
        encode, content_type = metrics_encoder(accept)
        return cls(write(encode), headers={"content-type": content_type, "vary": "accept"})


def exposition(statuses: Sequence[tuple[str, Status]], encode: Encoder = generate_latest) -> bytes:
    """The text of /metrics for jobs by name and status. A job whose status is malformed is only shown as broken."""
    try:
        return encode(_JobCollector(statuses))
    except Exception as error:  # of any kind: a job's bad figures must not hide those of other jobs
        log.debug("the figures of a job cannot be exported", exc_info=error)
        return encode(_JobCollector([(job, status if _is_sound(job, status) else BROKEN) for job, status in statuses]))


def _is_sound(job: str, status: Status) -> bool:
    """Whether the figures of one job can be exported."""
    try:
        generate_latest(_JobCollector([(job, status)]))
    except Exception as error:
        log.debug("the figures of job %s cannot be exported", job, exc_info=error)
        return False
    return True


class _JobCollector(Collector):
    def __init__(self, statuses: Sequence[tuple[str, Status]]) -> None:
        self._statuses = list(statuses)

    def collect(self) -> Iterator[Metric]:
        """All metric families, each with a sample of every job that has the figure."""
        for figure in _figures():
            family = _family(figure.metric, [*figure.labels, *figure.metric.by, *figure.metric.labels])
            for job, status in self._statuses:
                for labels, value in figure.samples(status):
                    _add(family, [job, *(each.encode(errors="backslashreplace").decode() for each in labels)], value)
            yield family
        yield _service_active(1)


def standby_exposition(encode: Encoder) -> bytes:
    """The text of /metrics for a service that waits for its turn."""
    return encode(_StandbyCollector())


class _StandbyCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        """The only figure of a standby."""
        yield _service_active(0)


def _service_active(value: int) -> Metric:
    return GaugeMetricFamily("headrace_service_active", "1 where this service is active, 0 where it waits", value=value)


# From declared fields to metric families

Samples = Iterator[tuple[Sequence[str], Any]]
"""Values of labels, and what is counted or measured."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric, and how a status has samples of it."""

    metric: Exposed
    labels: Sequence[str]
    """The labels before its own: those of a mapping of parts, as "table"."""
    samples: Callable[[Status], Samples]


@cache
def _figures() -> Sequence[_Figure]:
    """All figures of jobs, in the order of /metrics."""
    every = [*_declared(Status, (), lambda status: iter([((), status)])), *_computed()]
    found = [each for each in every if each.metric.after is None]
    for figure in every:
        if (after := figure.metric.after) is not None:
            place = next(number for number, each in enumerate(found, 1) if each.metric.name == after)
            while place < len(found) and found[place].metric.after == after:
                place += 1
            found.insert(place, figure)
    return found


def _computed() -> Iterator[_Figure]:
    """Figures that no field has alone."""
    held = gauge("headrace_held_shrink_rows", "Rows that wait for leave to go", "table", after="headrace_slot_bytes")
    yield _Figure(held, (), _held_rows)
    for alarm, metric in METRICS.items():
        yield _Figure(metric, (), partial(_is_active, alarm))


def _held_rows(status: Status) -> Samples:
    held = status.operations.shrinking.held
    return (((table,), (held[table].going or 0) if table in held else 0) for table in status.tables)


def _is_active(alarm: Alarm, status: Status) -> Samples:
    if status.commit is not None:
        yield (), alarm in alarms(status)


def _declared(cls: type[Struct], labels: Sequence[str], parts: Callable[[Status], Samples]) -> Iterator[_Figure]:
    """The figures that the fields of `cls` declare, and those of the classes within, in order. `parts`: all values of
    `cls` in a status."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        metrics = [each for each in marks if isinstance(each, Exposed)]
        for family in dict.fromkeys(each.name for each in metrics):
            same = [each for each in metrics if each.name == family]
            yield _Figure(same[0], labels, partial(_samples, parts, name, same))
        if not metrics and (part := _part_of(hint)) is not None:
            by = next((each.by for each in marks if isinstance(each, Entries)), ())
            yield from _declared(part, (*labels, *by), partial(_parts, parts, name, len(by)))


def _part_of(hint: Any) -> type[Struct] | None:
    """The class of the parts in a field's type, such as TableStatus in dict[str, TableStatus]."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((part for each in get_args(hint) if (part := _part_of(each)) is not None), None)


def _parts(outer: Callable[[Status], Samples], name: str, depth: int, status: Status) -> Samples:
    for labels, part in outer(status):
        for more, each in _entries(getattr(part, name), depth):
            if each is not None:
                yield (*labels, *more), each


def _samples(parts: Callable[[Status], Samples], name: str, metrics: Sequence[Exposed], status: Status) -> Samples:
    """The samples of a field; of each of its entries, those of all `metrics`."""
    for labels, part in parts(status):
        for more, entry in _entries(getattr(part, name), len(metrics[0].by)):
            for metric in metrics:
                value = entry if metric.value is None else metric.value(entry)
                if isinstance(value, str):  # a label has it
                    yield (*labels, *more, value), 1
                elif value is not None:
                    yield (*labels, *more, *metric.labels.values()), value


def _entries(value: Any, depth: int) -> Samples:
    """The entries of nested mappings with their keys; of any other value, the value itself."""
    if not depth or not isinstance(value, Mapping):
        yield (), value
        return
    for key, each in value.items():
        for more, entry in _entries(each, depth - 1):
            yield (key, *more), entry


def _family(metric: Exposed, labels: Sequence[str]) -> Metric:
    family: Metric = FAMILIES[metric.kind](metric.name, metric.help, labels=["job", *labels])
    return family


def _add(family: Any, labels: Sequence[str], value: Any) -> None:
    if isinstance(value, LearningDelay):
        family.add_metric(labels, [(bound, upto) for bound, upto in value.buckets], value.sum_s)
    else:
        family.add_metric(labels, float(value))
