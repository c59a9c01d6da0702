"""Prediction jobs: their requests, plans and output files, and the metrics over all parts.

Workers are processes of their own (`python -m trainer.predict`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import TrainerJob
from trainer.predict.after_training import SECTION, check_after, names_tensors, try_outputs
from trainer.predict.config import LIVE, PredictionRequest
from trainer.predict.export_commit import as_commit
from trainer.predict.metric_inputs import compute_metrics
from trainer.predict.output_files import DEAD_LETTERS, METRICS, PartMark, PredictionOutput, part_name
from trainer.predict.prediction_plan import (
    OutputTaken,
    PredictionPlan,
    error_at,
    fingerprint_of,
    names_commit,
    segments_of,
    servers_of,
    source_config,
    with_absolute_paths,
)

__all__ = [
    "DEAD_LETTERS",
    "LIVE",
    "METRICS",
    "SECTION",
    "OutputTaken",
    "PartMark",
    "PredictionOutput",
    "PredictionPlan",
    "PredictionRequest",
    "as_commit",
    "check_after",
    "check_outputs",
    "compute_metrics",
    "error_at",
    "fingerprint_of",
    "names_commit",
    "part_name",
    "segments_of",
    "servers_of",
    "source_config",
    "with_absolute_paths",
]


def check_outputs(request: PredictionRequest, job: TrainerJob, full: Mapping[str, Any], folder: Path) -> None:
    """Build the model of `full`, the spec of `job`, where the request names other tensors than predictions.

    Raises SpecError for an output that the model does not have, or where it cannot be built.
    """
    if names_tensors(request, job):
        try_outputs(full, folder, request)
