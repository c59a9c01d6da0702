"""Metrics of a replica for Prometheus, and its counts for the protocol's statistics extension.

tests/golden/replica_metrics.txt fixes names and labels of the former. Source of the latter: Triton's
extension_statistics.md.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.http.accepted import metrics_encoder
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.updates import ReplicaUpdate
from headrace.trainer.status.freshness import DelayHistogram, EventTimes

PREFIX = "headrace_replica_"
LATENCY_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REASONS = ("unusable", "broken", "golden", "older", "no-base", "no-model", "another-job", "bug")
"""Labels of refusals; the log has the details."""


class ReplicaMetrics:
    """Counters for other modules, and gauges that are read from the state at each scrape."""

    def __init__(self, state: ReplicaState) -> None:
        self.registry = CollectorRegistry()
        self.inference = InferenceStatistics()
        self.registry.register(self.inference)
        self.updates = self._counter("updates", "Versions applied", "kind")
        self.refused = self._counter("refused", "Updates refused: the version before goes on", "reason")
        self.dropped = self._counter("dropped", "Times the live feed disconnected the replica: it was too slow")
        self.apply_seconds = self._histogram("apply_seconds", "From an update to its being served", LATENCY_S)
        self.retrieve_seconds = self._histogram("retrieve_seconds", "From users to their best items", LATENCY_S)
        self._freshness = DelayHistogram()
        self.registry.register(_FreshnessCollector(self._freshness))
        self.following = Gauge(f"{PREFIX}following", "1 while updates come, or could", registry=self.registry)
        for kind in ("whole", "difference"):
            self.updates.labels(kind)
        for reason in REASONS:
            self.refused.labels(reason)
        self.registry.register(_StateCollector(state))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def served(self, update: ReplicaUpdate, now_s: float) -> None:
        """Count a version that is served from `now_s` on (unix seconds).

        A whole update has events of any age, which other replicas may have served before: only the newest one counts.
        """
        self.updates.labels("whole" if update.whole else "difference").inc()
        if update.event_times is not None:
            self._freshness.add(update.event_times, now_s)
        elif update.event_time_s is not None:
            self._freshness.add(EventTimes.one(update.event_time_s), now_s)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of /metrics and its content type, for a client with this header Accept."""
        encode, content_type = metrics_encoder(accept)
        return encode(self.registry), content_type


class _FreshnessCollector(Collector):
    def __init__(self, delays: DelayHistogram) -> None:
        self._delays = delays

    def collect(self) -> Iterator[Metric]:
        """The freshness histogram."""
        found = self._delays.totals()
        yield HistogramMetricFamily(
            f"{PREFIX}freshness_seconds",
            "From events' times to their being servable; the newest's alone, where a version does not tell all",
            buckets=found.buckets,
            sum_value=found.sum_s,
        )


class _StateCollector(Collector):
    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The gauges, each where its value is known."""
        served, now_s = self._state.served, time.time()
        version = GaugeMetricFamily(
            "headrace_replica_version", "The version that is served", labels=["job", "timeline"]
        )
        age = GaugeMetricFamily("headrace_replica_version_age_seconds", "Since the version was first served here")
        event_age = GaugeMetricFamily("headrace_replica_event_age_seconds", "Since the newest event that is served")
        rows = GaugeMetricFamily("headrace_replica_rows", "Rows of the version that is served", labels=["table"])
        held = GaugeMetricFamily("headrace_replica_held_back", "1 while a version is served that somebody chose")
        kept = GaugeMetricFamily("headrace_replica_kept_versions", "Versions there to go back to, and the newest")
        num_bytes = GaugeMetricFamily("headrace_replica_kept_bytes", "Memory of what is kept beside the newest version")
        items = GaugeMetricFamily("headrace_replica_items", "Items that can be retrieved")
        index_s = GaugeMetricFamily("headrace_replica_index_seconds", "Time that the vectors of the served items took")
        if (indexed := self._state.items) is not None:
            items.add_metric([], indexed.index.num_items)
            index_s.add_metric([], indexed.build_s)
        if served is not None:
            version.add_metric([served.version.job, served.version.timeline], served.version.number)
            age.add_metric([], now_s - served.served_at_s)
            if served.event_time_s is not None:
                event_age.add_metric([], now_s - served.event_time_s)
            for table, number in self._state.num_rows().items():
                rows.add_metric([table], number)
        held.add_metric([], float(self._state.is_held_back))
        kept.add_metric([], len(self._state.versions()))
        num_bytes.add_metric([], self._state.kept_bytes())
        yield from (version, age, event_age, rows, held, kept, num_bytes, items, index_s)


# -- counts and durations of inference requests, as clients of the statistics extension read them

NANOSECONDS = 10**9


class Durations(NamedTuple):
    """Seconds that parts of an answered request took."""

    queue_s: float
    """From the whole body to a thread that answers it."""
    input_s: float
    infer_s: float
    output_s: float


class InferenceStatistics(Collector):
    """Sums since the process began, over all versions: one lock for all that is counted of a request. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_code: dict[int, int] = {}
        self._in_bucket = [0] * (len(LATENCY_S) + 1)
        self._samples = self._newest_ms = 0
        self._failed_s = 0.0
        self._sums = [0.0] * 4

    def add(self, samples: int, took: Durations) -> None:
        """Count an answered request."""
        with self._lock:
            self._count(HTTPStatus.OK, sum(took))
            self._samples += samples
            self._newest_ms = time.time_ns() // 10**6
            self._sums = list(map(add, self._sums, took))

    def add_failure(self, status: int, seconds: float) -> None:
        """Count a refused request."""
        with self._lock:
            self._count(status, seconds)
            self._failed_s += seconds

    def _count(self, status: int, seconds: float) -> None:
        self._by_code[status] = self._by_code.get(status, 0) + 1
        self._in_bucket[bisect_left(LATENCY_S, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        """Requests by code, samples, and the durations of requests."""
        with self._lock:
            by_code, in_bucket, samples = dict(self._by_code), list(self._in_bucket), self._samples
            total_s = sum(self._sums) + self._failed_s
        requests = CounterMetricFamily(f"{PREFIX}requests", "Inference requests answered", labels=["code"])
        for code, number in by_code.items():
            requests.add_metric([str(int(code))], number)
        yield requests
        yield CounterMetricFamily(f"{PREFIX}samples", "Samples predicted", samples)
        bounds = [*map(floatToGoString, LATENCY_S), "+Inf"]
        yield HistogramMetricFamily(
            f"{PREFIX}request_seconds",
            "From a request's body to its answer",
            buckets=list(zip(bounds, accumulate(in_bucket), strict=True)),
            sum_value=total_s,
        )

    def message(self, name: str, version: str) -> dict[str, Any]:
        """The entry of a model in the extension's form."""
        with self._lock:
            answered = self._by_code.get(HTTPStatus.OK, 0)
            failed = sum(self._by_code.values()) - answered
            samples, newest_ms, sums, failed_s = self._samples, self._newest_ms, self._sums, self._failed_s
        parts = zip(("queue", "compute_input", "compute_infer", "compute_output"), sums, strict=True)
        return {
            "name": name,
            "version": version,
            "last_inference": newest_ms,
            "inference_count": samples,
            "execution_count": answered,
            "inference_stats": {
                "success": _sum(answered, sum(sums)),
                "fail": _sum(failed, failed_s),
                **{part: _sum(answered, seconds) for part, seconds in parts},
                "cache_hit": _sum(0, 0.0),
                "cache_miss": _sum(0, 0.0),
            },
            "batch_stats": [],
        }


def _sum(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * NANOSECONDS)}
