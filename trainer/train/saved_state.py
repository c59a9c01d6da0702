"""Rank 0's part of a commit: dense tensors, metrics, counters and positions; captured in a pause, written after it.

Shards save rows themselves. A trainer that loads this state continues bit for bit.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.metrics.meter import MeterState
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.carried_state import CarriedState
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.mixed_precision import LossScale
from headrace.trainer.train.observer import Observer

DENSE, ARRAYS = "dense.safetensors", "metrics.safetensors"


@dataclass(frozen=True, slots=True)
class SavedState:
    """Copies of the state of one version."""

    version: int
    log_from: int
    """First log record that a replay from this commit needs."""
    positions: Mapping[str, int]
    dense: Mapping[str, Tensor]
    arrays: Mapping[str, NDArray[Any]]
    state: Mapping[str, Any]
    """JSON-able data."""

    def write(self, folder: Path, *, sync: bool = True) -> list[str]:
        """Write and `sync` rank 0's files of a commit; returns their names. Raises HeadraceError and OSError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        try:
            save_tensors(dict(self.dense), folder / DENSE)
            save_arrays(arrays, folder / ARRAYS)
        except SafetensorError as error:  # also raised for errors of the disk
            raise HeadraceError(f"{folder}: {error}") from error
        for name in (DENSE, ARRAYS) if sync else ():
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return [DENSE, ARRAYS]


@dataclass(frozen=True)
class StateHolders:
    """The parts of a trainer with state in commits."""

    dense: DenseStrategy
    observer: Observer
    closer: PassCloser
    progress: TrainerProgress
    scale: LossScale
    rate: LearningRate
    carried: CarriedState

    def capture(self, log_from: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedState:
        """Copies of the present state, on rank 0 between passes. `facts` join the state; `tensors`: consolidated."""
        meter, progress = self.observer.state(), self.progress
        arrays = {f"meter/{name}": array for name, array in meter.arrays.items()}
        arrays |= {f"slots/{name}": array for name, array in self.closer.arrays().items()}
        state = {
            "progress": progress.saved(),
            "closer": self.closer.state(),
            "meter": dict(meter.facts),
            "loss_scale": self.scale.state(),
            "learning_rate": self.rate.state(),
            **facts,
        }
        dense = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        return SavedState(progress.version, log_from, dict(progress.positions), dense, arrays, state)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from a commit, on every rank, with its slots or others.

        Raises BadInput if the dense part is of another model.
        """
        tensors = self.carried.tensors(load_tensors(folder / DENSE), state["spec"], self.dense.tensors())
        if "imported" in state:  # a warm start (trainer.importing): the rest is that of a new job
            weights = {name: value for name, value in self.dense.tensors().items() if name.startswith("model.")}
            self.dense.load(weights | tensors)
            self.progress.load_saved(state["progress"])
            return
        self.dense.load(tensors)
        arrays = load_arrays(folder / ARRAYS)
        meter = {name.removeprefix("meter/"): array for name, array in arrays.items() if name.startswith("meter/")}
        self.observer.load_state(MeterState(meter, state["meter"]))
        slots = {name.removeprefix("slots/"): array for name, array in arrays.items() if name.startswith("slots/")}
        self.closer.load_state(state["closer"], self.carried.counters(slots, state["spec"]))
        self.progress.load_saved(state["progress"])
        self.scale.load_state(state["loss_scale"])
        self.rate.load_state(state.get("learning_rate", {"samples": self.progress.num_samples}))
