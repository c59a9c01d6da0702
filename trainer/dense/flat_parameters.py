"""The dense parameters of a rank in one flat buffer, and their gradients in another: what strategies compute on;
and their optimizer.

Every parameter begins at a multiple of 64 bytes: kernels of matrix libraries may round differently if not.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.config import MAX_FLOAT32
from headrace.errors import BadInput, SpecError
from headrace.trainer.dense_optimizers import DenseOptimizer, Place, Segments
from headrace.trainer.device_copies import DeviceCopies, Later
from headrace.trainer.models.calibration import NAME as CALIBRATION

ALIGN_FLOATS = 16


class NamedTensors:
    """The parameters of a rank that learn, in the order of the module, and all tensors that commits name."""

    gradient: Tensor
    """Of what this rank learns."""
    segments: Segments
    """Begin and end of each parameter in the flat buffer that commits have."""

    def __init__(
        self,
        model: nn.Module,
        more: Mapping[str, nn.Parameter] | None = None,
        *,
        foreign: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """`more`: parameters by name that learn with the model's and are not part of its module. `foreign`: names of
        parameters that other ranks learn; `absent`: those of them that have no values on this rank.

        Raises SpecError for a name that the module also has.
        """
        self._model, self._more, self._absent = model, dict(more or {}), absent
        self._looked: Later | None = None
        if twice := sorted(self._more.keys() & model.state_dict().keys()):
            raise SpecError(f"the model has a tensor named {twice[0]!r}, as the trainer has; rename it", "model")
        named = (*model.named_parameters(), *self._more.items())
        self.more = self._more.keys()
        """The names in `more`."""
        self.parameters = {name: each for name, each in named if each.requires_grad and name not in foreign}
        """By name."""

    def _held(self) -> Mapping[str, Tensor]:
        """Weights and buffers. They are read anew each time: a model may replace the tensor of a buffer."""
        held: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
        return {**held, **self._more}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and buffers by name ("model.<name>"): views."""
        return {f"model.{name}": value.detach() for name, value in self._held().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights and buffers from `tensors`, which may hold others, too. Raises BadInput for another model.

        A calibration that the other model lacks begins anew; one that this model lacks is dropped (`train.calibrate`).
        """
        own = {f"model.{name}": value for name, value in self._held().items()}
        saved = {name: value for name, value in tensors.items() if name.startswith("model.")}
        begins = f"model.{CALIBRATION}."
        own, saved = (
            {name: value for name, value in each.items() if name in other or not name.startswith(begins)}
            for each, other in ((own, saved), (saved, own))
        )
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in saved.items()}:
            differ = sorted(
                n for n in {*own, *saved} if n not in own or n not in saved or own[n].shape != saved[n].shape
            )
            raise BadInput(
                f"the commit's dense part is of another model than the spec's: {', '.join(differ[:5])}; "
                f"go back to the model it was trained with, or start over with --fresh"
            )
        for name, value in own.items():
            if name.removeprefix("model.") not in self._absent:
                value.detach().copy_(saved[name])

    def clear(self) -> None:
        """Set the gradient to 0."""
        raise NotImplementedError

    def finite(self, world: float) -> bool:
        """Whether the gradient has finite numbers only, and so small ones that `world` times as much is finite."""
        looked, self._looked = self._looked, None
        if looked is not None:
            return within_most(looked.array.tolist(), MAX_FLOAT32 / world)
        return not self.gradient.numel() or within(self.gradient, MAX_FLOAT32 / world)

    def look(self, copies: DeviceCopies) -> None:
        """The gradient is complete: `finite` reads of it with what else comes to the host."""
        if self.gradient.numel():
            self._looked = copies.later(torch.stack(torch.aminmax(self.gradient)))


class FlatParameters(NamedTensors):
    """All parameters in one buffer, and their gradients in another, to which backward adds."""

    def __init__(
        self,
        model: nn.Module,
        more: Mapping[str, nn.Parameter] | None = None,
        multiple: int = 1,
        *,
        foreign: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """As NamedTensors; `foreign` ones are not in the buffers, whose length is a multiple of `multiple`."""
        super().__init__(model, more, foreign=foreign, absent=absent)
        parameters = list(self.parameters.values())
        device = parameters[0].device if parameters else torch.device("cpu")
        begins, total = begins_of([parameter.numel() for parameter in parameters])
        self.length = total
        """Floats that parameters use; the rest of the buffers is 0."""
        total = -(-total // multiple) * multiple
        self.weights = torch.zeros(total, device=device)
        self.gradient = torch.zeros(total, device=device)
        places = [(begin, begin + each.numel()) for begin, each in zip(begins, parameters, strict=True)]
        self.segments = Segments(places, list(self.parameters))
        self._ends = {id(each): begin + each.numel() for each, begin in zip(parameters, begins, strict=True)}
        for parameter, begin in zip(parameters, begins, strict=True):
            view = self.weights[begin : begin + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradient[begin : begin + parameter.numel()].view_as(parameter)

    def end_of(self, parameter: nn.Parameter) -> int:
        """One past the last float of a parameter in the buffers."""
        return self._ends[id(parameter)]

    def clear(self) -> None:
        if self.gradient.device.type == "cpu":  # torch would wake a second thread for this, and wait
            self.gradient.numpy().fill(0)
        else:
            self.gradient.zero_()


class FlatOptimizer:
    """The optimizer of one flat buffer of weights."""

    def __init__(self, weights: Tensor, config: DenseOptimizer, segments: Sequence[Place] = ()) -> None:
        """`segments` are needed where `config` needs whole parameters."""
        assert segments or not (config.whole and len(weights)), "it needs whole parameters, not slices"
        self._weights, self._config, self.lr = weights.detach(), config, config.lr
        self._segments = segments if isinstance(segments, Segments) else Segments(segments)
        self.state = config.first_state(self._weights)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Update the weights by a gradient of the buffer's shape."""
        self._config.learn(self._weights, gradient, self.state, self.lr, self._segments)


def begins_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parameters of so many floats begin in the buffers, and the floats that they use."""
    begins, total = [], 0
    for size in sizes:
        begins.append(total)
        total += -(-size // ALIGN_FLOATS) * ALIGN_FLOATS
    return begins, total


def clip(gradient: Tensor, norm: Tensor, most: float) -> None:
    """Scale a gradient of the norm `norm` to `most` if it is longer."""
    gradient.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))


def within(values: Tensor, most: float) -> bool:
    """Whether all values, at least one, are finite numbers and at most `most` in size."""
    low, high = torch.aminmax(values)  # NaN if there is one
    return within_most((float(low), float(high)), most)


def within_most(extremes: Sequence[float], most: float) -> bool:
    """Whether the lowest and highest value are; NaN is not."""
    low, high = extremes
    return -most <= low and high <= most


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, over names and bytes of tensors."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(name.encode())
        total.update(value.contiguous().cpu().view(-1).numpy().tobytes())
    return total.hexdigest()
