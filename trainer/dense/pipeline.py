"""The dense strategy "pipeline": each trainer has the layers of one stage of the model, and learns them.

Batches pass through the stages in micro-batches (trainer.collectives.stage_steps); rank 0 has the first stage, and what
is not in the tower. At the end of a pass rank 0 gets the weights of all stages, so that it commits, exports and
predicts with the whole model. The others hold only their own. Commits are those of "all_reduce".

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism (NeurIPS 2019).
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from millrace.errors import SpecError
from pserver.protocol.shards import F32
from trainer.collectives.ranks import Ranks
from trainer.dense.flat_dense import PREFIX, FlatDense, clip, state_in
from trainer.dense.flat_optimizer import STEP, FlatOptimizer, initial_state, state_names, vector_names
from trainer.dense.flat_parameters import FlatParameters, begins_of
from trainer.dense.stages import Stage
from trainer.dense_config import DenseSection

Parts = Mapping[str, Mapping[str, F32]]
"""For each parameter, by name: its weights, under "", and its parts of the optimizer's state."""

log = logging.getLogger(__name__)


class PipelineDense(FlatDense):
    """See module docstring, and DenseStrategy."""

    one_reader = True

    def __init__(
        self, model: nn.Module, config: DenseSection, ranks: Ranks, more: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """See FlatDense. Raises SpecError for a model that has no stages."""
        self.stage = _stage_of(model, ranks)
        every = {name: each for name, each in (*model.named_parameters(), *(more or {}).items()) if each.requires_grad}
        inside, elsewhere = {id(each) for each in self.stage.parameters()}, self.stage.elsewhere
        foreign = {n for n, each in every.items() if (id(each) not in inside if ranks.rank else id(each) in elsewhere)}
        self._sizes = {name: each.numel() for name, each in every.items()}
        """Floats of all parameters, in the order of commits."""
        begins, self._length = begins_of(list(self._sizes.values()))
        self._begins = dict(zip(self._sizes, begins, strict=True))
        self._places = {name: at for at, name in enumerate(self._sizes)}
        self._vectors = vector_names(config.optimizer)
        fresh = {name: {"": each.detach().numpy().reshape(-1)} for name, each in every.items()}
        self._digest = _combined(self._sizes, _hashes(fresh, self._sizes))
        absent = foreign if ranks.rank else set()
        flat = FlatParameters(model, more, foreign=foreign, absent=absent)
        super().__init__(model, config, ranks, flat=flat)
        self._every = every
        has_any = self._grad.numel() > 0
        self._optimizer = FlatOptimizer(self._flat.weights, config.optimizer, self._flat.segments) if has_any else None
        for name in absent - (more or {}).keys():
            every[name].data = torch.zeros(()).expand(every[name].shape)  # its shape stays, without memory

    def set_lr(self, lr: float) -> None:
        """See DenseStrategy."""
        if self._optimizer is not None:
            self._optimizer.lr = lr

    def communicates(self, step: int) -> bool:
        """See DenseStrategy: gradients are where they are needed when the backward pass is done."""
        return False

    def after_backward(self, step: int, loss_scale: float) -> None:
        """See DenseStrategy."""
        assert loss_scale == 1, "there is no float16"

    def wait(self) -> None:
        """See DenseStrategy: with `clip_norm` ranks meet here, for the norm of the gradients of all stages."""
        if self._config.clip_norm is None:
            return
        squares = np.zeros(len(self._places))
        for name, (begin, end) in self._own():
            squares[self._places[name]] = float(torch.linalg.vector_norm(self._grad[begin:end])) ** 2
        norm = math.sqrt(self._ranks.sum_floats(squares).sum())
        clip(self._grad, torch.tensor(norm, dtype=torch.float32), self._config.clip_norm)

    def finite(self) -> bool:
        """See DenseStrategy."""
        return self._flat.finite(1)

    def step(self) -> None:
        """See DenseStrategy."""
        if self._optimizer is not None:
            self._optimizer.step(self._grad)

    def _own(self) -> Iterable[tuple[str, tuple[int, int]]]:
        """The parameters of this rank, with their places in its buffers."""
        return zip(self._flat.parameters, self._flat.segments, strict=True)

    def _parts(self) -> dict[str, dict[str, F32]]:
        """The parameters of this rank, with their state."""
        state = {} if self._optimizer is None else self._optimizer.state
        buffers = {"": self._flat.weights} | {name: state[name] for name in self._vectors if name in state}
        arrays = {name: each.numpy() for name, each in buffers.items()}
        return {name: {key: array[begin:end] for key, array in arrays.items()} for name, (begin, end) in self._own()}

    def flush(self) -> None:
        """See DenseStrategy: rank 0 gets the weights of all stages; all ranks get the hash of weights and state."""
        parts = self._parts()
        own = list(parts)
        columns: dict[str, NDArray[np.generic]] = {
            "hashes": _hashes(parts, own),
            "places": self._places_of(own),
            "weights": _joined(parts, own if self._ranks.rank else (), ""),
        }
        heard = self._ranks.gather(columns)
        told = None
        if heard is not None:
            names, hashes = list(self._sizes), dict[str, NDArray[np.uint8]]()
            for rank, each in enumerate(heard):
                theirs = [names[at] for at in each["places"]]
                hashes |= dict(zip(theirs, each["hashes"].reshape(-1, 32), strict=True))
                if rank:
                    self._take_weights(theirs, each["weights"])
            told = {"dense": _combined(self._sizes, np.concatenate([hashes[name] for name in names]))}
        self._digest = self._ranks.broadcast(told)["dense"]

    def _places_of(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Numbers of parameters, in the order of commits."""
        return np.array([self._places[name] for name in names], np.int64)

    def _take_weights(self, names: Iterable[str], weights: F32) -> None:
        at = 0
        for name in names:
            size = self._sizes[name]
            self._every[name].detach().numpy()[...] = weights[at : at + size].reshape(self._every[name].shape)
            at += size

    def tensors(self) -> dict[str, Tensor]:
        """See DenseStrategy: the weights, and this rank's state. Those of other stages are zeros but on rank 0."""
        state = {} if self._optimizer is None else self._optimizer.state
        return self._flat.tensors() | {PREFIX + name: torch.as_tensor(value) for name, value in sorted(state.items())}

    def consolidate(self) -> dict[str, Tensor]:
        """See DenseStrategy: rank 0 has all weights since `flush`, and gets the state of all stages."""
        parts, found = self._parts(), self._flat.tensors()
        own = list(parts)
        state = {} if self._optimizer is None else self._optimizer.state
        columns: dict[str, NDArray[np.generic]] = {name: _joined(parts, own, name) for name in self._vectors}
        columns["places"] = self._places_of(own)
        columns["count"] = np.array([float(state[STEP])] if STEP in state else [], np.float32)
        heard = self._ranks.gather(columns)
        if heard is None:
            return found
        names = list(self._sizes)
        for state_name in self._vectors:
            if not any(len(each[state_name]) for each in heard):
                return found  # before the first step
            whole = np.full(self._length, initial_state(self._config.optimizer, state_name), np.float32)
            for each in heard:
                at = 0
                for name in (names[place] for place in each["places"]):
                    size, begin = self._sizes[name], self._begins[name]
                    whole[begin : begin + size] = each[state_name][at : at + size]
                    at += size
            found[PREFIX + state_name] = torch.from_numpy(whole)
        counts = [float(each["count"][0]) for each in heard if len(each["count"])]
        return found | ({PREFIX + STEP: torch.tensor(counts[0])} if counts else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See DenseStrategy."""
        self._flat.load(tensors)
        state = state_in(tensors)
        if state.keys() != state_names(self._config.optimizer):
            state = {}
        if self._optimizer is not None and state:
            vectors = {name: torch.zeros_like(self._flat.weights) for name in self._vectors}
            for name, (begin, end) in self._own():
                first = self._begins[name]
                for key, vector in vectors.items():
                    vector[begin:end] = state[key][first : first + end - begin]
            self._optimizer.state = vectors | ({STEP: state[STEP].clone()} if STEP in state else {})
        self._digest = self._digest_of(tensors, {name: state[name] for name in self._vectors if state})

    def _digest_of(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
        """The digest of the whole model, with vectors of state as in commits."""
        parts = dict[str, dict[str, F32]]()
        for name, size in self._sizes.items():
            begin = self._begins[name]
            cut = {key: value[begin : begin + size].numpy() for key, value in state.items()}
            parts[name] = {"": tensors[f"model.{name}"].reshape(-1).numpy()} | cut
        return _combined(self._sizes, _hashes(parts, self._sizes))

    def digest(self) -> str:
        """See DenseStrategy: the hash of all stages at the last `flush` or `load`."""
        return self._digest


def _stage_of(model: nn.Module, ranks: Ranks) -> Stage:
    """The stage of this rank. Raises SpecError."""
    kind, tower = type(model).__name__, getattr(model, "tower", None)
    if tower is None:
        raise SpecError(
            f'the model {kind} has no `tower`, whose blocks dense.strategy = "pipeline" divides among trainers',
            "model",
        )
    for name in ("losses", "measures"):
        if hasattr(model, name):
            raise SpecError(
                f'the model {kind} has `{name}`, which dense.strategy = "pipeline" does not compute', "model"
            )
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    if buffers := [name for name, value in state.items() if not isinstance(value, nn.Parameter)]:
        raise SpecError(
            f'the model {kind} has buffers, such as {buffers[0]}; dense.strategy = "pipeline" keeps none', "model"
        )
    if any(value.device.type != "cpu" for value in state.values()):
        raise SpecError('dense.strategy = "pipeline" works on CPUs only: set "cpu"', "train.device")
    stage = Stage(tower(), ranks.rank, ranks.world)
    if not len(stage.blocks):
        log.warning("trainer %d has no block of the tower: there are fewer blocks than trainers", ranks.rank)
    return stage


def _joined(parts: Parts, names: Iterable[str], key: str) -> F32:
    """The arrays of some parameters, one after another; nothing where they have no such state yet."""
    found = [parts[name][key] for name in names if key in parts[name]]
    return np.concatenate(found) if found else np.empty(0, np.float32)


def _hashes(parts: Parts, names: Iterable[str]) -> NDArray[np.uint8]:
    """SHA-256 of each parameter with its state, 32 bytes each."""
    found = []
    for name in names:
        total = hashlib.sha256()
        for key in sorted(parts[name]):
            total.update(key.encode())
            total.update(np.ascontiguousarray(parts[name][key]).tobytes())
        found.append(total.digest())
    return np.frombuffer(b"".join(found), np.uint8)


def _combined(names: Iterable[str], hashes: NDArray[np.uint8]) -> str:
    """The hash of all parameters, in hex."""
    return hashlib.sha256("\n".join(names).encode() + hashes.tobytes()).hexdigest()
