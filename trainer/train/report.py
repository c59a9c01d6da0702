"""report.json: the summary that a finished run writes beside its commits."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.dataset.spec.join_section import JoinSection
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.pserver.protocol.shards import Shards
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.observer import INFER_FIRST

REPORT = "report.json"

TABLE = ("rows", "bytes", "rows_by_slot", "bytes_by_slot")
"""Figures of each table in the report."""

Compared = Sequence[tuple[int, Sequence[str]]]


def digest_of(shards: Shards, dense: DenseStrategy, deadline: Deadline) -> str:
    """Hash over all rows, dense weights and optimizer state. It does not depend on the number of shards."""
    tables = {name: f"{value:032x}" for name, value in sorted(shards.digest(deadline).items())}
    return hashlib.sha256(json.dumps({"tables": tables, "dense": dense.digest()}).encode()).hexdigest()


def _spans(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"life": metrics["life"], "window": metrics["window"]}


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
    report = {
        "events": progress.num_events,
        "samples": progress.num_samples,
        "rejected": progress.rejected,
        "first_rejected": progress.first_of,
        "left_out": progress.left_out,
        "passes": progress.version,
        "skipped_steps": progress.skipped_steps,
        "positions": progress.positions,
        "wall_s": round(progress.wall_s, 3),
        "metrics": _spans(metrics) | {name: _spans(metrics[name]) for name in (INFER_FIRST,) if name in metrics},
        "halves": metrics.get("halves"),
        "tensors": _spans(metrics["tensors"]),
        "slots": status.get("slots", {}),
        "event_span_s": status.get("event_span_s"),
        "late": status.get("late", 0),
        "tables": {name: {key: table[key] for key in TABLE} for name, table in status.get("tables", {}).items()},
        "held_shrinks": status.get("operations", {}).get("shrinking", {}).get("held", {}),
        "time_s": status["time_s"],
        "advice": status["advice"],
        "links": status.get("links", {}),
        "waits": status.get("waits"),
        "straggler": status.get("straggler"),
        "staleness_steps": status.get("staleness_steps", {}),
        "digest": digest,
        "compared": [[number, differences] for number, differences in compared],
    }
    if join is not None:
        report["waiting"] = waiting_events(status.get("tables", {}), join)
    with writing(store / REPORT):
        write_whole(REAL, store / REPORT, json.dumps(report, indent=2, allow_nan=False).encode())


def waiting_events(tables: Mapping[str, Any], join: JoinSection) -> int:
    """Impressions and clicks whose window has not ended: the rows of the join's table but for its clock."""
    rows = int(tables.get(JOIN_TABLE, {}).get("rows", 0))
    return max(0, rows - (join.max_ahead is not None))
