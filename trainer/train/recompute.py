"""Recomputation: a block of the model keeps its inputs alone, and is computed once more in the backward pass.

The second time it has what it had the first time: random numbers, buffers (as copies, so that running statistics count
each batch once), modes of its modules, types of operations. So gradients have the same bits.

Source: Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016. torch.utils.checkpoint is not
used: it loads torch's compiler, which takes 160 MB and seconds of each trainer, and updates running statistics twice.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headrace.errors import HeadraceError

Surroundings = Callable[[], AbstractContextManager[None]]
"""Makes the context of a forward pass."""


class RecomputeDiffers(HeadraceError):
    """A block is not computed the same way twice."""

    def __init__(self, block: str, trouble: str) -> None:
        super().__init__(
            f'the block "{block}" of the model cannot be recomputed: {trouble}. Remove it from dense.recompute.blocks'
        )


class Recomputed:
    """Modules that are computed one after another, or one module, as a block that is recomputed."""

    def __init__(
        self, name: str, modules: Sequence[nn.Module], device: torch.device, surroundings: Surroundings
    ) -> None:
        """`surroundings`: of the forward pass, for the second time."""
        self.name, self.device, self.surroundings = name, device, surroundings
        self.modules = [each for module in modules for each in module.modules()]

    def call(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `compute`, which runs the block."""
        once = _Call(self, compute, args, kwargs)
        with saved_tensors_hooks(once.pack, _Kept.get):
            result = compute(*args, **kwargs)
        once.check_inputs()
        return result


class _Kept:
    """The place of a tensor that the backward pass needs. Autograd holds it for as long as it needs the tensor."""

    __slots__ = ("__weakref__", "_call", "_tensor", "_version")

    def __init__(self, call: "_Call") -> None:
        self._call = call
        self._tensor: Tensor | None = None
        self._version = 0

    def fill(self, tensor: Tensor) -> None:
        """Put the tensor there."""
        self._tensor, self._version = tensor.detach(), _version(tensor)

    def get(self) -> Tensor:
        """The tensor, computed if it is not there."""
        if self._tensor is None:
            self._call.again()
        assert self._tensor is not None, "all places are filled"
        if _version(self._tensor) != self._version:
            raise self._call.changed("a tensor that its gradient needs")
        return self._tensor


class _Call:
    """One call of a block."""

    def __init__(
        self, block: Recomputed, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._block, self._compute, self._args, self._kwargs = block, compute, args, kwargs
        self._versions = self._inputs()
        self._state = _ModuleState(block.modules)
        self._random, self._autocast = _random_state(block.device), _autocast(block.device)
        self._places: list[weakref.ref[_Kept]] = []
        self._layouts: list[tuple[torch.Size, torch.dtype]] = []

    def _inputs(self) -> list[int]:
        """The versions of the tensors among the arguments."""
        given = (*self._args, *self._kwargs.values())
        return [_version(each) for each in given if isinstance(each, Tensor)]

    def check_inputs(self) -> None:
        """Raise RecomputeDiffers if an argument has changed since the call."""
        if self._inputs() != self._versions:
            raise self.changed("one of its inputs")

    def changed(self, what: str) -> RecomputeDiffers:
        """The error where a tensor is changed in place."""
        return RecomputeDiffers(self._block.name, f"{what} is changed in place")

    def pack(self, tensor: Tensor) -> _Kept:
        """Autograd saves a tensor in the forward pass."""
        kept = _Kept(self)
        self._places.append(weakref.ref(kept))
        self._layouts.append((tensor.shape, tensor.dtype))
        return kept

    def again(self) -> None:
        """Compute the block, and fill the places that are still needed."""
        self.check_inputs()
        count = 0

        def fill(tensor: Tensor) -> None:
            nonlocal count
            if count == len(self._places) or self._layouts[count] != (tensor.shape, tensor.dtype):
                raise self._differs()
            if (kept := self._places[count]()) is not None:
                kept.fill(tensor)
            count += 1

        with ExitStack() as held:
            held.enter_context(torch.enable_grad())
            held.enter_context(self._block.surroundings())
            held.enter_context(self._autocast)
            held.enter_context(self._state.in_force())
            held.enter_context(_random_numbers(self._block.device, self._random))
            held.enter_context(saved_tensors_hooks(fill, _not_needed))
            self._compute(*self._args, **self._kwargs)
        if count != len(self._places):
            raise self._differs()
        self._args, self._kwargs, self._versions = (), {}, []

    def _differs(self) -> RecomputeDiffers:
        return RecomputeDiffers(
            self._block.name,
            "it saves other tensors the second time, so it depends on more than its inputs, parameters, buffers and "
            "the random numbers of torch",
        )


def _version(tensor: Tensor) -> int:
    """It rises with each change in place."""
    found: int = tensor._version  # noqa: SLF001  # torch has no other way
    return found


def _not_needed(_: object) -> Tensor:
    raise AssertionError("nothing is differentiated while a block is recomputed")


class _ModuleState:
    """Buffers and modes of modules at a moment."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._modes = [each.training for each in modules]
        copies: dict[Tensor, Tensor] = {}  # modules may share a buffer
        self._buffers = [
            (module, name, copies.setdefault(value, value.detach().clone())) for module, name, value in self._now()
        ]

    def _now(self) -> list[tuple[nn.Module, str, Tensor]]:
        return [
            (module, name, value)
            for module in self._modules
            for name, value in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with these buffers and modes; changes of buffers in it are lost."""
        buffers, modes = self._now(), [each.training for each in self._modules]
        try:
            self._set(self._buffers, self._modes)
            yield
        finally:
            self._set(buffers, modes)

    def _set(self, buffers: Sequence[tuple[nn.Module, str, Tensor]], modes: Sequence[bool]) -> None:
        for module, name, value in buffers:
            setattr(module, name, value)
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode


def _random_state(device: torch.device) -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def _set_random(device: torch.device, state: Sequence[Tensor]) -> None:
    torch.set_rng_state(state[0])
    for each in state[1:]:
        torch.cuda.set_rng_state(each, device)


@contextmanager
def _random_numbers(device: torch.device, state: Sequence[Tensor]) -> Iterator[None]:
    """A context in which torch draws from this state; the numbers drawn after it do not depend on it."""
    now = _random_state(device)
    _set_random(device, state)
    try:
        yield
    finally:
        _set_random(device, now)


def _autocast(device: torch.device) -> torch.autocast:
    """The present types of operations, as a context."""
    kind = device.type
    return torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
