"""Builds a job's model at its initial weights."""

from pathlib import Path

import torch
from torch import nn

from dataset.spec.schema import Schema
from millrace.seeds import derive
from trainer.config import TrainerJob
from trainer.models.needs import shape_of
from trainer.models.registry import load_model


def build_model(job: TrainerJob, schema: Schema, folder: Path, device: torch.device) -> nn.Module:
    """The model at its initial weights: the same on every rank."""
    torch.manual_seed(derive(job.seed, "model"))
    shape = shape_of(schema, job.tables, [task.name for task in job.tasks])
    return load_model(job.model, shape, folder).to(device)
