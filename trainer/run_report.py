"""report.json: the figures of a finished run, beside its commits. Rank 0 writes it (train/report.py)."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from headrace.trainer.exposed_figures import Number
from headrace.trainer.job_status import (
    Counts,
    EvaluatorStatus,
    HeldShrink,
    Measures,
    RankWaits,
    Seconds,
    StragglerStatus,
)
from headrace.trainer.tuning_status import TuningStatus


class SpanMetrics(Struct, frozen=True, kw_only=True):
    """Metrics over the job's life and over `metrics.window`."""

    life: Measures = {}
    window: Measures = {}


class RunMetrics(SpanMetrics, frozen=True, kw_only=True):
    """The metrics of a run."""

    infer_first: SpanMetrics | UnsetType = UNSET
    """If a whole pass is predicted before training on it."""


class ReportedTable(Struct, frozen=True, kw_only=True):
    """A table at the end of a run."""

    rows: int | None = None
    bytes: int | None = None
    rows_by_slot: Counts = {}
    bytes_by_slot: Counts = {}


class RunReport(Struct, frozen=True, kw_only=True):
    """The content of report.json. Figures are as in trainer.job_status.Status, if nothing else is said."""

    events: int | None = None
    samples: int | None = None
    rejected: Counts = {}
    first_rejected: dict[str, str] = {}
    """The first rejection of each reason, as text."""
    left_out: Counts = {}
    passes: int | None = None
    """The last version."""
    skipped_steps: int | None = None
    positions: Counts = {}
    wall_s: float | None = None
    metrics: RunMetrics = RunMetrics()
    halves: dict[str, Measures] | None = None
    """Metrics of the "first" and the "last" half, if they are measured."""
    tensors: dict[str, dict[str, Any]] = {}
    slots: dict[str, dict[str, Any]] = {}
    event_span_s: Seconds | None = None
    late: int | None = None
    tables: dict[str, ReportedTable] = {}
    held_shrinks: dict[str, HeldShrink] = {}
    time_s: Seconds = {}
    advice: str | None = None
    links: dict[str, dict[str, dict[str, Number]]] = {}
    waits: RankWaits | None = None
    straggler: StragglerStatus | None = None
    evaluator: EvaluatorStatus | None = None
    """Of the launcher; None: the job has no evaluator."""
    tuning: TuningStatus | None = None
    """Of the launcher; None: the job has chosen neither settings nor crosses."""
    staleness_steps: dict[str, dict[str, Number]] = {}
    digest: str = ""
    """Hash over all rows, dense weights and optimizer state."""
    compared: list[tuple[int, list[str]]] = []
    """Replayed passes, each with its differences from the log."""
    waiting: int | UnsetType = UNSET
    """Impressions and clicks of a join whose window has not ended; unset without a join."""
