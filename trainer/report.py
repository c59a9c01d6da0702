"""What a finished run leaves behind: report.json, and the whole model in a folder.

The model folder is the plain save: tables by the shards, dense part as safetensors.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from millrace.deadline import Deadline
from pserver.client import Shards
from trainer.dense import DensePart
from trainer.progress import Progress

REPORT = "report.json"
MODEL = "model"


def digest_of(shards: Shards, dense: DensePart, deadline: Deadline) -> str:
    """One hash over all rows (independent of order and of shards), dense weights and optimizer state."""
    tables = {name: f"{value:032x}" for name, value in sorted(shards.digest(deadline).items())}
    return hashlib.sha256(json.dumps({"tables": tables, "dense": dense.digest()}).encode()).hexdigest()


def save_model(folder: Path, shards: Shards, dense: DensePart, deadline: Deadline) -> None:
    """Rows and dense part, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    shards.save(folder / "tables", deadline)
    tensors = {name: value.contiguous().cpu().clone() for name, value in dense.tensors().items()}
    save_file(tensors, folder / "dense.safetensors")


def write_report(store: Path, progress: Progress, metrics: Mapping[str, Any], digest: str) -> None:
    """report.json, complete or absent."""
    report = {
        "events": progress.num_events,
        "samples": progress.num_samples,
        "rejected": progress.rejected,
        "passes": progress.version,
        "skipped_steps": progress.skipped_steps,
        "positions": progress.positions,
        "wall_s": round(progress.wall_s, 3),
        "metrics": {"life": metrics["life"], "window": metrics["window"]},
        "halves": metrics.get("halves"),
        "slots": progress.status().get("slots", {}),
        "digest": digest,
    }
    temporary = store / f".{REPORT}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(report, file, indent=2, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(store / REPORT)
