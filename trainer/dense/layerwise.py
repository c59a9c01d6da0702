"""LARS and LAMB: optimizers that scale the step of each parameter by its own norms, on the flat buffer.

Norms are over the parameter's floats, in the order of the module. torch has neither.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.trainer.dense_config import DenseLamb, DenseLars

Segments = Sequence[tuple[int, int]]
"""Begin and end of each parameter in the flat buffer."""


def lars(
    config: DenseLars, segments: Segments, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float
) -> None:
    """LARS (You, Gitman, Ginsburg 2017, algorithm 1), with the momentum of the scaled steps.

    The local rate of a parameter is trust * |w| / (|g| + weight_decay * |w|), and 1 where that has no meaning.
    """
    if not state:
        state["velocity"] = torch.zeros_like(flat)
    velocity = state["velocity"].mul_(config.momentum)
    for begin, end in segments:
        weights, grad = flat[begin:end], gradient[begin:end]
        length, slope = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(grad)
        local = config.trust * length / (slope + config.weight_decay * length)
        local = torch.where((length > 0) & (slope > 0), local, torch.ones_like(local))
        velocity[begin:end].add_((grad + config.weight_decay * weights) * (lr * local))
    flat.sub_(velocity)


def lamb(
    config: DenseLamb, segments: Segments, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float
) -> None:
    """LAMB (You et al. 2020, algorithm 2), with corrected moments and without a bound of the ratio of norms."""
    if not state:
        state["step"] = torch.zeros((), device=flat.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
    state["step"] += 1
    step = int(state["step"])
    first = state["exp_avg"].lerp_(gradient, 1 - config.beta1)
    second = state["exp_avg_sq"].mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (second / (1 - config.beta2**step)).sqrt_().add_(config.epsilon)
    move = (first / (1 - config.beta1**step)).div_(root).add_(flat, alpha=config.weight_decay)
    for begin, end in segments:
        length, far = torch.linalg.vector_norm(flat[begin:end]), torch.linalg.vector_norm(move[begin:end])
        ratio = torch.where((length > 0) & (far > 0), length / far, torch.ones_like(length))
        move[begin:end].mul_(ratio)
    flat.add_(move, alpha=-lr)
