"""The dense strategy "sharded": each rank keeps the optimizer's state of a slice of the flat buffer, and learns it.

Gradients are summed so that each rank has the sum of its slice; it learns, and ranks gather the slices. That is stage 1
of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020). With
`group`, slices are divided over the ranks of a group, and every group has all of them (hybrid sharding). Commits are
those of "all_reduce".
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.timeline import Span, recorded
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatOptimizer, FlatParameters, clip, digest_of
from headrace.trainer.dense.strategy import PREFIX, Around, DenseStrategy, Parameters, state_in
from headrace.trainer.dense_config import DenseSection, group_size
from headrace.trainer.dense_optimizers import STEP

HASHED_FLOATS = 4096
"""Floats of a part of the state that is hashed by itself, so that a digest does not depend on the number of ranks."""


class ShardedDense(DenseStrategy):
    _optimizer: FlatOptimizer

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        self._size = group_size(ranks.world, config.group)
        super().__init__(model, config, ranks, FlatParameters(model, more, self._size * HASHED_FLOATS))
        num_floats = len(self._grad) // self._size
        begin = ranks.rank % self._size * num_floats
        self._own = slice(begin, begin + num_floats)
        self._used = max(0, min(num_floats, self._flat.length - begin))
        """Floats of this rank's slice before the padding."""
        self._own_grad = self._grad[self._own]
        self._optimizer = FlatOptimizer(self._flat.weights[self._own], config.optimizer)
        self._names = config.optimizer.vector_names
        """Names of the optimizer's state in slices."""
        self._begun: Callable[[], None] | None = None
        self._loss_scale, self._state_digest = 1.0, self._fresh_digest()

    @recorded(Span.REDUCE)
    def after_backward(self, step: int, loss_scale: float) -> None:
        """Begins to sum the gradient's slices."""
        if self._grad.numel():
            self._begun, self._loss_scale = self._ranks.reduce_scatter(self._grad, self._size), loss_scale

    @recorded(Span.REDUCE)
    def wait(self) -> None:
        """Waits for the sum of this rank's slice, learns it, and gathers all slices."""
        if self._begun is None:
            return
        self._begun()
        self._begun = None
        if self._loss_scale != 1:
            self._own_grad.div_(self._loss_scale)
        if self._config.clip_norm is not None:
            clip(self._own_grad, self._norm(), self._config.clip_norm)
        self._optimizer.step(self._own_grad)
        self._ranks.all_gather(self._flat.weights, self._size)

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, from those of the slices in rank order."""
        own: Tensor = torch.linalg.vector_norm(self._own_grad[: self._used])
        if self._size == 1:
            return own
        number, squares = self._ranks.rank // self._size, np.zeros(self._ranks.world // self._size)
        squares[number] = float(own) ** 2
        return torch.tensor(math.sqrt(self._ranks.sum_floats(squares)[number]), device=own.device)

    def step(self) -> None:
        """`wait` has done it."""

    def flush(self) -> None:
        """Hashes the slices; each group has its own hash, so a difference shows at the close."""
        if not self._grad.numel():
            return
        heard = self._ranks.gather({name: _hashes(self._slice_of(name)) for name in self._names})
        first = range(0, self._ranks.world, self._size)
        found = None if heard is None else {"states": [_hash_of_slices(heard[at : at + self._size]) for at in first]}
        self._state_digest = self._ranks.broadcast(found)["states"][self._ranks.rank // self._size]

    def _slice_of(self, name: str) -> NDArray[np.float32]:
        """This rank's slice of the state, without padding; empty before the first step."""
        return self._optimizer.state.get(name, torch.zeros(0))[: self._used].cpu().numpy()

    def _counted(self) -> dict[str, Tensor]:
        """Tensors that all ranks hold: weights, buffers, the count of steps."""
        state = self._optimizer.state
        return self._flat.tensors() | ({PREFIX + STEP: state[STEP]} if STEP in state and self._grad.numel() else {})

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers, and this rank's slices of the optimizer's state."""
        own = {PREFIX + name: self._optimizer.state[name] for name in self._names if name in self._optimizer.state}
        return self._counted() | (own if self._grad.numel() else {})

    def consolidate(self) -> dict[str, Tensor]:
        """Rank 0 gets the slices of its group."""
        found = self._counted()
        if not self._grad.numel() or not self._optimizer.state.keys() >= set(self._names):
            return found
        end = self._used if self._ranks.rank < self._size else 0
        heard = self._ranks.gather({name: self._slice_of(name)[:end] for name in self._names})
        for name in self._names if heard is not None else ():
            found[PREFIX + name] = torch.from_numpy(np.concatenate([each[name] for each in heard or ()]))
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat.load(tensors)
        state = state_in(tensors)
        if not self._grad.numel() or state.keys() != self._state_names:
            self._state_digest = self._fresh_digest()
            return
        self._optimizer.state = {
            name: (value if name == STEP else self._part(value)).to(self._grad.device).clone()
            for name, value in state.items()
        }
        self._state_digest = self._digest_of_whole({name: state[name] for name in self._names})

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's slice, padded."""
        part = torch.zeros(len(self._own_grad))
        part[: self._used].copy_(whole[self._own][: self._used])
        return part

    def _digest_of_whole(self, state: Mapping[str, Tensor]) -> str:
        return _hash_of_slices(
            [{name: _hashes(value[: self._flat.length].cpu().numpy()) for name, value in state.items()}]
        )

    def _fresh_digest(self) -> str:
        """The hash of the state before the first step: there is none, or all its elements are the same."""
        state = {name: self._optimizer.state.get(name, torch.zeros(0)) for name in self._names}
        return self._digest_of_whole(
            {name: value[:1].expand(self._flat.length if len(value) else 0) for name, value in state.items()}
        )

    def digest(self) -> str:
        """Over what all ranks hold, and the hash of all slices at the last `flush` or `load`."""
        return hashlib.sha256(f"{digest_of(self._counted())} {self._state_digest}".encode()).hexdigest()


def _hashes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """SHA-256 of each HASHED_FLOATS of a slice, one after another."""
    parts = (values[at : at + HASHED_FLOATS] for at in range(0, len(values), HASHED_FLOATS))
    return np.frombuffer(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts), np.uint8)


def _hash_of_slices(slices: Sequence[Mapping[str, NDArray[np.uint8]]]) -> str:
    """The hash of the whole state, in hex, from those of slices in rank order."""
    total = hashlib.sha256()
    for name in sorted(slices[0]):
        total.update(name.encode())
        for each in slices:
            total.update(each[name].tobytes())
    return total.hexdigest()
