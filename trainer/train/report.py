"""report.json: the summary that a finished run writes beside its commits."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from headrace.codec import plain, typed
from headrace.dataset.spec.join_section import JoinSection
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import DigestRows
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.run_report import ReportedTable, RunMetrics, RunReport
from headrace.trainer.status.progress import TrainerProgress

REPORT = "report.json"

Compared = Sequence[tuple[int, Sequence[str]]]


def digest_of(shards: Shards, dense: DenseStrategy, deadline: Deadline) -> str:
    """Hash over all rows, dense weights and optimizer state. It does not depend on the number of shards."""
    tables = {name: f"{value:032x}" for name, value in sorted(shards.call(DigestRows(), deadline).items())}
    return hashlib.sha256(json.dumps({"tables": tables, "dense": dense.digest()}).encode()).hexdigest()


def write_report(
    store: Path,
    progress: TrainerProgress,
    metrics: Mapping[str, Any],
    digest: str,
    compared: Compared,
    join: JoinSection | None = None,
) -> None:
    """Write report.json, whole or not at all. `compared`: replayed passes, each with its differences from the log.

    Raises Unwritable.
    """
    status = progress.status()
    report = RunReport(
        events=progress.num_events,
        samples=progress.num_samples,
        rejected=progress.rejected,
        first_rejected=progress.first_of,
        left_out=progress.left_out,
        passes=progress.version,
        skipped_steps=progress.skipped_steps,
        positions=progress.positions,
        wall_s=round(progress.wall_s, 3),
        metrics=typed(RunMetrics, metrics, "the metrics of a run"),
        halves=metrics.get("halves"),
        tensors={span: metrics["tensors"][span] for span in ("life", "window")},
        slots=status.slots,
        event_span_s=status.event_span_s or None,
        late=status.late or 0,
        tables={name: typed(ReportedTable, plain(table), name) for name, table in status.tables.items()},
        held_shrinks=status.operations.shrinking.held,
        time_s=status.time_s,
        advice=status.advice,
        links=status.links,
        waits=status.waits,
        straggler=status.straggler,
        staleness_steps=status.staleness_steps,
        digest=digest,
        compared=[(number, list(differences)) for number, differences in compared],
        waiting=UNSET if join is None else waiting_events(status.table_rows, join),
    )
    with writing(store / REPORT):
        write_whole(REAL, store / REPORT, json.dumps(plain(report), indent=2, allow_nan=False).encode())


def waiting_events(table_rows: Mapping[str, int], join: JoinSection) -> int:
    """Impressions and clicks whose window has not ended: the rows of the join's table but for its clock."""
    return max(0, table_rows.get(JOIN_TABLE, 0) - (join.max_ahead is not None))
