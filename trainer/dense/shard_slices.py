"""The dense strategy "shards": slices of the flat buffer are rows on the shards, see trainer.spec.shard_tables.

Every rank pushes the gradients of all slices with those of its batch, and pulls the slices with its next rows. Shards
merge and learn; trainers hold no optimizer. Commits hold the initial weights beside the present ones.

Shapes: S slices, F floats of a slice.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.deadline import Deadline
from headrace.pserver.config import DENSE_SLICES, SLICE_FLOATS
from headrace.pserver.protocol.shards import F32, Floats, Gradients, Keys
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatParameters, clip
from headrace.trainer.dense.strategy import Around, DenseStrategy, Parameters
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.models.contract import Declared

INITIAL = "shards.initial"
"""Name, in commits, of the weights to which the rows on the shards are added."""

APART = 2531
"""Difference of the keys of two neighbouring slices: odd, and the golden section of NUM_BUCKETS."""


def keys_of(num_slices: int) -> NDArray[np.uint64]:
    """The keys of slices. However many there are, all shards own about as many: their buckets fill the range evenly.

    Source: Knuth, The Art of Computer Programming 3, 6.4 (Fibonacci hashing).
    """
    return np.arange(num_slices, dtype=np.uint64) * np.uint64(APART)


def in_order(model: nn.Module) -> bool:
    """Whether a model says that it uses parameters only in calls of the modules that hold them."""
    return Declared.of(model).parameters_in_calls


class _BeforeCall:
    """Called before a module is: takes the parameters up to its own. A copy of the module does nothing of the kind."""

    def __init__(self, take_to: Callable[[int], None], end: int) -> None:
        self._take_to, self._end = take_to, end

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self._take_to(self._end)

    def __deepcopy__(self, _memo: object) -> "_BeforeCall":
        return _BeforeCall(_ignore, 0)


def _ignore(_end: int) -> None:
    pass


class ShardDense(DenseStrategy):
    _flat: FlatParameters

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(model, config, ranks, FlatParameters(model, more, multiple=SLICE_FLOATS))
        assert around.shards is not None, "they keep the slices"
        self._initial = self._flat.weights.clone()
        self._shards, self._step_s, self._awaiting = around.shards, around.step_s, around.awaiting
        clips = config.clip_norm is not None and len(self._initial) > 0
        self._sums_for_norm = clips and around.in_step and ranks.world > 1
        num_slices = len(self._initial) // SLICE_FLOATS
        self._keys = Keys(keys_of(num_slices), np.zeros(num_slices, np.uint16))
        self._no_counts_S = np.zeros(num_slices, np.float32)
        self._coming: F32 | None = None
        self._num_taken, self._by_layer = 0, False
        if config.slice_floats is not None and num_slices:
            self._shards.split(
                self._keys,
                max(1, config.slice_floats // SLICE_FLOATS),
                rows_first=config.priority == "sparse_first",
            )
            self._by_layer = config.priority == "sparse_first" and not more and in_order(model)
        if self._by_layer:
            self._wait_by_layer(model)

    @property
    def slices(self) -> Mapping[str, Keys]:
        return {DENSE_SLICES: self._keys} if len(self._keys.keys_U) else {}

    def take(self, rows: Mapping[str, Floats]) -> None:
        """Where each layer waits for its own parameters, later ones may come during the forward
        pass."""
        if (rows_SF := rows.get(DENSE_SLICES)) is not None:
            assert isinstance(rows_SF, np.ndarray), "slices are on no device"
            self._coming, self._num_taken = rows_SF, 0
            if not self._by_layer:
                self._take_to(len(self._initial))

    def _take_to(self, end: int) -> None:
        """Use the slices with the first `end` floats."""
        if self._coming is None or end <= self._num_taken:
            return
        stop = -(-end // SLICE_FLOATS)
        with self._awaiting():
            self._shards.await_slices(stop)
        begin, ends = self._num_taken, stop * SLICE_FLOATS
        moved = torch.from_numpy(self._coming[begin // SLICE_FLOATS : stop]).reshape(-1).to(self._initial.device)
        torch.add(self._initial[begin:ends], moved, out=self._flat.weights[begin:ends])
        self._num_taken = ends
        if ends == len(self._initial):
            self._coming = None

    def _wait_by_layer(self, model: nn.Module) -> None:
        """Before each layer is called, wait for its parameters and those before it."""
        for module in model.modules():
            ends = [self._flat.end_of(each) for each in module.parameters(recurse=False) if each.requires_grad]
            if ends:
                module.register_forward_pre_hook(_BeforeCall(self._take_to, max(ends)))

    def push(self) -> dict[str, Gradients]:
        self._take_to(len(self._initial))  # of layers that were not called
        if not len(self._keys.keys_U):
            return {}
        grads_SF = self._flat.gradient.cpu().numpy().reshape(-1, SLICE_FLOATS)
        return {DENSE_SLICES: Gradients(grads_SF, self._no_counts_S, self._no_counts_S)}

    def communicates(self, step: int) -> bool:
        """Trainers that take each step together sum their gradients for `clip_norm`, which is that of the sum."""
        return self._sums_for_norm

    def after_backward(self, step: int, loss_scale: float) -> None:
        """The gradient stays this rank's own. Of trainers that do not wait for each other each clips its own."""
        own = self._flat.gradient
        if loss_scale != 1:
            own.div_(loss_scale)
        if self._config.clip_norm is None or not len(own):
            return
        total = own
        if self._sums_for_norm:
            total = own.clone()
            self._ranks.all_reduce(total)()
        clip(own, torch.linalg.vector_norm(total), self._config.clip_norm)

    def flush(self) -> None:
        """Reads the slices once more, since the last push of a rank asks for no rows."""
        if self.slices:
            self.take(self._shards.look(self.slices, Deadline.after(self._step_s)))
            self._take_to(len(self._initial))

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers, and the initial weights."""
        return self._flat.tensors() | ({INITIAL: self._initial} if self.slices else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """After another strategy, the weights of its commit are the initial ones."""
        self._flat.load(tensors)
        self._initial.copy_(tensors.get(INITIAL, self._flat.weights))
