"""The dense strategy "sharded": each rank keeps the optimizer's state of a slice of the flat buffer, and learns it.

Gradients are summed so that each rank has the sum of its slice; it learns, and ranks gather the slices. That is stage 1
of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020); stages 2
and 3 are in sharded_blocks. With `group`, slices are divided over the ranks of a group, and every group has all of them
(hybrid sharding). Commits are those of "all_reduce".
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.timeline import Span, recorded
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.block_layout import HASHED_FLOATS, BlockLayout, OwnSlices
from headrace.trainer.dense.flat_parameters import (
    FlatOptimizer,
    FlatParameters,
    NamedTensors,
    clip,
    digest_of,
)
from headrace.trainer.dense.strategy import PREFIX, Around, DenseStrategy, Parameters, state_in
from headrace.trainer.dense_config import DenseSection, group_size
from headrace.trainer.dense_optimizers import STEP, Segments


class SliceSegments(Segments):
    """The parts of all parameters in the slices of a rank; empty where it has none of one."""

    def __init__(self, whole: Segments, own: OwnSlices, ranks: Ranks) -> None:
        super().__init__([(own.before(begin), own.before(end)) for begin, end in whole], whole.names)
        self._ranks, self._size = ranks, own.layout.size

    def norms(self, *buffers: Tensor) -> list[list[Tensor]]:
        """From the squares of the slices of a group, in rank order, in float64."""
        found = super().norms(*buffers)
        if self._size == 1:
            return found
        number, device = self._ranks.rank // self._size, buffers[0].device
        squares = np.zeros((self._ranks.world // self._size, len(buffers), len(self)))
        squares[number] = [[float(norm) ** 2 for norm in norms] for norms in found]
        total = np.sqrt(self._ranks.sum_floats(squares.reshape(-1)).reshape(squares.shape)[number])
        return [[torch.tensor(float(norm), device=device) for norm in norms] for norms in total]


class SlicedDense(DenseStrategy):
    """Every rank learns slices; the subclass says which, and what a rank has of those of others."""

    _optimizer: FlatOptimizer

    def __init__(
        self, model: nn.Module, config: DenseSection, ranks: Ranks, learnt: NamedTensors, own: OwnSlices
    ) -> None:
        super().__init__(model, config, ranks, learnt)
        self._own, self._size = own, own.layout.size
        self._optimizer = FlatOptimizer(own.weights, config.optimizer, SliceSegments(learnt.segments, own, ranks))
        self._names = config.optimizer.vector_names
        """Names of the optimizer's state in slices."""
        self._begun: Callable[[], None] | None = None
        self._loss_scale, self._state_digest = 1.0, ""

    @abstractmethod
    def _held_by_all(self) -> dict[str, Tensor]:
        """Tensors of the model that all ranks hold as a whole."""

    @abstractmethod
    def _spread(self) -> None:
        """Collective: ranks get what they need of the weights of others."""

    def _vectors(self) -> dict[str, Tensor]:
        """By name the slices that are hashed and committed; those of the state are empty before the first step."""
        return {name: self._optimizer.state.get(name, torch.zeros(0)) for name in self._names}

    @recorded(Span.REDUCE)
    def wait(self) -> None:
        """Waits for the sum of this rank's slices, learns them, and spreads them."""
        if self._begun is None:
            return
        self._begun()
        self._begun, gradient = None, self._own.gradient
        if self._loss_scale != 1:
            gradient.div_(self._loss_scale)
        if self._config.clip_norm is not None:
            clip(gradient, self._norm(), self._config.clip_norm)
        self._optimizer.step(gradient)
        self._spread()

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, from those of the slices in rank order."""
        own: Tensor = torch.linalg.vector_norm(self._own.gradient[: self._own.used])
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
        hashes = {
            name: np.concatenate([_hashes(each) for each in self._parts(vector)])
            for name, vector in self._vectors().items()
        }
        heard = self._ranks.gather(hashes)
        groups = range(0, self._ranks.world, self._size)
        found = None if heard is None else {"states": [self._joined_hash(heard[at : at + self._size]) for at in groups]}
        self._state_digest = self._ranks.broadcast(found)["states"][self._ranks.rank // self._size]

    def _parts(self, vector: Tensor) -> Sequence[NDArray[np.float32]]:
        """The slices of a vector without padding."""
        return self._own.unpadded(vector.cpu().numpy())

    def _joined_hash(self, hashes: Sequence[Mapping[str, NDArray[np.uint8]]]) -> str:
        """The hash of the slices of all ranks of a group."""
        width = hashlib.sha256().digest_size
        return _hash_of(
            {name: self._own.layout.joined([each[name] for each in hashes], width, HASHED_FLOATS) for name in hashes[0]}
        )

    def _count(self) -> dict[str, Tensor]:
        """The optimizer's count of steps."""
        state = self._optimizer.state
        return {PREFIX + STEP: state[STEP]} if STEP in state and self._grad.numel() else {}

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors of the model, and its slices of the optimizer's state."""
        own = {PREFIX + name: self._optimizer.state[name] for name in self._names if name in self._optimizer.state}
        return self._flat.tensors() | self._count() | (own if self._grad.numel() else {})

    def _consolidated(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Collective: on rank 0 the flat buffers of `_vectors`, from the slices of its group."""
        vectors = self._vectors()
        sends = self._ranks.rank < self._size
        heard = self._ranks.gather(
            {name: np.concatenate(self._parts(vectors[name] if sends else torch.zeros(0))) for name in names}
        )
        if heard is None:
            return {}
        group = heard[: self._size]
        return {name: torch.from_numpy(self._own.layout.joined([each[name] for each in group])) for name in names}

    def consolidate(self) -> dict[str, Tensor]:
        """Rank 0 gets the slices of its group."""
        found = self._flat.tensors() | self._count()
        if not self._grad.numel() or not self._optimizer.state.keys() >= set(self._names):
            return found
        return found | {PREFIX + name: whole for name, whole in self._consolidated(self._names).items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat.load(tensors)
        state = state_in(tensors)
        if self._grad.numel() and state.keys() == self._state_names:
            self._optimizer.state = {
                name: (value if name == STEP else self._own.cut(value)).to(self._grad.device).clone()
                for name, value in state.items()
            }

    def digest(self) -> str:
        """Over what all ranks hold, and the hash of all slices at the last `flush` or `load`."""
        return hashlib.sha256(
            f"{digest_of(self._held_by_all() | self._count())} {self._state_digest}".encode()
        ).hexdigest()


class ShardedDense(SlicedDense):
    """Every rank has all weights and gradients as a whole, and learns one slice of the flat buffer."""

    _flat: FlatParameters

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        size = group_size(ranks.world, config.group)
        flat = FlatParameters(model, more, size * HASHED_FLOATS)
        names, number = list(flat.parameters), ranks.rank % size
        layout = BlockLayout(names, [each.numel() for each in flat.parameters.values()], [0] if names else [], size)
        own = slice(number * layout.slice_floats, (number + 1) * layout.slice_floats)
        super().__init__(model, config, ranks, flat, OwnSlices(layout, number, flat.weights[own], flat.gradient[own]))
        self._state_digest = self._fresh_digest()

    @recorded(Span.REDUCE)
    def after_backward(self, step: int, loss_scale: float) -> None:
        """Begins to sum the gradient's slices."""
        if self._grad.numel():
            self._begun, self._loss_scale = self._ranks.reduce_scatter(self._grad, self._size), loss_scale

    def _spread(self) -> None:
        self._ranks.all_gather(self._flat.weights, self._size)

    def _held_by_all(self) -> dict[str, Tensor]:
        return self._flat.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        state = state_in(tensors)
        if not self._grad.numel() or state.keys() != self._state_names:
            self._state_digest = self._fresh_digest()
            return
        self._state_digest = self._digest_of_whole({name: state[name] for name in self._names})

    def _digest_of_whole(self, state: Mapping[str, Tensor]) -> str:
        return _hash_of({name: _hashes(value[: self._flat.length].cpu().numpy()) for name, value in state.items()})

    def _fresh_digest(self) -> str:
        """The hash of the state before the first step: there is none, or all its elements are the same."""
        return self._digest_of_whole(
            {name: value[:1].expand(self._flat.length if len(value) else 0) for name, value in self._vectors().items()}
        )


def _hashes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """SHA-256 of each HASHED_FLOATS of a slice, one after another."""
    parts = (values[at : at + HASHED_FLOATS] for at in range(0, len(values), HASHED_FLOATS))
    return np.frombuffer(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts), np.uint8)


def _hash_of(hashes: Mapping[str, NDArray[np.uint8]]) -> str:
    """The hash of the whole state, in hex, from those of its parts."""
    total = hashlib.sha256()
    for name in sorted(hashes):
        total.update(name.encode())
        total.update(hashes[name].tobytes())
    return total.hexdigest()
