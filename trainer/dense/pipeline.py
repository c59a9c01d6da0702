"""The dense strategy "pipeline": each trainer has the layers of one stage of the model, and learns them.

Batches pass through the stages in micro-batches (trainer.collectives.stage_steps); the first trainer has the first
stage, and what is not in the tower. At the end of a pass it gets the weights of all stages, so that it commits, exports
and predicts with the whole model. The others hold only their own. Commits are those of "all_reduce".

With `pipeline.stages` there are several models side by side, each on so many neighbouring trainers. They learn from
different events: gradients of a stage are summed over the trainers that have it, in rank order.

Shapes: M samples of a micro-batch, T tasks.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism (NeurIPS 2019).
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.errors import SpecError
from headrace.pserver.protocol.shards import F32
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.batch_norms import evaluating
from headrace.trainer.dense.flat_parameters import FlatOptimizer, FlatParameters, begins_of, clip
from headrace.trainer.dense.strategy import PREFIX, Around, Awaiting, DenseStrategy, Parameters, state_in
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import STEP
from headrace.trainer.models.contract import Declared

Parts = Mapping[str, Mapping[str, F32]]
"""For each parameter, by name: its weights, under "", and its parts of the optimizer's state."""

NOTHING: F32 = np.empty(0, np.float32)

log = logging.getLogger(__name__)


class Blocks(Protocol):
    """The parts of a tower (trainer.models.contract) that stages need."""

    @property
    def width(self) -> int:
        """Length of the input of the first block."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks, one after another."""
        ...

    @property
    def leave(self) -> nn.Module:
        """From the last block's output to the logits."""
        ...


def divided(costs: Sequence[int], num_stages: int, last: int = 0) -> list[range]:
    """Neighbouring blocks for each stage, so that the most costly stage costs least; `last`: cost of leaving the tower.

    Every stage gets a block as long as there are any. Of equal divisions, the one whose first stages have fewer blocks:
    the first trainer has other work, too.
    """
    if len(costs) <= num_stages:
        return [range(min(at, len(costs)), min(at + 1, len(costs))) for at in range(num_stages)]
    upto = [0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # most[s][n]: cost of the most costly of the last s stages, if they have the blocks from n on
    total = len(costs)
    most = [[upto[total] - upto[n] + last for n in range(total + 1)]]
    for stages in range(2, num_stages + 1):
        row = [0] * (total + 1)
        for n in range(total - stages + 1):
            ends = range(n + 1, total - stages + 2)
            row[n] = min(max(upto[end] - upto[n], most[-1][end]) for end in ends)
        most.append(row)
    found, begin = list[range](), 0
    for left in range(num_stages - 1, 0, -1):
        ends = range(begin + 1, total - left + 1)
        end = next(e for e in ends if max(upto[e] - upto[begin], most[left - 1][e]) <= most[num_stages - 1][0])
        found.append(range(begin, end))
        begin = end
    return [*found, range(begin, total)]


class Stage(nn.Module):
    """The blocks of one trainer; the last one leaves the tower."""

    def __init__(self, tower: Blocks, number: int, num_stages: int, surroundings: Awaiting = nullcontext) -> None:
        """The stage `number` of so many. `surroundings`: of each forward pass."""
        super().__init__()
        ranges = divided([_num_weights(each) for each in tower.blocks], num_stages, _num_weights(tower.leave))
        widths, types = _between(tower, surroundings)
        mine = ranges[number]
        self.number, self.surroundings = number, surroundings
        self.blocks = nn.ModuleList([tower.blocks[at] for at in mine])
        self.leave = tower.leave if number == num_stages - 1 else None
        self.width_in, self.type_in = widths[mine.start], types[mine.start]
        """Length and type of the input, and"""
        end = len(tower.blocks) + 1 if self.leave is not None else mine.stop
        self.width_out, self.type_out = widths[end], types[end]
        """of the output."""
        self.parts: Sequence[Callable[[Tensor], Tensor]] = self.layers
        """They compute what `layers` compute, one after another."""
        held = [*((at, tower.blocks[n]) for at, each in enumerate(ranges) for n in each), (num_stages - 1, tower.leave)]
        self.numbers = {id(each): at for at, module in held for each in module.parameters()}
        """The stage of each parameter of the tower, by the parameter's identity."""

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks, and what leaves the tower."""
        return [*self.blocks, *([] if self.leave is None else [self.leave])]

    def forward(self, x_MI: Tensor, beside_MT: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """(M, in), (M, T) -> (M, out), (M, T); the last stage returns the logits, (M, T)."""
        with self.surroundings():
            for part in self.parts:
                x_MI = part(x_MI)
            if self.leave is not None:
                return (x_MI + beside_MT).float()
            return x_MI if len(self.blocks) else x_MI.clone(), beside_MT.clone()


def _num_weights(module: nn.Module) -> int:
    """About the multiplications for one sample."""
    return sum(each.numel() for each in module.parameters())


def _between(tower: Blocks, surroundings: Awaiting) -> tuple[list[int], list[torch.dtype]]:
    """Lengths and types of the input of each block, of that of `leave`, and of the logits."""
    modules = [*tower.blocks, tower.leave]
    x_1I = torch.zeros((1, tower.width))
    widths, types = [tower.width], [x_1I.dtype]
    with torch.no_grad(), surroundings(), evaluating(part for each in modules for part in each.modules()):
        for module in modules:
            x_1I = module(x_1I)
            widths.append(x_1I.shape[1])
            types.append(x_1I.dtype)
    return widths, [*types[:-1], torch.float32]


class PipelineDense(DenseStrategy):
    """A rank learns the parameters of its stage; rank 0 gets those of all when a pass ends."""

    _flat: FlatParameters
    _optimizer: FlatOptimizer

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        """Raises SpecError for a model that has no stages."""
        config.check_trainers(ranks.world)
        self._num_stages = config.num_stages(ranks.world)
        self.stage = _stage_of(model, ranks, self._num_stages, around.types)
        every = {name: each for name, each in (*model.named_parameters(), *(more or {}).items()) if each.requires_grad}
        self._owners = {name: self.stage.numbers.get(id(each), 0) for name, each in every.items()}
        """The stage that learns each parameter, in the order of commits."""
        foreign = {name for name, owner in self._owners.items() if owner != self.stage.number}
        self._sizes = {name: each.numel() for name, each in every.items()}
        """Floats of all parameters, in the order of commits."""
        begins, self._length = begins_of(list(self._sizes.values()))
        self._begins = dict(zip(self._sizes, begins, strict=True))
        self._places = {name: at for at, name in enumerate(self._sizes)}
        self._vectors = config.optimizer.vector_names
        self._digest = _combined(
            self._sizes, _hashes({name: {"": each.detach().numpy().reshape(-1)} for name, each in every.items()}, every)
        )
        absent = foreign if self.stage.number else set()
        self._sum: Callable[[], None] = lambda: None
        super().__init__(model, config, ranks, FlatParameters(model, more, foreign=foreign, absent=absent))
        self._every = every
        self._optimizer = FlatOptimizer(self._flat.weights, config.optimizer, self._flat.segments)
        for name in absent - (more or {}).keys():
            every[name].data = torch.zeros(()).expand(every[name].shape)  # its shape stays, without memory

    def communicates(self, step: int) -> bool:
        """On every rank, so that each hears the scale of the loss."""
        return True

    def after_backward(self, step: int, loss_scale: float) -> None:
        """Begins to sum the gradients of a stage over the trainers that have it."""
        if loss_scale != 1:
            self._grad.div_(loss_scale)
        if self._grad.numel():
            self._sum = self._ranks.all_reduce_of_stage(self._grad, self._num_stages)

    def wait(self) -> None:
        """For the sums. With `clip_norm` ranks meet here, for the norm of the gradients of all stages."""
        self._sum()
        if self._config.clip_norm is None:
            return
        squares = np.zeros(len(self._places))
        for name, (begin, end) in self._own() if self._ranks.rank < self._num_stages else ():
            squares[self._places[name]] = float(torch.linalg.vector_norm(self._grad[begin:end])) ** 2
        norm = math.sqrt(self._ranks.sum_floats(squares).sum())
        clip(self._grad, torch.tensor(norm, dtype=torch.float32), self._config.clip_norm)

    def finite(self) -> bool:
        return self._flat.finite(self._ranks.world // self._num_stages)

    def step(self) -> None:
        if self._grad.numel():
            self._optimizer.step(self._grad)

    def _own(self) -> Iterable[tuple[str, tuple[int, int]]]:
        """The parameters of this rank, with their places in its buffers."""
        return zip(self._flat.parameters, self._flat.segments, strict=True)

    def _state(self) -> dict[str, Tensor]:
        """The optimizer's state; a rank without parameters has none."""
        return self._optimizer.state if self._grad.numel() else {}

    def _parts(self) -> dict[str, dict[str, F32]]:
        """The parameters of this rank, with their state."""
        state = self._state()
        buffers = {"": self._flat.weights} | {name: state[name] for name in self._vectors if name in state}
        arrays = {name: each.numpy() for name, each in buffers.items()}
        return {name: {key: array[begin:end] for key, array in arrays.items()} for name, (begin, end) in self._own()}

    def flush(self) -> None:
        """The first trainer of each model gets the weights of all stages; all get the hash of weights and state."""
        parts = self._parts()
        heard = self._ranks.gather({"hashes": _hashes(parts, parts)})
        for name, owner in self._owners.items():
            if owner and self.stage.number in (0, owner):
                self._ranks.bring(self._every[name].detach().view(-1), owner, self._num_stages)
        told = None
        if heard is not None:
            by_stage = [heard[at :: self._num_stages] for at in range(self._num_stages)]
            same = all(np.array_equal(each["hashes"], first["hashes"]) for first, *rest in by_stage for each in rest)
            assert same, "trainers with the same stage learn the same"
            left = [iter(each["hashes"].reshape(-1, 32)) for each in heard]
            told = {"dense": _combined(self._sizes, np.concatenate([next(left[at]) for at in self._owners.values()]))}
        self._digest = self._ranks.broadcast(told)["dense"]

    def _of_others(self, parts: Parts, key: str) -> Iterator[tuple[str, F32]]:
        """Collective: on rank 0, `key` of the parameters that others learn, one after another, so memory is for one."""
        for name, owner in self._owners.items():
            if owner:
                mine = parts[name].get(key, NOTHING) if owner == self._ranks.rank else NOTHING
                heard = self._ranks.gather({"values": mine})
                if heard is not None:
                    yield name, heard[owner]["values"]

    def consolidate(self) -> dict[str, Tensor]:
        """Rank 0 has all weights since `flush`, and gets the state of all stages."""
        parts, found = self._parts(), self._flat.tensors()
        state = self._state()
        counts = self._ranks.gather({"count": np.array([float(state[STEP])] if STEP in state else [], np.float32)})
        for key in self._vectors:
            whole = np.full(self._length if counts is not None else 0, self._config.optimizer.start(key), np.float32)
            num = 0
            for name, values in chain(
                ((n, each.get(key, NOTHING)) for n, each in parts.items()), self._of_others(parts, key)
            ):
                if counts is not None:
                    whole[self._begins[name] : self._begins[name] + len(values)] = values
                    num += len(values)
            if num:  # else it is before the first step
                found[PREFIX + key] = torch.from_numpy(whole)
        known = [each["count"][0] for each in counts or () if len(each["count"])]
        return found | ({PREFIX + STEP: torch.tensor(float(known[0]))} if known else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat.load(tensors)
        state = state_in(tensors)
        if state.keys() != self._state_names:
            state = {}
        if self._grad.numel() and state:
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
        """The hash of all stages at the last `flush` or `load`."""
        return self._digest


def _stage_of(model: nn.Module, ranks: Ranks, num_stages: int, types: Awaiting) -> Stage:
    """The stage of this rank. Raises SpecError."""
    kind, declared = type(model).__name__, Declared.of(model)
    if declared.tower is None:
        raise SpecError(
            f'the model {kind} has no `tower`, whose blocks dense.strategy = "pipeline" divides among trainers',
            "model",
        )
    for name, found in (("losses", declared.losses), ("measures", declared.measures)):
        if found is not None:
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
    stage = Stage(declared.tower(), ranks.rank % num_stages, num_stages, types)
    if not len(stage.blocks):
        log.warning("trainer %d has no block of the tower: there are fewer blocks than stages", ranks.rank)
    return stage


def _hashes(parts: Parts, names: Iterable[str]) -> NDArray[np.uint8]:
    """SHA-256 of each parameter with its state, 32 bytes each."""
    found = []
    for name in names:
        total = hashlib.sha256()
        for key in sorted(parts[name]):
            total.update(key.encode())
            total.update(np.ascontiguousarray(parts[name][key]).data)
        found.append(total.digest())
    return np.frombuffer(b"".join(found), np.uint8)


def _combined(names: Iterable[str], hashes: NDArray[np.uint8]) -> str:
    """The hash of all parameters, in hex."""
    return hashlib.sha256("\n".join(names).encode() + hashes.tobytes()).hexdigest()
