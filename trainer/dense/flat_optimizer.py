"""Optimizers of the dense parameters: torch's functions and state, without torch's classes; LARS and LAMB are ours.

Torch's classes load torch's compiler, which takes about as long as loading torch itself, at each start of a trainer.
The same functions with the same arguments give the same bits; tests check this.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from headrace.trainer.dense.layerwise import lamb, lars
from headrace.trainer.dense_config import (
    DenseAdagrad,
    DenseAdam,
    DenseAdamW,
    DenseLamb,
    DenseLars,
    DenseOptimizer,
    DenseSgd,
)

STEP = "step"
"""The optimizer's count of steps: no tensor of the buffer's shape."""
MOMENTS = {STEP, "exp_avg", "exp_avg_sq"}
STATE = {
    DenseSgd: {"momentum_buffer"},
    DenseAdam: MOMENTS,
    DenseAdamW: MOMENTS,
    DenseLamb: MOMENTS,
    DenseLars: {"velocity"},
    DenseAdagrad: {STEP, "sum"},
}
"""Names of the state after the first step, as in torch's classes. SGD without momentum has no state. Optimizers with
the same names continue each other's state."""

Step = Callable[[Tensor, Tensor, dict[str, Tensor], float], None]
"""(weights, gradient, state, learning rate): changes weights and state in place; creates the state if it is empty."""


def state_names(config: DenseOptimizer) -> set[str]:
    """Names of the state after the first step."""
    return set() if isinstance(config, DenseSgd) and not config.momentum else STATE[type(config)]


def vector_names(config: DenseOptimizer) -> list[str]:
    """Names of the state that has the buffer's shape, in order."""
    return sorted(state_names(config) - {STEP})


def initial_state(config: DenseOptimizer, name: str) -> float:
    """The value of the state `name`, of the buffer's shape, before the first step."""
    return config.initial if isinstance(config, DenseAdagrad) and name == "sum" else 0.0


class FlatOptimizer:
    """The optimizer of one flat buffer of weights."""

    def __init__(self, flat: Tensor, config: DenseOptimizer, segments: Sequence[tuple[int, int]] = ()) -> None:
        """`segments`: begin and end of each parameter, for LARS and LAMB."""
        whole = bool(segments) or not isinstance(config, DenseLamb | DenseLars)
        assert whole, "LARS and LAMB need whole parameters, not slices of the buffer"
        self._flat, self.lr, self._learn = flat.detach(), config.lr, _learning(config, segments)
        self.state: dict[str, Tensor] = {}
        """By the names in STATE."""
        if isinstance(config, DenseAdagrad):
            self.state = {"step": torch.tensor(0.0), "sum": torch.full_like(self._flat, initial_state(config, "sum"))}

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Update the weights by a gradient of the buffer's shape."""
        self._learn(self._flat, gradient, self.state, self.lr)


def _learning(config: DenseOptimizer, segments: Sequence[tuple[int, int]]) -> Step:
    match config:
        case DenseSgd():
            return partial(_sgd, config)
        case DenseAdam() | DenseAdamW():
            coupled = isinstance(config, DenseAdam) and config.weight_decay > 0 and not config.decoupled
            learn: Callable[..., None] = adam if coupled else adamw
            return partial(_adam, learn, config)
        case DenseLamb():
            return partial(lamb, config, segments)
        case DenseLars():
            return partial(lars, config, segments)
        case DenseAdagrad():
            return partial(_adagrad, config)
        case _:
            assert_never(config)


def _sgd(config: DenseSgd, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
    """As torch.optim.SGD."""
    buffers: list[Tensor | None] = [state.get("momentum_buffer")]
    sgd(
        [flat],
        [gradient],
        buffers if config.momentum else [],
        lr=lr,
        momentum=config.momentum,
        weight_decay=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if config.momentum and buffers[0] is not None:
        state["momentum_buffer"] = buffers[0]


def _adam(
    learn: Callable[..., None],
    config: DenseAdam | DenseAdamW,
    flat: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    lr: float,
) -> None:
    """As torch.optim.Adam or AdamW, fused. `learn`: torch's function."""
    if not state:
        state["step"] = torch.zeros((), device=flat.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
    learn(
        [flat],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=lr,
        weight_decay=config.weight_decay,
        eps=config.epsilon,
        maximize=False,
    )


def _adagrad(config: DenseAdagrad, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
    """As torch.optim.Adagrad."""
    adagrad(
        [flat],
        [gradient],
        [state["sum"]],
        [state["step"]],
        foreach=False,
        lr=lr,
        weight_decay=0.0,
        lr_decay=0.0,
        eps=config.epsilon,
        maximize=False,
    )
