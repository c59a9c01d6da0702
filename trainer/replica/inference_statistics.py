"""Counts and durations of inference requests, as clients of the protocol's statistics extension read them.

trainer.replica.replica_metrics has the metrics for Prometheus. Source: Triton's extension_statistics.md.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that parts of an answered request took."""

    queue_s: float
    """From the whole body to a thread that answers it."""
    input_s: float
    infer_s: float
    output_s: float


class InferenceStatistics:
    """Sums since the process began, over all versions. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples = self._answered = self._failed = self._newest_ms = 0
        self._failed_s = 0.0
        self._sums = [0.0] * 4

    def add(self, samples: int, took: Durations) -> None:
        """Count an answered request."""
        with self._lock:
            self._answered += 1
            self._samples += samples
            self._newest_ms = time.time_ns() // 10**6
            parts = (took.queue_s, took.input_s, took.infer_s, took.output_s)
            self._sums = [total + part for total, part in zip(self._sums, parts, strict=True)]

    def add_failure(self, seconds: float) -> None:
        """Count a refused request."""
        with self._lock:
            self._failed += 1
            self._failed_s += seconds

    def message(self, name: str, version: str) -> dict[str, Any]:
        """The entry of a model in the extension's form."""
        with self._lock:
            answered, sums, failed_s, failed = self._answered, self._sums, self._failed_s, self._failed
            samples, newest_ms = self._samples, self._newest_ms
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
