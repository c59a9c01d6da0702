"""Builds a job's model at its initial weights."""

from pathlib import Path

import torch
from torch import nn

from headrace.dataset.spec.schema import Schema
from headrace.seeds import derive
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TrainerJob
from headrace.trainer.models.calibration import add_calibration
from headrace.trainer.models.contract import Declared, Shape
from headrace.trainer.models.registry import load_model


def build_model(
    job: TrainerJob, schema: Schema, folder: Path, device: torch.device, ranks: Ranks | None = None
) -> nn.Module:
    """The model at its initial weights: the same on every rank, but for what a model divides over `ranks`."""
    torch.manual_seed(derive(job.seed, "model"))
    shape = Shape.of(schema, job.tables, [task.name for task in job.tasks])
    model = load_model(job.model, shape, folder)
    if ranks is not None and (divide := Declared.of(model).divide) is not None:
        divide(ranks, device)
    if job.train.calibrate and job.dense.strategy != "pipeline" and all(task.loss != "softmax" for task in job.tasks):
        add_calibration(model, [task.name for task in job.tasks if task.loss == "bce"])
    return model.to(device)
