"""Buffers of a model, and its BatchNorm layers in a training step: each trainer's own statistics, or those of all.

Buffers are tensors of a model's state that no optimizer changes, such as the running statistics of BatchNorm. Each
trainer updates its own in its forward passes. At the close of a pass those of rank 0 replace those of all trainers, so
every trainer saves, hashes and predicts with the same ones.

Shapes: C channels, N values of a channel over all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.errors import HeadraceError
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.models.calibration import NAME as CALIBRATION

HEAD = 4
"""Floats of a message before its sums: number of ranks with a batch, layer, its square, number of values."""


class BuffersDiffer(HeadraceError):
    """A buffer has another shape or type on one trainer than on rank 0."""

    def __init__(self, rank: int, names: list[str]) -> None:
        super().__init__(
            f"trainer {rank} and trainer 0 have buffers of different shapes or types: {', '.join(names[:5])}; "
            "give every buffer its shape and type when the model is built"
        )


class Buffers:
    """The buffers in a model's state. They are looked up at each call because a model may replace a buffer's tensor."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        own = self._now()
        self._any, self._in_steps = bool(own), any(not name.startswith(f"{CALIBRATION}.") for name in own)
        self._saved: dict[str, Tensor] = {}

    def _now(self) -> dict[str, Tensor]:
        state: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if not isinstance(value, nn.Parameter)}

    def save(self) -> None:
        """Copy the values before the forward pass of a step."""
        if self._in_steps:
            self._saved = {name: value.detach().clone() for name, value in self._now().items()}

    def restore(self) -> None:
        """Restore the values copied by `save`, for a step that is skipped."""
        for name, value in self._now().items() if self._saved else ():
            value.detach().copy_(self._saved[name])

    def broadcast(self) -> None:
        """Collective: replace the buffers of all trainers by those of rank 0. Raises BuffersDiffer."""
        if not self._any or self._ranks.world == 1:
            return
        own = self._now()
        layout = {name: [str(value.dtype), *value.shape] for name, value in own.items()}
        wanted = self._ranks.broadcast({"buffers": layout} if self._ranks.rank == 0 else None)["buffers"]
        if layout != wanted:
            differ = sorted(name for name in {*layout, *wanted} if layout.get(name) != wanted.get(name))
            raise BuffersDiffer(self._ranks.rank, differ)
        flat = torch.cat([_bytes_of(value) for value in own.values()])
        self._ranks.copy_from_rank_0(flat)
        at = 0
        for value in own.values():
            size = value.numel() * value.element_size()
            value.detach().copy_(flat[at : at + size].clone().view(value.dtype).view(value.shape))
            at += size


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU, as a flat uint8 tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


class BatchNorms(Protocol):
    """The BatchNorm layers of one rank. Every rank calls `open_step` for a step, and the rest of its role in it."""

    def open_step(self, *, all_have: bool) -> None:
        """Begin a step; `all_have`: whether every rank has a batch."""
        ...

    def forward(self, num_samples: int) -> AbstractContextManager[None]:
        """A context for the forward pass over a batch of `num_samples`. In inference mode it is not collective."""
        ...

    def backward(self) -> AbstractContextManager[None]:
        """A context for the backward pass after it."""
        ...

    def follow(self, *, backward: bool) -> None:
        """Take part in a step without a batch; `backward`: whether there is a backward pass."""
        ...


class OwnBatchNorms:
    """Each rank has its own statistics; torch raises for one sample, which has no variance.

    A batch of one sample is normalised by the running statistics, as at inference, and does not change them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def open_step(self, *, all_have: bool) -> None:
        pass

    def forward(self, num_samples: int) -> AbstractContextManager[None]:
        return evaluating(m for m in self._model.modules() if num_samples == 1 and isinstance(m, _BatchNorm))

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self, *, backward: bool) -> None:
        pass


def batch_norms(buffers: Literal["rank0", "sync_bn"], model: nn.Module, ranks: Ranks) -> BatchNorms:
    """The layers by `dense.buffers`. One trainer has all samples, so torch's own layers serve it."""
    together = buffers == "sync_bn" and ranks.world > 1
    return SyncBatchNorms(model, ranks) if together else OwnBatchNorms(model)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context with these modules, but not their children, in evaluation mode."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class LayersDiffer(HeadraceError):
    """Trainers run their BatchNorm layers in different orders."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"trainer {rank} runs the BatchNorm layers of the model in another order than other trainers do; with "
            'dense.buffers = "sync_bn" the order must not depend on the batch'
        )


@dataclass(frozen=True)
class Totals:
    """A message summed over ranks."""

    layer: int | None
    """None: no rank runs a layer any more."""
    count: float
    """N."""
    first_C: Tensor
    second_C: Tensor
    """float64, on the CPU."""


class SyncBatchNorms:
    """Statistics over the batches of all ranks; torch's own such layer needs a GPU.

    Sums are float64, in rank order. In a step every layer makes one collective in the forward pass and one in the
    backward pass. A rank without a batch takes part with zeros: each message tells its layer, and where some rank has
    no batch, one more message ends the pass. Layers normalise in this way only within `forward`; at inference, in
    exports and in commits they are torch's.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers = [each for each in model.modules() if isinstance(each, _BatchNorm)]
        self._width = max((each.num_features for each in self._layers), default=0)
        self._all_have = True

    def open_step(self, *, all_have: bool) -> None:
        """Begin a step; `all_have`: whether every rank has a batch."""
        self._all_have = all_have

    @contextmanager
    def forward(self, _num_samples: int) -> Iterator[None]:
        """A context for the forward pass of a rank with a batch. Collective, unless the model is in inference mode."""
        layers = [(number, each) for number, each in enumerate(self._layers) if each.training]
        for number, layer in layers:
            layer.forward = partial(self._normalised, number, layer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for _, layer in layers:
                del layer.forward
        if layers:
            self._end()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context for the backward pass of a rank with a batch. Collective."""
        yield
        if self._layers:
            self._end()

    def follow(self, *, backward: bool) -> None:
        """Take part in a step without a batch; `backward`: whether there is a backward pass."""
        if not self._layers:
            return
        while (totals := self._sum(None)).layer is not None:
            layer = self._layers[totals.layer]
            if totals.count > 1:
                _track(layer, *_moments(totals, layer), totals.count)
        while backward and self._sum(None).layer is not None:
            pass

    def _end(self) -> None:
        if not self._all_have:
            self._sum(None)

    def _sum(self, layer: int | None, count: int = 0, *sums_C: Tensor) -> Totals:
        """Collective: the sums of a layer over ranks; without a layer this rank adds zeros."""
        message: NDArray[np.float64] = np.zeros(HEAD + 2 * self._width)
        if layer is not None:
            sums = torch.cat(sums_C).cpu().numpy()
            message[:HEAD] = 1, layer, layer * layer, count
            message[HEAD : HEAD + len(sums)] = sums
        summed = self._ranks.sum_floats(message)
        num_ranks, layers, squares, total = summed[:HEAD].tolist()
        if not num_ranks:
            return Totals(None, 0, torch.zeros(0), torch.zeros(0))
        found = int(layers / num_ranks)
        if layers != found * num_ranks or squares != found * found * num_ranks:
            raise LayersDiffer(self._ranks.rank)
        num_channels = self._layers[found].num_features
        sums_C2 = torch.from_numpy(summed[HEAD : HEAD + 2 * num_channels])
        return Totals(found, total, sums_C2[:num_channels], sums_C2[num_channels:])

    def _normalised(self, number: int, layer: _BatchNorm, x: Tensor) -> Tensor:
        """The forward pass of a layer."""
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]  # noqa: SLF001
        wide, dims = x.detach().double(), _dims(x)
        count = x.numel() // x.shape[1]
        totals = self._sum(number, count, wide.sum(dims), (wide * wide).sum(dims))
        if totals.count <= 1:
            return _as_at_inference(layer, x)  # one value has no variance
        mean_C, var_C = _moments(totals, layer)
        _track(layer, mean_C, var_C, totals.count)
        sums = partial(self._sum, number, count)
        normalised: Tensor = _Normalise.apply(x, layer.weight, layer.bias, mean_C, var_C, layer.eps, totals.count, sums)
        return normalised


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias; the gradient flows through mean and variance on all ranks.

    Source: Ioffe, Szegedy 2015, with sums over ranks as in torch.nn.SyncBatchNorm.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        mean_C: Tensor,
        var_C: Tensor,
        eps: float,
        count: float,
        sums: Callable[..., Totals],
    ) -> Tensor:
        """`sums`: the collective sums of this layer."""
        held_C = mean_C.float().isfinite() & var_C.float().isfinite()  # or else the step is not finite
        scale_C = torch.where(held_C, (var_C + eps).rsqrt(), torch.nan).float()
        hat = (x.float() - _wide(mean_C.float(), x)) * _wide(scale_C, x)
        ctx.save_for_backward(hat, scale_C, weight_C)
        ctx.count, ctx.sums, ctx.dtype, ctx.has_bias = count, sums, x.dtype, bias_C is not None
        if weight_C is not None and bias_C is not None:
            hat = hat * _wide(weight_C.float(), x) + _wide(bias_C.float(), x)
        return hat.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias; weight and bias are summed over ranks with all others."""
        hat, scale_C, weight_C = ctx.saved_tensors
        grad, dims = grad.float(), _dims(hat)
        own_C, own_hat_C = grad.double().sum(dims), (grad.double() * hat).sum(dims)
        totals = ctx.sums(own_C, own_hat_C)
        mean_C, mean_hat_C = ((each / ctx.count).float().to(grad.device) for each in (totals.first_C, totals.second_C))
        factor_C = scale_C if weight_C is None else scale_C * weight_C.float()
        grad_x = (grad - _wide(mean_C, grad) - hat * _wide(mean_hat_C, grad)) * _wide(factor_C, grad)
        of_weight = None if weight_C is None else own_hat_C.to(weight_C.dtype)
        of_bias = own_C.float() if ctx.has_bias else None
        return grad_x.to(ctx.dtype), of_weight, of_bias, None, None, None, None, None


def _dims(x: Tensor) -> list[int]:
    """All dimensions but that of the channels, the second."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values_C: Tensor, like: Tensor) -> Tensor:
    """A number for each channel in the shape of a batch."""
    return values_C.view(1, -1, *[1] * (like.dim() - 2))


def _moments(totals: Totals, layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    """(C,) mean and variance over all ranks, float64, on the device of the layer."""
    mean_C = totals.first_C / totals.count
    var_C = (totals.second_C / totals.count - mean_C * mean_C).clamp_(min=0)
    device = next((each.device for each in (layer.running_mean, layer.weight) if each is not None), mean_C.device)
    return mean_C.to(device), var_C.to(device)


@torch.no_grad()
def _track(layer: _BatchNorm, mean_C: Tensor, var_C: Tensor, count: float) -> None:
    """Update the running statistics, with the variance of a sample as torch does."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean_C), (layer.running_var, var_C * (count / (count - 1)))):
        running.lerp_(new.to(running.dtype), share)


def _as_at_inference(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Normalise by the running statistics; torch raises an error where there are none."""
    mean_C, var_C = layer.running_mean, layer.running_var
    return functional.batch_norm(x, mean_C, var_C, layer.weight, layer.bias, mean_C is None, 0.0, layer.eps)
