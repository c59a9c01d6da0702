"""The activations that a forward pass saves for the backward pass: by block, kept, recomputed or offloaded.

Blocks are treated so within `SavedActivations.forward` alone, and only where gradients are computed: predictions,
exports and commits see the model as it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.errors import SpecError
from headrace.trainer.dense_config import DenseSection, RecomputeSection
from headrace.trainer.train.model_blocks import blocks_of, layers_of, parts_of
from headrace.trainer.train.offload import Offloaded
from headrace.trainer.train.recompute import Recomputed, Surroundings

RECOMPUTE, OFFLOAD = "dense.recompute.blocks", "dense.offload"

log = logging.getLogger(__name__)

Forward = Callable[..., Any]


class SavedActivations:
    """The activations of the blocks of a model, and how they are kept."""

    def __init__(self, treated: Mapping[str, tuple[nn.Module, Callable[[Forward], Forward]]]) -> None:
        """`treated`: by name a block, and its forward pass made of the one that it has."""
        self._treated = treated
        self._not_called: set[str] | None = set(treated)
        """Before the end of the first forward pass: the blocks that were not called."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context for a forward pass."""
        if not self._treated or not torch.is_grad_enabled():
            yield
            return
        before = {name: vars(block).get("forward") for name, (block, _) in self._treated.items()}
        for name, (block, made) in self._treated.items():
            block.forward = partial(self._called, name, made(block.forward))
        try:
            yield
        finally:
            for name, (block, _) in self._treated.items():
                if (own := before[name]) is None:
                    del block.forward
                else:
                    block.forward = own
        if self._not_called:
            names = ", ".join(sorted(self._not_called))
            log.warning("the model does not call these blocks, so all their activations are kept: %s", names)
        self._not_called = None

    def _called(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if self._not_called is not None:
            self._not_called.discard(name)
        return forward(*args, **kwargs)


def saved_activations(
    model: nn.Module, config: DenseSection, device: torch.device, surroundings: Surroundings
) -> SavedActivations:
    """As `dense.recompute` and `dense.offload` say. `surroundings`: of a forward pass. Raises SpecError."""
    treated: dict[str, tuple[nn.Module, Callable[[Forward], Forward]]] = {}
    if (recompute := config.recompute) is not None:
        for name, block in blocks_of(model, recompute.blocks, RECOMPUTE).items():
            _check_norms(name, block, config)
            treated[name] = block, _recomputing(name, block, recompute, device, surroundings)
    offloaded = blocks_of(model, config.offload, OFFLOAD)
    if offloaded and device.type == "cpu":
        log.warning("dense.offload has no effect: this trainer computes on the CPU, where its activations are already")
    elif offloaded:
        recomputed = {each for block, _ in treated.values() for each in block.modules()}
        offload = Offloaded(model.parameters())
        for name, block in offloaded.items():
            if not recomputed.isdisjoint(block.modules()):
                raise SpecError(f'"{name}" is recomputed (dense.recompute), in whole or in part: remove one', OFFLOAD)
            treated[name] = block, lambda forward: partial(offload.call, forward)
    return SavedActivations(treated)


def _check_norms(name: str, block: nn.Module, config: DenseSection) -> None:
    """Raise SpecError for BatchNorm whose trainers would meet once more when it is recomputed."""
    if config.buffers == "sync_bn" and any(isinstance(each, _BatchNorm) for each in block.modules()):
        raise SpecError(
            f'"{name}" has BatchNorm, and with dense.buffers = "sync_bn" trainers meet in each such layer: remove it '
            'from the list, or set buffers = "rank0"',
            RECOMPUTE,
        )


def _recomputing(
    name: str, block: nn.Module, config: RecomputeSection, device: torch.device, surroundings: Surroundings
) -> Callable[[Forward], Forward]:
    """The forward pass of a block that is recomputed: as a whole, or each part of a sequence of layers for itself."""
    if layers_of(block) is not None:
        return lambda _: partial(_in_parts, name, block, config, device, surroundings)
    whole = Recomputed(name, [block], device, surroundings)
    return lambda forward: partial(whole.call, forward)


def _in_parts(
    name: str,
    block: nn.Module,
    config: RecomputeSection,
    device: torch.device,
    surroundings: Surroundings,
    x: Any,
    begin: int = 0,
) -> Any:
    """`block` on x, from its layer number `begin` on."""
    layers = layers_of(block) or []
    for part in parts_of(layers[begin:], config.segments):
        x = Recomputed(name, part, device, surroundings).call(partial(_through, part), x)
    return x


def _through(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x
