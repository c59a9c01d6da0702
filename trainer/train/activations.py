"""The activations that a forward pass saves for the backward pass: by block, kept, recomputed or offloaded.

Blocks are treated so within `SavedActivations.forward` alone, and only where gradients are computed: predictions,
exports and commits see the model as it is.

- Blocks are the modules that `dense.recompute` and `dense.offload` name, and parts of a sequence of layers. A list of
  modules stands for each of them, since it is never called itself.
- Recomputation: a block keeps its inputs alone, and is computed once more in the backward pass. The second time it has
  what it had the first time: random numbers, buffers (as copies, so that running statistics count each batch once),
  modes of its modules, types of operations. So gradients have the same bits.
- Offload: what a block saves waits in the memory of the CPU. Parameters stay, since they are on the device anyway.
  Layouts are kept, as sums of other layouts are rounded otherwise.

Source: Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016. torch.utils.checkpoint is not
used: it loads torch's compiler, which takes 160 MB and seconds of each trainer, and updates running statistics twice.
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.errors import HeadraceError, SpecError
from headrace.trainer.dense_config import DenseSection, RecomputeSection
from headrace.trainer.models.layers import Mlp

MAX_NAMED = 40
"""Most names in a message."""


def blocks_of(model: nn.Module, names: Literal["all"] | Sequence[str], key: str) -> dict[str, nn.Module]:
    """The blocks by name, in the order of `names`; "all": every part of the model that has parameters.

    Raises SpecError, for this key of the spec, for a name that the model does not have, and for a block in another.
    """
    parts = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    if names == "all":
        names = [name for name, each in model.named_children() if any(True for _ in each.parameters())]
    for name in names:
        if not name or name not in parts:
            known = [each for each in parts if each]
            more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
            raise SpecError(f'the model has no block "{name}"; known: {", ".join(known[:MAX_NAMED])}{more}', key)
        found |= _called(name, parts[name])
    owners: dict[nn.Module, str] = {}
    for name, block in found.items():
        for each in block.modules():
            if each in owners:
                raise SpecError(f'"{name}" and "{owners[each]}" have modules in common: remove one', key)
            owners[each] = name
    return found


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The module, or those that a list of modules holds."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for number, each in module.named_children():
        found |= _called(f"{name}.{number}", each)
    return found


def layers_of(block: nn.Module) -> list[nn.Module] | None:
    """The layers that a block runs one after another, also those of sequences in it; None for any other block."""
    if not isinstance(block, nn.Sequential) or type(block).forward not in (nn.Sequential.forward, Mlp.forward):
        return None
    return [layer for each in block for layer in layers_of(each) or [each]]


def parts_of(layers: Sequence[nn.Module], num_parts: int | None) -> list[Sequence[nn.Module]]:
    """Neighbouring layers in so many parts, or in fewer; a part begins with a layer that has parameters.

    None: as many as the root of the number of such layers, which keeps least (Chen et al. 2016).
    """
    begins = [at for at, each in enumerate(layers) if any(True for _ in each.parameters())]
    wanted = min(len(begins), num_parts or math.ceil(math.sqrt(len(begins)))) if begins else 1
    edges = [0, *(begins[len(begins) * number // wanted] for number in range(1, wanted)), len(layers)]
    return [layers[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


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


def recomputed_parts(
    name: str, layers: Sequence[nn.Module], config: RecomputeSection, device: torch.device, surroundings: Surroundings
) -> list[Callable[[Tensor], Tensor]]:
    """Layers of the block `name` that run one after another, in parts, each of which is recomputed for itself."""
    return [
        partial(Recomputed(name, part, device, surroundings).call, partial(_through, part))
        for part in parts_of(layers, config.segments)
    ]


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
    for part in recomputed_parts(name, (layers_of(block) or [])[begin:], config, device, surroundings):
        x = part(x)
    return x


def _through(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x
