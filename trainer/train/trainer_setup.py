"""The setup of a trainer: its configuration, the process itself, its connections. Its parts are built from it."""

from dataclasses import dataclass

import torch

from headrace.dataset.reader.client import RemoteParts
from headrace.dataset.spec.schema import Schema
from headrace.identity.credentials import Identity
from headrace.pserver.consistency.policy import Consistency
from headrace.pserver.protocol.shards import Shards
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.status.progress import TrainerProgress


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Made once for a trainer, before any of its parts."""

    config: WorkerConfig
    """With the job's defaults written out, and without its secrets."""
    job: TrainerJob
    """With its secrets."""
    schema: Schema
    device: torch.device
    ranks: Ranks
    policy: Consistency
    shards: Shards
    progress: TrainerProgress
    readers: RemoteParts | None = None
    """Run source and pipe elsewhere; None: this trainer does."""
    identity: Identity | None
