"""Sums of the dense gradients over ranks, in fixed buckets of the flat buffer.

With `overlap` a bucket is summed as soon as backward has filled it, beside the rest of the backward pass. Layers are
filled from the last to the first, so buckets are begun in that order: the same on all ranks, whatever order gradients
become ready in. Buckets with parameters that backward does not fill, such as learnt default rows, come last.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from headrace.pserver.config import MAX_FLOAT32
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import within
from headrace.trainer.dense.hierarchy import all_reduce_of
from headrace.trainer.dense.residuals import Residuals
from headrace.trainer.dense_config import DenseSection


class BucketSums:
    def __init__(
        self,
        gradient: Tensor,
        model: nn.Module,
        more: Mapping[str, nn.Parameter],
        ranks: Ranks,
        config: DenseSection,
    ) -> None:
        """`gradient`: the flat one, of which those of all parameters are views."""
        self._gradient, self._ranks, self._overlap = gradient, ranks, config.overlap and gradient.numel() > 0
        self._all_reduce = all_reduce_of(ranks, config)
        size, total = config.bucket_bytes // gradient.element_size(), gradient.numel()
        self._bounds = [(begin, min(begin + size, total)) for begin in range(0, total, size)]
        self.residuals = None
        if config.compression == "fp16" or config.compression == "bf16":
            self.residuals = Residuals(gradient, ranks, config.compression)
        self.of_ranks = None if self.residuals is None else self.residuals.of_ranks
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._of = {each: self._buckets_of(each, size) for each in parameters}
        unfilled = {bucket for each in more.values() for bucket in self._buckets_of(each, size)}
        filled = [bucket for bucket in range(len(self._bounds)) if bucket not in unfilled]
        self._order = [*reversed(filled), *sorted(unfilled)]
        self._num_parameters = [0] * len(self._bounds)
        for buckets in self._of.values():
            for bucket in buckets:
                self._num_parameters[bucket] += 1
        for bucket in unfilled:
            self._num_parameters[bucket] += 1
        self.checks = self._overlap or self.residuals is not None
        """See GradientSums."""
        self._missing: list[int] | None = None
        self._num_rounded = self._num_begun = 0
        self._finite, self._loss_scale = True, 1.0
        self._sums: list[Callable[[], None]] = []
        if self._overlap:
            for each in parameters:
                each.register_post_accumulate_grad_hook(self._filled)  # type: ignore[no-untyped-call]

    @staticmethod
    def _buckets_of(parameter: nn.Parameter, size: int) -> Sequence[int]:
        begin = parameter.storage_offset()
        return range(begin // size, (begin + max(1, parameter.numel()) - 1) // size + 1)

    def clear(self) -> None:
        self.wait()
        self._num_rounded = self._num_begun = 0
        self._finite, self._loss_scale, self._missing = True, 1.0, None

    def fills(self, loss_scale: float) -> None:
        self._loss_scale, self._missing = loss_scale, list(self._num_parameters)

    def _filled(self, parameter: Tensor) -> None:
        """Backward has filled the gradient of a parameter."""
        if self._missing is None:
            return
        for bucket in self._of[parameter]:  # type: ignore[index]
            self._missing[bucket] -= 1
        while self._num_begun < len(self._order) and not self._missing[self._order[self._num_begun]]:
            self._begin_next()

    def finite(self) -> bool:
        """With `overlap` collective: begins the rest of the sums."""
        while self._num_rounded < len(self._order):
            self._round_next()
        while self._overlap and self._num_begun < len(self._order):
            self._begin_next()
        return self._finite

    def begin(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        while self._num_begun < len(self._order):
            self._begin_next()

    def wait(self) -> None:
        sums, self._sums = self._sums, []
        for each in sums:
            each()

    def result(self) -> None:
        if self.residuals is not None:
            self.residuals.keep()
        elif self._loss_scale != 1:
            self._gradient.div_(self._loss_scale)

    def tensors(self) -> dict[str, Tensor]:
        """There are none."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.of_ranks is not None:
            self.of_ranks.load(tensors)

    def _round_next(self) -> None:
        """Round a bucket where gradients are compressed, and look for numbers that cannot be summed."""
        begin, end = self._bounds[self._order[self._num_rounded]]
        self._num_rounded += 1
        if not self.checks:
            return
        sent, largest = self._gradient[begin:end], MAX_FLOAT32
        if self.residuals is not None:
            sent, largest = self.residuals.round(begin, end, self._loss_scale), self.residuals.largest
        self._finite = self._finite and within(sent, largest / self._ranks.world)

    def _begin_next(self) -> None:
        if self._num_rounded == self._num_begun:
            self._round_next()
        begin, end = self._bounds[self._order[self._num_begun]]
        self._num_begun += 1
        sent = self._gradient if self.residuals is None else self.residuals.sent
        self._sums.append(self._all_reduce(sent[begin:end]))
