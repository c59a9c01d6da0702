"""Prediction jobs: their requests, the checks of these, and their plans.

Workers are processes of their own (`python -m headrace.trainer.predict`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.trainer.config import TrainerJob
from headrace.trainer.predict.after_training import SECTION, check_after, names_tensors, try_outputs
from headrace.trainer.predict.config import LIVE, PredictionRequest
from headrace.trainer.predict.prediction_plan import (
    OutputTaken,
    PredictionPlan,
    error_at,
    fingerprint_of,
    names_commit,
    own_source,
    segments_of,
    servers_of,
    source_config,
    with_absolute_paths,
)
from headrace.trainer.spec.history_tables import check_no_statistics
from headrace.trainer.spec.join_tables import check_no_join

__all__ = [
    "LIVE",
    "SECTION",
    "OutputTaken",
    "PredictionPlan",
    "PredictionRequest",
    "check_after",
    "check_no_join",
    "check_no_statistics",
    "check_outputs",
    "error_at",
    "fingerprint_of",
    "names_commit",
    "own_source",
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
