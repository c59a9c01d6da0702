"""The dense strategy "allreduce": one flat buffer, summed over ranks in fixed buckets, then the optimizer.

DistributedDataParallel is not used because it changes its buckets after the first iteration, so its sums differ after
a restart. Every parameter begins at a multiple of 64 bytes: kernels of matrix libraries may round differently if not.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from millrace.errors import BadInput, SpecError
from trainer.collectives.ranks import Ranks
from trainer.config import TrainSection
from trainer.dense.buffers import Buffers
from trainer.dense.flat_optimizer import STATE, FlatOptimizer

ALIGN_FLOATS = 16


class AllReduceDense:
    """See module docstring, and DenseStrategy. The flat buffer holds parameters in the order of the module."""

    def __init__(
        self, model: nn.Module, config: TrainSection, ranks: Ranks, more: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """`more`: parameters by name that learn with the model's and are not part of its module.

        Raises SpecError for a name that the module also has.
        """
        self._model, self._more = model, dict(more or {})
        if twice := sorted(self._more.keys() & model.state_dict().keys()):
            raise SpecError(f"the model has a tensor named {twice[0]!r}, as the trainer has; rename it", "model")
        parameters = [each for each in (*model.parameters(), *self._more.values()) if each.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        begins, total = [], 0
        for parameter in parameters:
            begins.append(total)
            total += -(-parameter.numel() // ALIGN_FLOATS) * ALIGN_FLOATS
        self._flat = torch.zeros(total, device=device)
        self._grad = torch.zeros(total, device=device)
        self._sum = torch.zeros(total, device=device) if config.accumulate > 1 else self._grad
        for parameter, begin in zip(parameters, begins, strict=True):
            view = self._flat[begin : begin + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._grad[begin : begin + parameter.numel()].view_as(parameter)
        self._config, self._ranks, self._num_summed = config, ranks, 0
        self._optimizer = FlatOptimizer(self._flat, config.dense_optimizer) if total else None
        self.buffers = Buffers(model, ranks)

    def set_lr(self, lr: float) -> None:
        """See DenseStrategy."""
        if self._optimizer is not None:
            self._optimizer.lr = lr

    @property
    def gradient(self) -> Tensor:
        """The flat gradient of the step. Backward adds to it."""
        return self._grad

    def clear(self) -> None:
        """See DenseStrategy."""
        if self._grad.is_cuda:
            self._grad.zero_()
        else:  # torch would wake a second thread for this, and wait
            self._grad.numpy().fill(0)

    def communicates(self, step: int) -> bool:
        """See DenseStrategy: every step does, unless there are no dense parameters."""
        return self._flat.numel() > 0

    def after_backward(self, step: int, loss_scale: float) -> None:
        """See DenseStrategy: sums the gradient over ranks, in fixed buckets, and divides it by the loss scale."""
        if self._flat.numel():
            self._ranks.all_reduce(self._grad)
            if loss_scale != 1:
                self._grad.div_(loss_scale)

    def finite(self) -> bool:
        """See DenseStrategy."""
        return bool(torch.isfinite(self._grad.sum())) or bool(torch.isfinite(self._grad).all())

    def step(self) -> None:
        """See DenseStrategy. The optimizer runs at every `accumulate`-th step."""
        if self._optimizer is None:
            return
        self._num_summed += 1
        if self._sum is not self._grad:
            self._sum.add_(self._grad)
        if self._num_summed == self._config.accumulate:
            self.flush()

    def flush(self) -> None:
        """See DenseStrategy: applies the gradients summed so far."""
        if self._optimizer is None or self._num_summed == 0:
            return
        if self._num_summed > 1:
            self._sum.div_(self._num_summed)
        if self._config.clip_norm is not None:
            norm = torch.linalg.vector_norm(self._sum)
            self._sum.mul_(torch.clamp(self._config.clip_norm / (norm + 1e-6), max=1.0))
        self._optimizer.step(self._sum)
        if self._sum is not self._grad:
            self._sum.zero_()
        self._num_summed = 0

    def _held(self) -> Mapping[str, Tensor]:
        """Weights and buffers. They are read anew each time: a model may replace the tensor of a buffer."""
        held: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
        return {**held, **self._more}

    def tensors(self) -> dict[str, Tensor]:
        """See DenseStrategy: weights, buffers and optimizer state."""
        found = {f"model.{name}": value.detach() for name, value in self._held().items()}
        if self._optimizer is not None:
            for name, value in sorted(self._optimizer.state.items()):
                found[f"optimizer.{name}"] = torch.as_tensor(value)
        return found

    def consolidate(self) -> dict[str, Tensor]:
        """See DenseStrategy: every rank holds everything, so no collective is needed."""
        return self.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See DenseStrategy."""
        own = {f"model.{name}": value for name, value in self._held().items()}
        saved = {name: value for name, value in tensors.items() if name.startswith("model.")}
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in saved.items()}:
            differ = sorted(
                n for n in {*own, *saved} if n not in own or n not in saved or own[n].shape != saved[n].shape
            )
            raise BadInput(
                f"the commit's dense part is of another model than the spec's: {', '.join(differ[:5])}; "
                f"go back to the model it was trained with, or start over with --fresh"
            )
        for name, value in own.items():
            value.detach().copy_(saved[name])
        prefix, device = "optimizer.", self._flat.device
        state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if self._optimizer is not None and state.keys() == STATE[type(self._config.dense_optimizer)]:
            self._optimizer.state = {name: value.to(device).clone() for name, value in state.items()}

    def digest(self) -> str:
        """See DenseStrategy: SHA-256 over names and bytes of all tensors."""
        total = hashlib.sha256()
        for name, value in self.tensors().items():
            total.update(name.encode())
            total.update(value.contiguous().cpu().view(-1).numpy().tobytes())
        return total.hexdigest()
