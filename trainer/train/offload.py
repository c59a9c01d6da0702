"""Offload: what a block of the model saves for the backward pass waits in the memory of the CPU.

Parameters stay, since they are on the device anyway. Layouts are kept, as sums of other layouts are rounded otherwise.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

CPU = torch.device("cpu")


class Offloaded:
    """Blocks whose activations are offloaded."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """`parameters`: of the model."""
        self._parameters = list(parameters)
        self.num_bytes = 0
        """Copied to the CPU so far."""

    def call(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `compute`, which runs a block."""
        stays = {each.untyped_storage().data_ptr() for each in self._parameters}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            if tensor.untyped_storage().data_ptr() in stays:
                return tensor.device, tensor
            pinned = tensor.device.type == "cuda"
            copy = torch.empty_like(tensor, device=CPU, pin_memory=pinned)
            self.num_bytes += copy.nbytes
            return tensor.device, copy.copy_(tensor)

        with saved_tensors_hooks(pack, _back):
            return compute(*args, **kwargs)


def _back(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device)
