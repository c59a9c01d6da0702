"""Statuses of jobs as figures for Prometheus. tests/golden/metrics.txt fixes names and labels."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace.http.accepted import Encoder, metrics_encoder
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.monitor.status import Status

log = logging.getLogger(__name__)

BROKEN = Status({"state": "broken"})
COUNTERS = {
    "events": "Events trained on",
    "samples": "Samples trained on",
    "restarts": "Restarts of the workers since the launcher was started",
}
GAUGES = {
    "pass": ("headrace_pass", "The pass in training"),
    "version": ("headrace_version", "The last closed pass"),
    "events_per_s": ("headrace_events_per_second", "Events trained on per second"),
    "samples_per_s": ("headrace_samples_per_second", "Samples trained on per second"),
    "loss": ("headrace_loss", "Mean loss of the last steps"),
    "pipe_wait": ("headrace_pipe_wait_ratio", "Share of recent passes' time that training waited for samples"),
    "freshness_s": ("headrace_freshness_seconds", "From an event's time to its being learnt"),
    "generation": ("headrace_generation", "How many times the workers were started in the job's life"),
}
COMMIT_GAUGES = {
    "version": ("headrace_committed_version", "The last closed pass that cannot be lost any more"),
    "age_s": ("headrace_commit_age_seconds", "Since the last commit was made, or since the start"),
    "pause_s": ("headrace_commit_pause_seconds", "How long training waited for the last commit"),
    "write_s": ("headrace_commit_seconds", "How long the last commit was written for, while training went on"),
}
MIRROR_GAUGES = {
    "version": ("headrace_mirror_version", "The last closed pass in the mirror"),
    "behind_s": ("headrace_mirror_behind_seconds", "How long a commit has waited to be in the mirror"),
}
OBJECT_GAUGES = {
    "fence": ("headrace_fence_number", "Records of the fence in the object store, with store.parts = object"),
    "uploads": ("headrace_commit_uploads_waiting", "Files of rank 0 that wait for the object store"),
    "bytes": ("headrace_commit_uploaded_bytes", "Uploaded for commits since the workers were started, by all of them"),
}
ALARM_GAUGES = {
    Alarm.COMMITS: ("headrace_commit_failing", "1 while commits fail; the job ends after commit.max_failing"),
    Alarm.LOG: ("headrace_trouble", "1 while training waits for the log; the job ends after commit.max_failing"),
    Alarm.STALLED: ("headrace_stalled", "1 while a step stands still, longer than a quarter of train.step_deadline"),
    Alarm.FORKED: ("headrace_forked", "1 where a replay differed, or libraries or hardware did since the commit"),
}
EXPORT_GAUGES = {
    "version": ("headrace_export_version", "The version of a stream's newest complete export"),
    "age_s": ("headrace_export_age_seconds", "Since a stream's newest complete export was complete"),
}
BY_PARTITION = {
    "lag": ("headrace_lag", "Events that wait"),
    "positions": ("headrace_position", "Position after the last event trained on"),
}
SLOT_GAUGES = {
    "rows": "Rows of a slot; slots that share rows have the same ones",
    "bytes": "A slot's share of its table's memory, by rows",
}
TASK_METRICS = {
    "auc": "AUC",
    "gauc": "Mean AUC of groups",
    "logloss": "Log loss",
    "calibration": "Mean prediction divided by mean label",
}


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
        statuses = self._statuses
        yield from _counters(statuses)
        yield from _gauges(statuses)
        yield from _links(statuses)
        yield _staleness(statuses)
        yield from _tables(statuses)
        yield _learning_delay(statuses)
        yield from _durability(statuses)
        yield from _exports(statuses)
        yield from _task_metrics(statuses)
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


def _counters(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    for key, text in COUNTERS.items():
        family = CounterMetricFamily(f"headrace_{key}", text, labels=["job"])
        for job, status in statuses:
            if (value := status.number(key)) is not None:
                family.add_metric([job], value)
        yield family
    rejected = CounterMetricFamily("headrace_rejected", "Events that gave no sample", labels=["job", "reason"])
    for job, status in statuses:
        for reason, value in status.counts("rejected").items():
            rejected.add_metric([job, reason], value)
    yield rejected
    refused = CounterMetricFamily(
        "headrace_refused", "Connections and calls that a job's processes refused", labels=["job", "reason"]
    )
    for job, status in statuses:
        for reason, value in status.counts("refused").items():
            refused.add_metric([job, reason], value)
    yield refused
    spent = CounterMetricFamily("headrace_time_seconds", "Where the time of training went", labels=["job", "part"])
    for job, status in statuses:
        for part, value in status.counts("time_s").items():
            spent.add_metric([job, part], value)
    yield spent


def _links(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    ends = ["job", "worker", "peer"]
    carried = CounterMetricFamily(
        "headrace_link_bytes",
        "Bytes between two workers; path: wire or shared_memory",
        labels=[*ends, "direction", "path"],
    )
    messages = CounterMetricFamily(
        "headrace_link_messages", "Messages between two workers", labels=[*ends, "direction"]
    )
    waits = CounterMetricFamily("headrace_link_wait_seconds", "How long a worker waited for a peer", labels=ends)
    for job, status in statuses:
        for worker, peers in status.links().items():
            for peer, link in peers.items():
                for way in ("sent", "received"):
                    carried.add_metric([job, worker, peer, way, "wire"], link.number(f"{way}_bytes") or 0)
                    shared = link.number(f"shared_{way}_bytes") or 0
                    carried.add_metric([job, worker, peer, way, "shared_memory"], shared)
                    messages.add_metric([job, worker, peer, way], link.number(f"{way}_messages") or 0)
                waits.add_metric([job, worker, peer], link.number("wait_s") or 0)
    yield from (carried, messages, waits)


def _staleness(statuses: list[tuple[str, Status]]) -> Metric:
    family = GaugeMetricFamily(
        "headrace_staleness_steps",
        "Steps between trainers that do not wait for each other, in the last pass",
        labels=["job", "worker", "figure"],
    )
    for job, status in statuses:
        for worker, apart in status.parts("staleness_steps").items():
            for figure, value in apart.numbers().items():
                family.add_metric([job, worker, figure], value)
    return family


def _gauges(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    state = GaugeMetricFamily("headrace_state", "1 for the state a job is in", labels=["job", "state"])
    learning = GaugeMetricFamily("headrace_learning", "1 while a job learns, 0 where it only predicts", labels=["job"])
    rows = GaugeMetricFamily("headrace_table_rows", "Rows of a table", labels=["job", "table"])
    for job, status in statuses:
        state.add_metric([job, status.text("state", "starting")], 1)
        learning.add_metric([job], float(status.raw.get("learning", True) is True))
        for table, value in status.table_rows().items():
            rows.add_metric([job, table], value)
    yield from (state, learning, rows)
    yield from _numbers(GAUGES, statuses)
    for key, (name, text) in BY_PARTITION.items():
        family = GaugeMetricFamily(name, text, labels=["job", "partition"])
        for job, status in statuses:
            for partition, value in status.counts(key).items():
                family.add_metric([job, partition.encode(errors="backslashreplace").decode()], value)
        yield family


def _tables(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    size = GaugeMetricFamily("headrace_table_bytes", "Memory of a table's rows and index", labels=["job", "table"])
    by_slot = {
        key: GaugeMetricFamily(f"headrace_slot_{key}", text, labels=["job", "table", "slot"])
        for key, text in SLOT_GAUGES.items()
    }
    held = GaugeMetricFamily("headrace_held_shrink_rows", "Rows that wait for leave to go", labels=["job", "table"])
    for job, status in statuses:
        waiting = status.part("operations").part("shrinking").parts("held")
        for name, table in status.parts("tables").items():
            if (value := table.number("bytes")) is not None:
                size.add_metric([job, name], value)
            for key, family in by_slot.items():
                for each, number in table.counts(f"{key}_by_slot").items():
                    family.add_metric([job, name, each], number)
            held.add_metric([job, name], (waiting[name].number("going") or 0) if name in waiting else 0)
    yield from (size, *by_slot.values(), held)


def _learning_delay(statuses: list[tuple[str, Status]]) -> Metric:
    family = HistogramMetricFamily(
        "headrace_learning_delay_seconds", "From events' times to their being learnt", labels=["job"]
    )
    for job, status in statuses:
        delay = status.part("learning_delay")
        if (sum_s := delay.number("sum_s")) is not None:
            family.add_metric([job], [(str(bound), upto) for bound, upto in delay.raw["buckets"]], sum_s)
    return family


def _numbers(gauges: Mapping[str, tuple[str, str]], statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    for key, (name, text) in gauges.items():
        family = GaugeMetricFamily(name, text, labels=["job"])
        for job, status in statuses:
            if (number := status.number(key)) is not None:
                family.add_metric([job], number)
        yield family


def _durability(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    commits = [(job, status.part("commit")) for job, status in statuses]
    yield from _numbers(COMMIT_GAUGES, commits)
    yield from _numbers(MIRROR_GAUGES, [(job, commit.part("mirror")) for job, commit in commits])
    yield from _numbers(OBJECT_GAUGES, [(job, commit.part("objects")) for job, commit in commits])
    for alarm, (name, text) in ALARM_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["job"])
        for job, status in statuses:
            if status.part("commit").raw:
                family.add_metric([job], float(alarm in alarms(status)))
        yield family


def _exports(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    streams = [(job, stream, export) for job, status in statuses for stream, export in status.exports().items()]
    for key, (name, text) in EXPORT_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["job", "stream"])
        for job, stream, export in streams:
            if (value := export.number(key)) is not None:
                family.add_metric([job, stream], value)
        yield family
    failing = GaugeMetricFamily("headrace_export_failing", "1 while a stream's exports fail", labels=["job", "stream"])
    gates = GaugeMetricFamily("headrace_export_failed_gates", "Gates the last export failed", labels=["job", "stream"])
    for job, stream, export in streams:
        failing.add_metric([job, stream], float(bool(export.text("failing"))))
        gates.add_metric([job, stream], len(export.raw.get("failed_gates") or ()))
    yield from (failing, gates)


def _task_metrics(statuses: list[tuple[str, Status]]) -> Iterator[Metric]:
    for span, where in (("window", "over the sliding window"), ("life", "over the job's life")):
        for key, text in TASK_METRICS.items():
            family = GaugeMetricFamily(f"headrace_{span}_{key}", f"{text} {where}", labels=["job", "task"])
            for job, status in statuses:
                for task, values in status.metrics(span).items():
                    if key in values:
                        family.add_metric([job, task], values[key])
            yield family
