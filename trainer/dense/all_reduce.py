"""The dense strategy "all_reduce": one flat buffer, summed over ranks, then the optimizer.

DistributedDataParallel is not used because it changes its buckets after the first iteration, so its sums differ after
a restart.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.timeline import Span, recorded
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.dgc import DgcSums
from headrace.trainer.dense.flat_parameters import FlatOptimizer, FlatParameters, clip
from headrace.trainer.dense.gradient_sums import BucketSums, GradientSums
from headrace.trainer.dense.powersgd import PowerSgdSums
from headrace.trainer.dense.strategy import Around, DenseStrategy, Parameters
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.device_copies import DeviceCopies

SUMS: Mapping[str, type[GradientSums]] = {"dgc": DgcSums, "powersgd": PowerSgdSums}
"""By `dense.compression`; others are sums in buckets."""


class AllReduceDense(DenseStrategy):
    _flat: FlatParameters
    _optimizer: FlatOptimizer

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(model, config, ranks, FlatParameters(model, more))
        sums = SUMS.get(config.compression, BucketSums) if self._grad.numel() else BucketSums
        self._sums: GradientSums = sums(self._flat, ranks, config, around.seed)
        learns = config.optimizer.split_momentum()[1] if sums.by_ranks else config.optimizer
        self._state_names = learns.state_names if sums.by_ranks else learns.state
        self._optimizer = FlatOptimizer(self._flat.weights, learns, self._flat.segments)
        self._clip_norm = None if sums.by_ranks else config.clip_norm

    @property
    def gradient(self) -> Tensor:
        """The flat gradient of the step. Backward adds to it."""
        return self._grad

    def clear(self) -> None:
        self._sums.clear()
        super().clear()

    def fills(self, loss_scale: float) -> None:
        self._sums.fills(loss_scale)

    @recorded(Span.REDUCE)
    def after_backward(self, step: int, loss_scale: float) -> None:
        """Begins to sum the gradient over ranks."""
        self._sums.begin(loss_scale)

    @recorded(Span.REDUCE)
    def wait(self) -> None:
        """For the sums."""
        self._sums.wait()
        self._sums.result()

    def look(self, copies: DeviceCopies) -> None:
        if not self._sums.checks:
            self._flat.look(copies)

    def finite(self) -> bool:
        """Collective with overlap."""
        return self._sums.finite() if self._sums.checks else self._flat.finite(self._ranks.world)

    def step(self) -> None:
        if not self._grad.numel():
            return
        if self._clip_norm is not None:
            clip(self._grad, torch.linalg.vector_norm(self._grad), self._clip_norm)
        self._optimizer.step(self._grad)

    def flush(self) -> None:
        """Every step is complete, but for the sums of one that was skipped."""
        self._sums.wait()
        if self._sums.of_ranks is not None:
            self._sums.of_ranks.close_pass()

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self._sums.tensors()

    def consolidate(self) -> dict[str, Tensor]:
        """Every rank holds everything, but for what the others have for themselves."""
        return self.tensors() | ({} if self._sums.of_ranks is None else self._sums.of_ranks.consolidate())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        self._sums.load(tensors)

    def digest(self) -> str:
        """Over all tensors, and those that ranks have for themselves."""
        digest = super().digest()
        return digest if self._sums.of_ranks is None else self._sums.of_ranks.digest(digest)
