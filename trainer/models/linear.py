"""The linear layer of all models: each of its three matrix products is computed by the kernel that a table names.

torch computes products of float32 with MKL. Its oneDNN kernels are quicker on some processors, and slower on others.
The table belongs to the job (trainer.train.kernel_choice measures it, the log keeps it); without one, and wherever the
choice does not apply, a layer is exactly `torch.nn.functional.linear`: on a GPU, under autocast, in a traced model.

Shapes: B samples, I inputs, O outputs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

log = logging.getLogger(__name__)

Size = tuple[int, int]
"""Numbers of inputs and outputs."""


class Kernel(StrEnum):
    """A library for matrix products."""

    MKL = "mkl"
    ONEDNN = "onednn"


@dataclass(frozen=True, slots=True)
class ProductKernels:
    """The kernels of one size of layer."""

    forward: Kernel = Kernel.MKL
    input_gradient: Kernel = Kernel.MKL
    weight_gradient: Kernel = Kernel.MKL

    def message(self) -> dict[str, str]:
        """As JSON."""
        return {name: str(kernel) for name, kernel in asdict(self).items()}


KernelTable = Mapping[Size, ProductKernels]
"""The kernels by size. A size that is not in the table has MKL for all products."""
NO_TABLE: KernelTable = {}


def table_message(table: KernelTable) -> dict[str, dict[str, str]]:
    """The table as JSON, by "inputs x outputs"."""
    return {f"{inputs}x{outputs}": kernels.message() for (inputs, outputs), kernels in sorted(table.items())}


def table_of(message: Mapping[str, Mapping[str, str]]) -> KernelTable:
    """The inverse of `table_message`."""
    found = {}
    for size, kernels in message.items():
        inputs, _, outputs = size.partition("x")
        found[int(inputs), int(outputs)] = ProductKernels(**{name: Kernel(each) for name, each in kernels.items()})
    return found


class KernelUser:
    """A module whose products follow the table."""

    kernels: KernelTable = NO_TABLE
    sizes: Sequence[Size] = ()
    """The sizes of its products."""


def sizes_of(model: nn.Module) -> list[Size]:
    """The different sizes of all products in `model` that follow a table, in ascending order."""
    return sorted({size for module in _users(model) for size in module.sizes})


def use_table(model: nn.Module, table: KernelTable) -> None:
    """Have all products in `model` follow `table`; without a working oneDNN operator they have MKL."""
    plain = ProductKernels()
    chosen = {size: kernels for size, kernels in table.items() if kernels != plain}
    if chosen and not onednn_works():
        log.warning("this torch has no working operator for oneDNN, which the job's table names: MKL takes its place")
        chosen = {}
    for module in _users(model):
        module.kernels = chosen


def _users(model: nn.Module) -> Iterator[KernelUser]:
    return (module for module in model.modules() if isinstance(module, KernelUser))


class Linear(nn.Linear, KernelUser):
    """`nn.Linear`, with the same parameters and initial values, whose products follow the job's table."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, parts: Sequence[int] = ()) -> None:
        """`parts`: widths of the parts, if it is called with several."""
        super().__init__(in_features, out_features, bias)
        self.sizes = [(width, out_features) for width in parts or [in_features]]

    def forward(self, x_BI: Tensor, *more: Tensor) -> Tensor:
        """(..., I) -> (..., O). `more`: further parts of the input, (B, I) each, which are so not concatenated."""
        if not more:
            return linear(x_BI, self.weight, self.bias, self.kernels)
        first, *weights = torch.split(self.weight, [part.shape[1] for part in (x_BI, *more)], 1)
        output_BO = linear(x_BI, first, self.bias, self.kernels)
        for part, weight in zip(more, weights, strict=True):
            output_BO = output_BO + linear(part, weight, None, self.kernels)
        return output_BO


def linear(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, table: KernelTable = NO_TABLE) -> Tensor:
    """x W^T + b, as `torch.nn.functional.linear`, by the kernels of the table. It can be differentiated once."""
    if table and _has_choice(x_BI, weight_OI):
        outputs, inputs = weight_OI.shape
        kernels = table.get((inputs, outputs))
        if kernels is not None:
            flat_BO: Tensor = _Products.apply(x_BI.reshape(-1, inputs), weight_OI, bias_O, kernels)
            return flat_BO.view(*x_BI.shape[:-1], outputs)
    return functional.linear(x_BI, weight_OI, bias_O)


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    """Whether these products may be computed by another kernel. A traced model must hold torch's own operators."""
    return (
        not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
    )


class _Products(torch.autograd.Function):
    """The layer with an explicit backward pass: that of torch for its oneDNN operator is slow."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kernels: ProductKernels) -> Tensor:
        """(B, I) -> (B, O)."""
        ctx.save_for_backward(x_BI, weight_OI)
        ctx.kernels = kernels
        return forward_product(kernels.forward, x_BI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Only the gradients that are needed."""
        x_BI, weight_OI = ctx.saved_tensors
        grad_BO = grad_BO.contiguous()  # sums of another layout are rounded differently
        kernels, (input_needed, weight_needed, bias_needed, _) = ctx.kernels, ctx.needs_input_grad
        return (
            input_gradient(kernels.input_gradient, grad_BO, weight_OI) if input_needed else None,
            weight_gradient(kernels.weight_gradient, grad_BO, x_BI) if weight_needed else None,
            grad_BO.sum(0) if bias_needed else None,
            None,
        )


def forward_product(kernel: Kernel, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """(B, O)."""
    if kernel is Kernel.ONEDNN:
        return _onednn(x_BI, weight_OI, bias_O)
    return functional.linear(x_BI, weight_OI, bias_O)


def input_gradient(kernel: Kernel, grad_BO: Tensor, weight_OI: Tensor) -> Tensor:
    """(B, I)."""
    return _onednn(grad_BO, weight_OI.t()) if kernel is Kernel.ONEDNN else grad_BO @ weight_OI


def weight_gradient(kernel: Kernel, grad_BO: Tensor, x_BI: Tensor) -> Tensor:
    """(O, I)."""
    return _onednn(grad_BO.t(), x_BI.t()) if kernel is Kernel.ONEDNN else grad_BO.t() @ x_BI


def _onednn(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b. Its inputs are made contiguous: strided ones run in a slow reference kernel."""
    return _operator()(x_BI.contiguous(), weight_OI.contiguous(), bias_O, "none", [], "")


def _operator() -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.ops.mkldnn._linear_pointwise)  # noqa: SLF001  # checked by onednn_works


@cache
def onednn_works() -> bool:
    """Whether torch has the operator, which is private to it, and it is right and the same at every call."""
    generator = torch.Generator().manual_seed(1)
    try:
        for samples, inputs, outputs in ((1, 3, 5), (67, 33, 17), (256, 64, 48)):
            x_BI = torch.randn(samples, inputs, generator=generator)
            weight_OI, bias_O = (
                torch.randn(outputs, inputs, generator=generator),
                torch.randn(outputs, generator=generator),
            )
            found = _onednn(x_BI, weight_OI, bias_O)
            wanted = functional.linear(x_BI.double(), weight_OI.double(), bias_O.double())
            shifted = torch.cat([torch.zeros(1), x_BI.flatten()])[1:].view(samples, inputs)  # at another alignment
            again = _onednn(shifted, weight_OI, bias_O)
            if not torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4) or not torch.equal(found, again):
                return False
    except (AttributeError, RuntimeError, TypeError):  # absent, or with other arguments
        return False
    return True
