"""Mixed precision: the types in which operations of the model compute, and the scale of the loss for float16.

The scale also says whether a step is applied: it is not where a loss or gradient is not finite.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.codec import plain, typed
from headrace.errors import HeadraceError, SpecError
from headrace.trainer.config import TrainSection
from headrace.trainer.loss_scale import MAX_LOSS_SCALE, LossScaleSection
from headrace.trainer.status.progress import TrainerProgress

log = logging.getLogger(__name__)

LOWER = {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By `train.amp`: the lower type; None: all is float32."""


class NonFinite(HeadraceError):
    """A loss or gradient is not finite, and `on_nonfinite` is "fail"."""


class Precision:
    """The types of operations, by `train.amp`, `amp_white` and `amp_black`; others are torch's choice."""

    def __init__(self, train: TrainSection, device: torch.device) -> None:
        """Raises SpecError for an operation that torch does not have."""
        self._lower, self._device = LOWER[train.amp], device
        lower = self._lower or torch.float32
        white = {name: lower for name in _known(train.amp_white, "train.amp_white")}
        self._types = white | {name: torch.float32 for name in _known(train.amp_black, "train.amp_black")}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context for the forward pass."""
        with ExitStack() as held:
            if self._lower is not None:
                held.enter_context(torch.autocast(self._device.type, self._lower))
            if self._types:
                held.enter_context(OperationTypes(self._types, self._device))
            yield


class OperationTypes(TorchFunctionMode):
    """A context in which operations of these names compute in a given type. It costs some microseconds a call."""

    def __init__(self, types: Mapping[str, torch.dtype], device: torch.device) -> None:
        super().__init__()
        self._types, self._device = types, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        wanted = self._types.get(getattr(func, "__name__", "").strip("_"))
        if wanted is None:
            return func(*args, **kwargs)
        with torch.autocast(self._device.type, enabled=False):
            return func(*(_cast(each, wanted) for each in args), **{k: _cast(v, wanted) for k, v in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `dtype`, also in lists and tuples; all else unchanged."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(_cast(each, dtype) for each in value) if type(value) in (list, tuple) else value


def _known(names: Iterable[str], key: str) -> Iterable[str]:
    for name in names:
        if not (hasattr(functional, name) or hasattr(torch, name)):
            raise SpecError(f'torch has no operation "{name}"; give names as of torch.nn.functional or torch', key)
    return names


class LossScaleState(msgspec.Struct, frozen=True, array_like=True):
    """The state that a commit holds, as a list. Older commits do not have the last number."""

    value: float
    good: int
    """Good steps since the scale changed."""
    bad: int = 0
    """Overflows in a row."""


class LossScale:
    """Loss scaling for float16 (Micikevicius et al. 2018): raised after many good steps, lowered after overflows."""

    def __init__(self, on: bool, section: LossScaleSection = LossScaleSection()) -> None:  # noqa: B008  # frozen
        self.on, self._section = on, section
        self.adapts = on and section.dynamic
        """Whether it is lowered after overflows."""
        self.value = section.initial if on else 1.0
        self._good = self._bad = 0

    def settle(self, finite: bool) -> None:
        """Adjust the scale after a step."""
        if not self.adapts:
            return
        own = self._section
        self._good, self._bad = (self._good + 1, 0) if finite else (0, self._bad + 1)
        if self._bad == own.decrease_every:
            self.value, self._bad = max(1.0, self.value * own.decrease), 0
        elif self._good == own.growth_every:
            self.value, self._good = min(MAX_LOSS_SCALE, self.value * own.growth), 0

    def applies(self, train: TrainSection, progress: TrainerProgress, step: int, num_bad: int) -> bool:
        """Whether the step may be applied, the same on all ranks; the scale is adjusted.

        `num_bad`: ranks whose loss or gradient is not finite. Raises NonFinite with `on_nonfinite = "fail"`.
        """
        self.settle(num_bad == 0)
        if not num_bad:
            return True
        where = f"pass {progress.current}, step {step}: a loss or gradient on {num_bad} rank(s) is not finite"
        if self.adapts and self.value > 1:
            log.info("%s; float16 loss scale lowered to %g", where, self.value)
        elif train.on_nonfinite == "fail":
            raise NonFinite(
                f"{where}; lower the learning rates{' or train.loss_scale.initial' if self.on else ''}, "
                'or set dense.clip_norm or train.on_nonfinite = "skip_batch"'
            )
        else:
            log.warning("%s; the step is skipped", where)
            progress.skipped_steps += 1
        return False

    def state(self) -> list[float]:
        """The state that a commit holds."""
        found: list[float] = plain(LossScaleState(self.value, self._good, self._bad))
        return found

    def load_state(self, state: Sequence[float]) -> None:
        """The inverse of `state`, but for a constant scale. Raises NotUnderstood."""
        found = typed(LossScaleState, state, "the state of the loss scale")
        if self.adapts:
            self.value, self._good, self._bad = found.value, found.good, found.bad
