"""Optimizers of the dense parameters: sections of the job spec, each with its state and its step.

Most are torch's functions on torch's state, without torch's classes: these load torch's compiler, which takes about as
long as loading torch itself, at each start of a trainer. The same functions with the same arguments give the same bits;
tests check this. The sections are read without torch, so a step imports what it needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from headrace.config import Beta, GrownSection, NotNegative, Positive
from headrace.errors import SpecError
from headrace.pserver.row_optimizers import Adagrad, Adam, Momentum, RowOptimizer, Sgd
from headrace.registry import Registry
from headrace.text_kinds import TextKind

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, Tensor]

STEP = "step"
"""The optimizer's count of steps: no tensor of the weights' shape."""

Place = tuple[int, int]


class Segments(Sequence[Place]):
    """Begin and end of each parameter in a flat buffer, in the order of the module; without any: the parts of one."""

    def __init__(self, places: Sequence[Place] = (), names: Sequence[str] = ()) -> None:
        """`names` of the parameters."""
        self._places, self.names = tuple(places), tuple(names)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def __getitem__(self, at: Any) -> Any:
        return self._places[at]

    def norms(self, *buffers: "Tensor") -> "list[list[Tensor]]":
        """Of each buffer, the norms of all parameters. Where a rank has slices: of whole parameters; collective."""
        import torch

        return [[torch.linalg.vector_norm(each[begin:end]) for begin, end in self] for each in buffers]


class DenseOptimizer(GrownSection):
    """An optimizer of one flat buffer of weights."""

    state: ClassVar[frozenset[str]] = frozenset()
    """Names of the state after the first step. Optimizers with the same names continue each other's state."""
    whole: ClassVar[bool] = False
    """Whether a step needs whole parameters, not slices of the buffer."""
    by_norms: ClassVar[bool] = False
    """Whether of whole parameters it needs `Segments.norms` alone, so that slices will do."""

    if TYPE_CHECKING:
        kind: str
        lr: float

    @property
    def state_names(self) -> frozenset[str]:
        """Those of `state` that these settings need."""
        return self.state

    @property
    def vector_names(self) -> list[str]:
        """Names of the state of the weights' shape, in order."""
        return sorted(self.state_names - {STEP})

    @property
    def rests(self) -> bool:
        """Whether a weight whose gradient is 0 stays as it is."""
        return False

    def start(self, name: str) -> float:
        """The value of the state `name`, of the weights' shape, before the first step."""
        return 0.0

    def first_state(self, weights: "Tensor") -> "State":
        """The state before the first step; empty where the step makes it."""
        return {}

    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        """Change weights and state in place, at the rate `lr`."""
        raise NotImplementedError

    def of_rows(self) -> RowOptimizer | str:
        """The same optimizer, of rows on the shards; or the setting that rows do not have, in words.

        All slices are pushed in every step, so steps counted by row are the job's.
        """
        why = "which needs all of a parameter" if self.whole else "which rows do not have"
        return f'optimizer.kind = "{self.kind}", {why}'

    def split_momentum(self) -> "tuple[float, DenseOptimizer]":
        """The momentum that trainers can apply to their own gradients, and the optimizer without it."""
        return 0.0, self

    @property
    def local_decay(self) -> bool:
        """Whether trainers that apply the momentum must apply weight decay before it, by `add_decay`."""
        return False


class DecayingOptimizer(DenseOptimizer):
    """An optimizer with weight decay, from which parameters may be excluded."""

    holds: ClassVar[Mapping[str, TextKind]] = {"no_decay": TextKind.NAME}

    later: ClassVar[frozenset[str]] = frozenset({"no_decay"})
    no_decay: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Parameters whose name contains one of these do not decay."""

    if TYPE_CHECKING:
        weight_decay: float

    def decays(self, name: str) -> bool:
        """Whether the parameter of this name decays."""
        return not any(part in name for part in self.no_decay)

    def decaying(self, weights: "Tensor", segments: Segments) -> Sequence[Place]:
        """Begin and end of what decays in a buffer."""
        if not self.no_decay or not segments.names:
            return [(0, len(weights))]
        return [place for place, name in zip(segments, segments.names, strict=True) if self.decays(name)]

    def shrink(self, weights: "Tensor", lr: float, segments: Segments) -> None:
        """Decoupled weight decay (Loshchilov, Hutter 2019), before a step."""
        for begin, end in self.decaying(weights, segments):
            weights[begin:end].mul_(1 - lr * self.weight_decay)

    def add_decay(self, gradient: "Tensor", weights: "Tensor", segments: Segments, share: float = 1.0) -> "Tensor":
        """The gradient with a share of weight decay added, in place."""
        for begin, end in self.decaying(weights, segments):
            gradient[begin:end].add_(weights[begin:end], alpha=share * self.weight_decay)
        return gradient

    def prepared(
        self, gradient: "Tensor", weights: "Tensor", lr: float, segments: Segments, *, decoupled: bool
    ) -> "Tensor":
        """Before a step without weight decay of its own: shrink the weights, or return a gradient that has it."""
        if not self.weight_decay:
            return gradient
        if decoupled:
            self.shrink(weights, lr, segments)
            return gradient
        return self.add_decay(gradient.clone(), weights, segments)


def check_no_decay(optimizer: DenseOptimizer, names: Sequence[str]) -> None:
    """Raise SpecError for a part of a name in `no_decay` that no parameter of the model has."""
    for part in optimizer.no_decay if isinstance(optimizer, DecayingOptimizer) and names else ():
        if not any(part in name for name in names):
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise SpecError(f"no parameter has {part!r} in its name; there are {shown}", "dense.optimizer.no_decay")


class DenseSgd(DecayingOptimizer):
    """torch.optim.SGD."""

    state = frozenset({"momentum_buffer"})

    kind: Literal["sgd"]
    """SGD."""
    lr: Positive = 0.01
    """Learning rate."""
    momentum: Beta = 0.0
    """Momentum."""
    weight_decay: NotNegative = 0.0
    """Weight decay: its product with the weights is added to the gradient."""
    decoupled: bool = False
    """Whether weight decay does not pass through the momentum: weights shrink by lr * weight_decay before the step."""

    later = frozenset({"weight_decay", "decoupled", "no_decay"})

    @property
    @override
    def state_names(self) -> frozenset[str]:
        return self.state if self.momentum else frozenset()

    @property
    @override
    def rests(self) -> bool:
        return not self.momentum and not self.weight_decay

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        from torch.optim.sgd import sgd

        buffers: list[Tensor | None] = [state.get("momentum_buffer")]
        gradient = self.prepared(gradient, weights, lr, segments, decoupled=self.decoupled)
        sgd(
            [weights],
            [gradient],
            buffers if self.momentum else [],
            lr=lr,
            momentum=self.momentum,
            weight_decay=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self.momentum and buffers[0] is not None:
            state["momentum_buffer"] = buffers[0]

    @override
    def of_rows(self) -> RowOptimizer | str:
        if self.weight_decay:
            return "optimizer.weight_decay"
        if self.momentum:
            return Momentum(kind="momentum", lr=self.lr, momentum=self.momentum)
        return Sgd(kind="sgd", lr=self.lr)

    @override
    def split_momentum(self) -> tuple[float, DenseOptimizer]:
        """Weight decay that passes through the momentum goes with it: see `local_decay`."""
        rest: dict[str, float] = {"momentum": 0.0}
        return self.momentum, self.model_copy(update=rest | ({"weight_decay": 0.0} if self.local_decay else {}))

    @property
    @override
    def local_decay(self) -> bool:
        return self.momentum > 0 and self.weight_decay > 0 and not self.decoupled


class DenseAdam(DecayingOptimizer):
    """torch.optim.Adam."""

    state = frozenset({STEP, "exp_avg", "exp_avg_sq"})

    kind: Literal["adam"] = "adam"
    """Adam."""
    lr: Positive = 0.003
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""
    weight_decay: NotNegative = 0.0
    """Weight decay: its product with the weights is added to the gradient."""
    decoupled: bool = False
    """Whether weight decay does not pass through the moments, as with "adamw"; so it was in jobs begun before set 3 of
    the defaults."""

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        from torch.optim.adam import adam
        from torch.optim.adamw import adamw

        coupled = self.weight_decay > 0 and not self.decoupled
        _learn_adam(adam if coupled else adamw, self, weights, gradient, state, lr, segments, decoupled=not coupled)

    @override
    def of_rows(self) -> RowOptimizer | str:
        return _adam_of_rows(self)


class DenseAdamW(DecayingOptimizer):
    """torch.optim.AdamW."""

    state = DenseAdam.state

    kind: Literal["adamw"]
    """AdamW (Loshchilov, Hutter 2019): Adam with decoupled weight decay."""
    lr: Positive = 0.001
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        from torch.optim.adamw import adamw

        _learn_adam(adamw, self, weights, gradient, state, lr, segments, decoupled=True)

    @override
    def of_rows(self) -> RowOptimizer | str:
        return _adam_of_rows(self)


class DenseAdagrad(DecayingOptimizer):
    """torch.optim.Adagrad."""

    state = frozenset({STEP, "sum"})

    kind: Literal["adagrad"]
    """Adagrad."""
    lr: Positive = 0.01
    """Learning rate."""
    initial: NotNegative = 0.0
    """Accumulator at the start."""
    epsilon: Positive = 1e-10
    """Added to the root."""
    weight_decay: NotNegative = 0.0
    """Weight decay: its product with the weights is added to the gradient."""
    decoupled: bool = False
    """Whether weight decay does not pass through the sums: weights shrink by lr * weight_decay before the step."""

    later = frozenset({"weight_decay", "decoupled", "no_decay"})

    @property
    @override
    def rests(self) -> bool:
        return not self.weight_decay

    @override
    def start(self, name: str) -> float:
        return self.initial if name == "sum" else 0.0

    @override
    def first_state(self, weights: "Tensor") -> "State":
        import torch

        return {STEP: torch.tensor(0.0), "sum": torch.full_like(weights, self.initial)}

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        from torch.optim.adagrad import adagrad

        state[STEP] = state[STEP].cpu()  # torch reads it on the host
        gradient = self.prepared(gradient, weights, lr, segments, decoupled=self.decoupled)
        adagrad(
            [weights],
            [gradient],
            [state["sum"]],
            [state[STEP]],
            foreach=False,
            lr=lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=self.epsilon,
            maximize=False,
        )

    @override
    def of_rows(self) -> RowOptimizer | str:
        if self.weight_decay:
            return "optimizer.weight_decay"
        return Adagrad(per="element", lr=self.lr, initial=self.initial, epsilon=self.epsilon)


class DenseLamb(DecayingOptimizer):
    """LAMB (You et al. 2020): Adam whose step has the norm of the weights, for each parameter."""

    state = DenseAdam.state
    whole = by_norms = True

    kind: Literal["lamb"]
    """LAMB."""
    lr: Positive = 0.001
    """Learning rate: length of a step as a share of the norm of the weights."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-6
    """Added to the root."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, before the step is scaled."""

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        """Algorithm 2 of the paper, with corrected moments and without a bound of the ratio of norms."""
        import torch

        if not state:
            state |= _moments(weights)
        state[STEP] = state[STEP].cpu() + 1
        step = int(state[STEP])
        first = state["exp_avg"].lerp_(gradient, 1 - self.beta1)
        second = state["exp_avg_sq"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = (second / (1 - self.beta2**step)).sqrt_().add_(self.epsilon)
        move = self.add_decay((first / (1 - self.beta1**step)).div_(root), weights, segments)
        lengths, fars = segments.norms(weights, move)
        for (begin, end), length, far in zip(segments, lengths, fars, strict=True):
            ratio = torch.where((length > 0) & (far > 0), length / far, torch.ones_like(length))
            move[begin:end].mul_(ratio)
        weights.add_(move, alpha=-lr)


class DenseLars(DecayingOptimizer):
    """LARS (You, Gitman, Ginsburg 2017): SGD whose rate follows the norms of weights and gradient, by parameter."""

    state = frozenset({"velocity"})
    whole = by_norms = True

    kind: Literal["lars"]
    """LARS."""
    lr: Positive = 1.0
    """Learning rate, times the local rate of each parameter."""
    momentum: Beta = 0.9
    """Momentum of the scaled steps."""
    weight_decay: NotNegative = 0.0005
    """Weight decay: its product with the weights is added to the gradient."""
    trust: Positive = 0.001
    """Length of a step as a share of the norm of the weights."""
    epsilon: NotNegative = 0.0
    """Added to the norms by which the local rate is divided."""

    later = frozenset({"epsilon", "no_decay"})

    @override
    def learn(self, weights: "Tensor", gradient: "Tensor", state: "State", lr: float, segments: Segments) -> None:
        """Algorithm 1 of the paper, with the momentum of the scaled steps.

        The local rate of a parameter is trust * |w| / (|g| + weight_decay * |w| + epsilon), and 1 where that has no
        meaning.
        """
        import torch

        if not state:
            state["velocity"] = torch.zeros_like(weights)
        velocity = state["velocity"].mul_(self.momentum)
        lengths, slopes = segments.norms(weights, gradient)
        names = segments.names or ("",) * len(segments)
        for (begin, end), name, length, slope in zip(segments, names, lengths, slopes, strict=True):
            own, grad = weights[begin:end], gradient[begin:end]
            decay = self.weight_decay if self.decays(name) else 0.0
            local = self.trust * length / (slope + decay * length + self.epsilon)
            local = torch.where((length > 0) & (slope > 0), local, torch.ones_like(local))
            velocity[begin:end].add_((grad + decay * own) * (lr * local))
        weights.sub_(velocity)


def _moments(weights: "Tensor") -> "State":
    import torch

    count = torch.zeros((), device=weights.device)
    return {STEP: count, "exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights)}


def _learn_adam(
    function: Callable[..., None],
    own: DenseAdam | DenseAdamW,
    weights: "Tensor",
    gradient: "Tensor",
    state: "State",
    lr: float,
    segments: Segments,
    *,
    decoupled: bool,
) -> None:
    """As torch's class, fused. `function`: torch's."""
    if not state:
        state |= _moments(weights)
    if own.no_decay:
        gradient = own.prepared(gradient, weights, lr, segments, decoupled=decoupled)
    function(
        [weights],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state[STEP]],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=own.beta1,
        beta2=own.beta2,
        lr=lr,
        weight_decay=0.0 if own.no_decay else own.weight_decay,
        eps=own.epsilon,
        maximize=False,
    )


def _adam_of_rows(own: DenseAdam | DenseAdamW) -> RowOptimizer | str:
    if own.weight_decay:
        return "optimizer.weight_decay"
    return Adam(kind="adam", lr=own.lr, beta1=own.beta1, beta2=own.beta2, epsilon=own.epsilon)


DENSE_OPTIMIZERS = Registry(
    kind="dense optimizer",
    group="headrace.dense_optimizers",
    base=DenseOptimizer,
    own={
        "sgd": "trainer.dense_optimizers:DenseSgd",
        "adam": "trainer.dense_optimizers:DenseAdam",
        "adamw": "trainer.dense_optimizers:DenseAdamW",
        "adagrad": "trainer.dense_optimizers:DenseAdagrad",
        "lamb": "trainer.dense_optimizers:DenseLamb",
        "lars": "trainer.dense_optimizers:DenseLars",
    },
)

if TYPE_CHECKING:
    AnyDenseOptimizer = DenseOptimizer
else:
    AnyDenseOptimizer = DENSE_OPTIMIZERS.union()
