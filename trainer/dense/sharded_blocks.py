"""Stages 2 and 3 of the dense strategy "sharded": gradients are divided over ranks, and in stage 3 the weights, too.

The model is cut into blocks of neighbouring parameters (block_layout). As soon as backward has filled the gradients of
a block, ranks sum them, each its own slice, and give the rest back. In stage 3 they also give back the weights of a
block after its last call in a forward pass, and gather them again for the backward pass. Results are those of stage 1,
to the bit where neither norms nor micro-batches are summed in another order.

torch's FSDP2 (`fully_shard`) is not used, though it runs on CPUs: a rank without a batch does not take part in it, it
loads torch's compiler (170 MB and seconds of each trainer), and gloo does not say in which order its sums are.

Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (VLDB 2023).
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headrace.config import MAX_FLOAT32
from headrace.errors import HeadraceError, SpecError
from headrace.trainer.collectives.ranks import Ranks, gather_messages
from headrace.trainer.dense.block_buffers import BlockBuffers, give_back_freed_memory
from headrace.trainer.dense.block_order import Act, Acts, BlockOrder
from headrace.trainer.dense.sharded import SlicedDense
from headrace.trainer.dense.strategy import PREFIX, Around, Parameters
from headrace.trainer.dense_config import DenseSection, group_size
from headrace.trainer.models.contract import Declared

WEIGHTS = "weights"
"""Name of the slices of weights among those of the optimizer's state."""
FLOAT_BYTES = 4

log = logging.getLogger(__name__)


class OtherOrder(HeadraceError):
    """The model uses its blocks in another order than in the first forward pass, or differentiates one twice."""

    def __init__(self, block: tuple[str, ...], stage: int, trouble: str) -> None:
        super().__init__(
            f"the parameters {', '.join(block[:3])} are {trouble}, which stage {stage} cannot follow: set "
            f"dense.stage = {stage - 1}, or have the model call its layers in one order in all batches"
        )


class BlockShardedDense(SlicedDense):
    """A rank has slices of gradients and of the optimizer's state; in stage 3 also only slices of the weights."""

    _flat: BlockBuffers

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        """Collective. Raises SpecError for a model that divides its classes over ranks."""
        if Declared.of(model).class_rows is not None:
            raise SpecError(
                f"{config.stage} does not work with many classes, which trainers divide; use 1", "dense.stage"
            )
        size = group_size(ranks.world, config.group)
        blocks = BlockBuffers(model, more, ranks, size, config.bucket_bytes // FLOAT_BYTES)
        super().__init__(model, config, ranks, blocks, blocks.own)
        self._model, self._forwards = model, around.forwards
        self._frees = self.gathers = config.stage == 3 and size > 1
        """Whether weights are freed when they are not needed."""
        self._gathered: Mapping[str, Tensor] | None = None
        num_divided = blocks.num_divided
        self._order = None if self._frees else BlockOrder.of_sums(num_divided)
        self._calls: list[tuple[int, bool]] | None = None
        """Of blocks in the first forward pass; None where there is no batch."""
        self._acts: Acts = ()
        """Those of the present step; `_next` is the next one."""
        self._next = 0
        self._open = self._forward = self._learns = self._finite = False
        self._missing = [0] * num_divided
        """Parameters of each block whose gradients backward has not filled in this micro-batch."""
        self._left = [0] * num_divided
        """Calls of each block that are to come in this forward pass."""
        self._summed: set[int] = set()
        """Blocks that are summed in this micro-batch."""
        self._largest = MAX_FLOAT32 / (ranks.world * config.accumulate)
        self._saving: saved_tensors_hooks | None = None
        self._listen(model)
        self.flush()
        give_back_freed_memory()  # of the model as it was built

    # --- hooks

    def _listen(self, model: nn.Module) -> None:
        """Hear of the model's calls, and of its gradients."""
        blocks, number_of = self._flat, self._flat.layout.number_of
        names = {id(each): name for name, each in blocks.parameters.items() if name not in blocks.more}
        for name, parameter in blocks.parameters.items():
            if name not in blocks.more:
                parameter.register_hook(_Hook(self._fills, number_of[name]))  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _Hook(self._filled, number_of[name])
                )
        model.register_forward_pre_hook(_Hook(self._forward_begins, None))
        if self._frees:
            if Declared.of(model).parameters_in_calls:
                for module in list(model.modules()):
                    own = [names[id(each)] for each in module.parameters(recurse=False) if id(each) in names]
                    if numbers := sorted({number_of[name] for name in own}):
                        module.forward = _Watched(module.forward, numbers, self._enters, self._leaves)
            else:
                log.warning(
                    "the model %s does not declare parameters_in_calls, so with dense.stage = 3 all its weights are "
                    "there while it computes, and only between steps divided",
                    type(model).__name__,
                )
            model.register_forward_hook(_Hook(self._forward_ends, None), always_call=True)

    def _forward_begins(self, _: None) -> None:
        """Before the model is called."""
        if not self._open:
            return
        if self._order is None and self._calls is not None:
            self._agree()
        if self._order is None:
            self._calls = []
        else:
            self._run_to_forward()
            self._left = list(self._order.num_calls)
            for number, calls in enumerate(self._left if self._frees else ()):
                if not calls:
                    self._need(number)
        self._forward, self._summed = True, set()
        self._missing = [len(each.names) for each in self._flat.layout][: len(self._missing)]
        if self._frees and torch.is_grad_enabled():
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    def _forward_ends(self, _: None) -> None:
        """After the model was called."""
        if not self._forward:
            return
        self._forward = False
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(None, None, None)

    def _enters(self, number: int) -> None:
        """Before a module with parameters of a block computes."""
        if not self._open:
            return
        if self._order is None and self._calls is not None:
            if self._forward:
                self._calls.append((number, True))
        else:
            self._need(number)

    def _leaves(self, number: int) -> None:
        """After it has computed."""
        if not self._forward:
            return
        if self._order is None and self._calls is not None:
            self._calls.append((number, False))
            return
        self._left[number] -= 1
        if not self._left[number]:
            self._flat.free(number)

    def _pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor: of weights only the place."""
        number = self._flat.block_of(tensor)
        return tensor if number is None else (number, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        """Autograd needs it."""
        if isinstance(saved, Tensor):
            return saved
        number, shape, strides, offset = saved
        self._need(number)
        return self._flat.storage(number).as_strided(shape, strides, offset)

    def _fills(self, number: int) -> None:
        """Backward adds to the gradient of a parameter of a block."""
        if not self._open:
            return
        if number in self._summed:
            raise self._other_order(number, "differentiated again after the sum of their gradients")
        self._flat.open_gradient(number)

    def _filled(self, number: int) -> None:
        """Backward has added to it."""
        if not self._open:
            return
        if self._order is None:
            self._agree()
        self._missing[number] -= 1
        while self._next < len(self._acts):
            act, block = self._acts[self._next]
            if act is not Act.BACKWARD and (act is not Act.SUM or self._missing[block]):
                return
            self._run_next()

    # --- the order

    def _agree(self) -> None:
        """Collective, after the first forward pass: all ranks follow the calls of the first rank that has made any."""
        heard = gather_messages(self._ranks, {"calls": self._calls})
        first = next((each for each in heard or () if each["calls"] is not None), {"calls": None})
        calls = self._ranks.broadcast(None if heard is None else first)["calls"]
        if calls is None:
            return
        self._order = BlockOrder.of(calls, self._flat.num_divided)
        self._plan()
        self._acts = self._acts[len(self._order.forward) :]  # all blocks were held in that pass
        for number in range(self._flat.num_divided):
            if self._order.num_calls[number]:
                self._flat.free(number)
        give_back_freed_memory()

    def _plan(self) -> None:
        """Begin a step."""
        self._next, forwards = 0, self._forwards if self._learns else 1
        if self._order is not None:
            self._acts = self._order.step(self._config.accumulate, forwards, learn=self._learns)

    def _run_next(self) -> None:
        act, number = self._acts[self._next]
        self._next += 1
        if act is Act.GATHER:
            self._flat.gather(number)
        elif act is Act.SUM:
            if self._frees:
                self._flat.free(number)
            self._finite = self._flat.sum(number, self._largest) and self._finite
            self._summed.add(number)

    def _run_to_forward(self) -> None:
        """All up to the begin of the next forward pass."""
        while self._next < len(self._acts) and self._acts[self._next][0] is not Act.FORWARD:
            self._run_next()
        assert self._next < len(self._acts), "as many forward passes as all ranks expect"
        self._next += 1

    def _need(self, number: int) -> None:
        """Hold a block, after all that comes before it."""
        ends = (Act.FORWARD, Act.BACKWARD) if self._forward else (Act.FORWARD,)
        while not self._flat.is_held(number):
            if self._next == len(self._acts) or self._acts[self._next][0] in ends:
                raise self._other_order(number, "used more often, or later, than in the first forward pass")
            self._run_next()

    def _other_order(self, number: int, trouble: str) -> OtherOrder:
        return OtherOrder(self._flat.layout[number].names, self._config.stage or 1, trouble)

    def _complete(self) -> None:
        """All that is left of a step, on every rank."""
        if not self._open:
            return
        if self._order is None:
            self._agree()
        while self._next < len(self._acts):
            self._run_next()
        if self._learns and len(self._flat.layout) > self._flat.num_divided:
            self._finite = self._flat.sum(self._flat.num_divided, self._largest) and self._finite
        self._flat.finish_sum()
        self._close()

    def _close(self) -> None:
        self._open = False
        if self._frees and self._order is not None:
            for number in range(self._flat.num_divided):
                self._flat.free(number)

    # --- as DenseStrategy

    def _begin(self, *, learns: bool) -> None:
        self._open, self._learns, self._finite = True, learns, True
        self._acts, self._calls = (), None
        self._plan()

    def clear(self) -> None:
        super().clear()
        self._gathered = None
        self._begin(learns=True)

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Gathers what is left, so that ranks without a batch make the same collectives."""
        self._begin(learns=False)
        yield
        self._complete()

    def finite(self) -> bool:
        """Collective: completes the sums."""
        self._complete()
        return self._finite

    def after_backward(self, step: int, loss_scale: float) -> None:
        """The sums are complete, unless nothing has asked whether they are finite."""
        self._complete()
        if self._grad.numel():
            self._begun, self._loss_scale = lambda: None, loss_scale

    def _spread(self) -> None:
        """In stage 3 only learnt default rows are there between steps."""
        if self._size > 1:
            for number in range(self._flat.num_divided if self._frees else 0, len(self._flat.layout)):
                self._flat.gather(number)

    def _vectors(self) -> dict[str, Tensor]:
        return {WEIGHTS: self._own.weights, **super()._vectors()}

    def _held_by_all(self) -> dict[str, Tensor]:
        return self._flat.undivided()

    def gather(self) -> None:
        self._gathered = self._whole([WEIGHTS])

    def published(self) -> Mapping[str, Tensor] | None:
        return self._gathered if self.gathers else self.tensors()

    def consolidate(self) -> dict[str, Tensor]:
        """Rank 0 gets the slices of its group."""
        return self._whole([WEIGHTS, *(self._names if self._optimizer.state.keys() >= set(self._names) else ())])

    def _whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Collective: on rank 0 the whole model, and the state of these names."""
        whole = self._consolidated(names) if self._grad.numel() else {}
        if not whole:
            return self._flat.undivided()
        found = self._flat.whole(whole.pop(WEIGHTS).numpy()) | self._count()
        return found | {PREFIX + name: each for name, each in whole.items()}

    def load(self, tensors: Any) -> None:
        """Collective."""
        super().load(tensors)
        self.flush()


class _Watched:
    """The forward pass of a module with parameters of blocks, also where it is recomputed. A copy has the plain one."""

    def __init__(
        self,
        forward: Callable[..., Any],
        numbers: Sequence[int],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        """`before` and `after` are called with the number of each block."""
        self._forward, self._numbers, self._before, self._after = forward, numbers, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for number in self._numbers:
            self._before(number)
        result = self._forward(*args, **kwargs)
        for number in self._numbers:
            self._after(number)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._forward, memo)


class _Hook:
    """Called by torch with a module or a parameter, and what it computes. A copy of the module does nothing."""

    def __init__(self, act: Callable[[Any], None], number: int | None) -> None:
        self._act, self._number = act, number

    def __call__(self, *_: object) -> None:
        self._act(self._number)

    def __deepcopy__(self, _memo: object) -> "_Hook":
        return _Hook(_nothing, None)


def _nothing(_: object) -> None:
    pass
