"""Many classes divided over ranks: each rank learns its own slice, and all other parameters as another strategy does.

The gradient of a slice is complete on its rank, so nothing is summed. Commits hold all classes in order, so they go on
with any number of ranks. A step that draws classes changes those alone, with an optimizer for which a gradient of 0
changes nothing.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.config import MAX_FLOAT32
from headrace.errors import BadInput
from headrace.trainer.collectives.divided_softmax import SLICE_CLASSES, ClassRows
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatOptimizer, within
from headrace.trainer.dense.strategy import Around, DenseStrategy, Parameters
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import STEP

WEIGHTS = "model.classes"
"""(N, V) in commits."""
PREFIX = "classes."
"""Before the names of the optimizer's state of classes in commits, and of the count of steps."""
STEPS = PREFIX + "steps"


class ClassSlices(DenseStrategy):
    """Comes before the strategy of all other parameters in the order of base classes: see `with_classes`."""

    gathers = True

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(model, config, ranks, more, around)  # type: ignore[call-arg, arg-type]  # of the strategy
        rows = model.class_rows
        assert isinstance(rows, ClassRows)
        self._rows, self._learns = rows, config.optimizer
        self._of_classes = FlatOptimizer(rows.weights_NV.view(-1), config.optimizer)
        self._vectors_of_classes = config.optimizer.vector_names
        self._gathered: Tensor | None = None
        self._hear_hashes()

    def set_lr(self, lr: float) -> None:
        """Classes have the rate of all others."""
        super().set_lr(lr)
        self._of_classes.lr = lr

    def clear(self) -> None:
        super().clear()
        self._rows.clear()
        self._gathered = None

    def finite(self) -> bool:
        gradient = self._rows.gradient_KV
        return super().finite() and (gradient is None or not gradient.numel() or within(gradient, MAX_FLOAT32))

    def communicates(self, step: int) -> bool:
        """On every rank, so that each hears the scale of the loss."""
        return True

    def after_backward(self, step: int, loss_scale: float) -> None:
        super().after_backward(step, loss_scale)
        if loss_scale != 1 and self._rows.gradient_KV is not None:
            self._rows.gradient_KV /= loss_scale

    def step(self) -> None:
        super().step()
        gradient, place_K = self._rows.gradient_KV, self._rows.place_K
        if gradient is None:
            return
        if place_K is None:
            self._of_classes.step(gradient.view(-1))
        else:
            self._step_of(place_K, gradient)

    def _step_of(self, place_K: Tensor, gradient_KV: Tensor) -> None:
        """Learn the classes `place_K` alone."""
        drawn_KV = self._rows.weights_NV[place_K]
        optimizer = FlatOptimizer(drawn_KV.view(-1), self._learns)
        optimizer.lr = self._of_classes.lr
        whole = {name: self._of_classes.state[name].view_as(self._rows.weights_NV) for name in self._vectors_of_classes}
        optimizer.state = self._of_classes.state | {name: each[place_K].view(-1) for name, each in whole.items()}
        optimizer.step(gradient_KV.view(-1))
        if STEP in optimizer.state:  # another tensor where the optimizer counts on the host
            self._of_classes.state[STEP] = optimizer.state[STEP]
        self._rows.weights_NV[place_K] = drawn_KV
        for name, each in whole.items():
            each[place_K] = optimizer.state[name].view_as(drawn_KV)

    def flush(self) -> None:
        """Hashes the slices."""
        super().flush()
        self._hear_hashes()

    def _hear_hashes(self) -> None:
        """Collective: the hash of the slices of all ranks."""
        heard = self._ranks.gather({"hashes": self._class_hashes()})
        found = None if heard is None else {"slices": hashlib.sha256(b"".join(map(_bytes, heard))).hexdigest()}
        self._of_slices = str(self._ranks.broadcast(found)["slices"])

    def _class_state(self) -> dict[str, Tensor]:
        """Weights and state of this rank's classes, (N, V) each; without state before the first step."""
        held = {name: self._of_classes.state.get(name) for name in self._vectors_of_classes}
        like = self._rows.weights_NV
        state = {PREFIX + name: each.view_as(like) for name, each in held.items() if each is not None}
        return {WEIGHTS: like, **state}

    def _class_hashes(self) -> NDArray[np.uint8]:
        """SHA-256 of the state of each SLICE_CLASSES of classes, one after another: slices begin at whole blocks."""
        state, found = [each.detach().cpu().numpy() for each in self._filled().values()], []
        for at in range(0, self._rows.end - self._rows.begin, SLICE_CLASSES):
            found.append(hashlib.sha256(b"".join(each[at : at + SLICE_CLASSES].tobytes() for each in state)).digest())
        return np.frombuffer(b"".join(found), np.uint8)

    def _filled(self) -> dict[str, Tensor]:
        """`_class_state`, with the state before the first step as it will begin."""
        state = self._class_state()
        for name in self._vectors_of_classes:
            start = torch.tensor(self._learns.start(name)).expand_as(self._rows.weights_NV)
            state.setdefault(PREFIX + name, start)
        return state

    def _class_counts(self) -> dict[str, Tensor]:
        steps = {STEPS: torch.tensor(self._rows.step)}
        held = self._of_classes.state.get(STEP)
        return steps if held is None else {**steps, PREFIX + STEP: held}

    def consolidate(self) -> dict[str, Tensor]:
        """Rank 0 gets the classes of all ranks."""
        found = super().consolidate() | self._class_counts()
        return found | self._of_all_ranks(self._class_state())

    def _of_all_ranks(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective: on rank 0 the classes of all ranks, (N, V) each; nothing elsewhere."""
        heard = self._ranks.gather({name: each.detach().cpu().numpy().reshape(-1) for name, each in state.items()})
        if heard is None:
            return {}
        wholes = {name: np.concatenate([each[name] for each in heard]) for name in state}
        return {name: torch.from_numpy(whole).view(-1, self._rows.dim) for name, whole in wholes.items()}

    def gather(self) -> None:
        self._gathered = self._of_all_ranks({WEIGHTS: self._rows.weights_NV}).get(WEIGHTS)

    def published(self) -> Mapping[str, Tensor] | None:
        return None if self._gathered is None else {**self.tensors(), WEIGHTS: self._gathered}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Collective. Without classes in `tensors` they stay as they are."""
        own = {WEIGHTS, *(name for name in tensors if name.startswith(PREFIX))}
        super().load({name: value for name, value in tensors.items() if name not in own})
        if WEIGHTS not in tensors:
            return
        rows, classes = self._rows, tensors[WEIGHTS]
        if tuple(classes.shape) != (rows.num_classes, rows.dim):
            raise BadInput(
                f"the commit has {classes.shape[0]} classes of {classes.shape[1]} numbers, not {rows.num_classes} of "
                f"{rows.dim}; go back to the model it was trained with, or start over with --fresh"
            )
        mine = slice(rows.begin, rows.end)
        rows.weights_NV.copy_(classes[mine])
        saved = {PREFIX + name for name in self._vectors_of_classes}
        if saved and saved <= tensors.keys():
            state = {name: tensors[PREFIX + name][mine].reshape(-1) for name in self._vectors_of_classes}
            if PREFIX + STEP in tensors:
                state[STEP] = tensors[PREFIX + STEP]
            self._of_classes.state = {name: each.to(rows.weights_NV.device).clone() for name, each in state.items()}
        if STEPS in tensors:
            rows.step = int(tensors[STEPS])
        self._hear_hashes()

    def digest(self) -> str:
        """Over the rest, the count of steps, and all slices at the last `flush` or `load`."""
        return hashlib.sha256(f"{super().digest()} {self._rows.step} {self._of_slices}".encode()).hexdigest()


def with_classes(strategy: type[DenseStrategy]) -> type[DenseStrategy]:
    """A strategy that also learns the classes of a model with `class_rows`."""
    return type(f"{strategy.__name__}WithClasses", (ClassSlices, strategy), {})


def _bytes(columns: Mapping[str, NDArray[np.uint8]]) -> bytes:
    return columns["hashes"].tobytes()
