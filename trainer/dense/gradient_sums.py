"""The seam of sums: how the flat gradients of all ranks become one in a step of "all_reduce"; and sums in buckets.

Other sums have a module each: dgc, powersgd. `trainer.dense.all_reduce` chooses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from headrace.config import MAX_FLOAT32
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatParameters, within
from headrace.trainer.dense.rank_tensors import RESIDUAL, RankTensors
from headrace.trainer.dense_config import DenseSection

AllReduce = Callable[[Tensor], Callable[[], None]]
"""Begins to sum a flat tensor over ranks in place; the result waits. As Ranks.all_reduce."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class GradientSums:
    """A step: `clear`, `fills`, backward, `finite`, then `begin`, `wait` and `result`, or the step is skipped.

    Every kind of sums has the same arguments.
    """

    checks = True
    """Whether `finite` is to be asked of these sums, as they change the gradient before it is summed."""
    by_ranks = False
    """Whether each rank applies momentum to its own gradient, and clips it, before it is summed."""
    of_ranks: RankTensors | None = None
    """State that each rank has for itself."""

    def __init__(self, flat: FlatParameters, ranks: Ranks, config: DenseSection, seed: int) -> None:
        """`seed`: of the job."""
        self._gradient, self._ranks = flat.gradient, ranks

    def clear(self) -> None:
        """Begin a step. Sums of a skipped step may still be under way."""
        raise NotImplementedError

    def fills(self, loss_scale: float) -> None:
        """The next backward pass completes the gradient, times `loss_scale`."""
        raise NotImplementedError

    def finite(self) -> bool:
        """Whether the gradient can be summed over ranks. May be collective; changes no state."""
        raise NotImplementedError

    def begin(self, loss_scale: float) -> None:
        """Collective: begin the sums that are not begun."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all sums that were begun."""
        raise NotImplementedError

    def result(self) -> None:
        """The step counts, after `wait`: the gradient is the sum over ranks, and the state that after the step."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """State that all ranks hold alike, by the names in commits."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the state in the tensors of a commit, made with any number of ranks."""
        if self.of_ranks is not None:
            self.of_ranks.load(tensors)


class CompleteSums(GradientSums, ABC):
    """Sums that begin when the gradient is complete: in a step it is prepared once."""

    checks = True

    def __init__(self, flat: FlatParameters, ranks: Ranks, config: DenseSection, seed: int) -> None:
        super().__init__(flat, ranks, config, seed)
        self._loss_scale = 1.0
        self._finite: bool | None = None

    @abstractmethod
    def _prepare(self) -> bool:
        """Change the gradient, which has no loss scale any more, to what is summed. Whether it can be summed."""

    def clear(self) -> None:
        self._loss_scale, self._finite = 1.0, None

    def fills(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale

    def finite(self) -> bool:
        if self._finite is None:
            if self._loss_scale != 1:
                self._gradient.div_(self._loss_scale)
            self._finite = self._prepare()
        return self._finite

    def begin(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self.finite()


class BucketSums(GradientSums):
    """Sums in fixed buckets of the flat buffer, of all numbers, which may be rounded.

    With `overlap` a bucket is summed as soon as backward has filled it, beside the rest of the backward pass. Layers
    are filled from the last to the first, so buckets are begun in that order: the same on all ranks, whatever order
    gradients become ready in. Buckets with parameters that backward does not fill, such as learnt default rows, come
    last.
    """

    def __init__(self, flat: FlatParameters, ranks: Ranks, config: DenseSection, seed: int) -> None:
        super().__init__(flat, ranks, config, seed)
        gradient = flat.gradient
        self._overlap = config.overlap and gradient.numel() > 0
        self._all_reduce = all_reduce_of(ranks, config)
        size, total = config.bucket_bytes // gradient.element_size(), gradient.numel()
        self._bounds = [(begin, min(begin + size, total)) for begin in range(0, total, size)]
        self.residuals = None
        if config.compression == "fp16" or config.compression == "bf16":
            self.residuals = Residuals(gradient, ranks, config.compression)
        self.of_ranks = None if self.residuals is None else self.residuals.of_ranks
        parameters = [each for name, each in flat.parameters.items() if name not in flat.more]
        self._of = {each: self._buckets_of(each, size) for each in parameters}
        unfilled = {bucket for name in flat.more for bucket in self._buckets_of(flat.parameters[name], size)}
        filled = [bucket for bucket in range(len(self._bounds)) if bucket not in unfilled]
        self._order = [*reversed(filled), *sorted(unfilled)]
        self._num_parameters = [0] * len(self._bounds)
        for buckets in self._of.values():
            for bucket in buckets:
                self._num_parameters[bucket] += 1
        for bucket in unfilled:
            self._num_parameters[bucket] += 1
        self.checks = self._overlap or self.residuals is not None
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


class Residuals:
    """Compression of dense gradients: they are rounded to 16 bits before they are summed over ranks.

    The gradient is changed in place, and `sent` is what ranks sum. What rounding leaves of a gradient is the rank's
    residual, which is added to the gradient of the next step (error feedback; Seide et al. 2014). It belongs to the
    rank, so commits hold the residuals of all ranks, and digests hash them in rank order. On another number of ranks,
    each begins with their mean.
    """

    def __init__(self, gradient: Tensor, ranks: Ranks, compression: Literal["fp16", "bf16"]) -> None:
        self._gradient = gradient
        self.sent = torch.zeros_like(gradient, dtype=DTYPES[compression])
        self.residual = torch.zeros_like(gradient)
        self.largest = torch.finfo(self.sent.dtype).max
        """Largest number that can be sent."""
        self.of_ranks = RankTensors({RESIDUAL: self.residual}, ranks, keeps_sum=False)

    def round(self, begin: int, end: int, loss_scale: float) -> Tensor:
        """Round a part of the gradient, and return what is sent. The gradient then holds what is left."""
        part, sent = self._gradient[begin:end], self.sent[begin:end]
        if loss_scale != 1:
            part.div_(loss_scale)
        part.add_(self.residual[begin:end])
        sent.copy_(part)
        part.sub_(sent)
        return sent

    def keep(self) -> None:
        """The step counts: keep what is left, and put the sums over ranks into the gradient."""
        self.residual.copy_(self._gradient)
        self._gradient.copy_(self.sent)


def all_reduce_of(ranks: Ranks, config: DenseSection) -> AllReduce:
    """The sums of `dense.hierarchy`, or those of all ranks at once.

    In a hierarchy ranks sum within a machine, then between machines, then within a machine again. Each of the n ranks
    of a machine is the first one of a slice: it sums that slice over its machine, in rank order, then with the ranks of
    other machines that own the same slice; then the machine's ranks gather the slices. So a machine sends 2 (M-1)/M
    times the gradient over its link, for M machines, by n streams at once.
    """
    size = 1 if config.hierarchy is None else config.hierarchy.size(ranks.world)
    return ranks.all_reduce if size == 1 else lambda flat: _begin_in_two_levels(ranks, size, flat)


def _begin_in_two_levels(ranks: Ranks, size: int, flat: Tensor) -> Callable[[], None]:
    num_short = -len(flat) % size
    padded = torch.cat([flat, flat.new_zeros(num_short)]) if num_short else flat
    summed = ranks.reduce_scatter(padded, size)

    def wait() -> None:
        summed()
        ranks.all_gather(padded, size)
        if num_short:
            flat.copy_(padded[: len(flat)])

    return wait
