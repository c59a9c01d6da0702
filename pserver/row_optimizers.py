"""Optimizers of rows: sections of the job spec, each with its state in a row, and its kernels.

A row's weights have two parts, the first-order weight and the vector, each with a section of its own, of the same kind.
pserver.rows.row_settings puts the two together. The kernels are in a module of their own,
pserver.row_optimizer_kernels, as the check of a job file reads these sections and must not wait for Numba.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from headrace.config import Beta, NotNegative, Positive, Section
from headrace.registry import Registry

F32 = NDArray[np.float32]


class RowKernels(NamedTuple):
    """How an optimizer changes rows of a slab; see pserver.row_optimizer_kernels."""

    apply: Callable[..., Any]
    """apply(slab_RW, rows_U, grads_UD, begin, end, first_order, settings): applies rows begin .. end - 1 of U.
    `settings` are (2, 6), for first-order weight and vector: low, high, then `RowOptimizer.numbers`."""
    reference: Callable[[F32, F32, int, F32], None]
    """The twin on one row: reference(row_W, grad_D, first_order, settings)."""
    start: Callable[..., Any] | None = None
    """start(slab_RW, group_R, begin, end, first_order, num_weights, settings_C, class_G): sets the state of new rows
    that depends on their weights. None: none does."""
    adapt: Callable[..., Any] | None = None
    """adapt(slab_RW, rows_U, begin, end, first_order, num_weights, settings): before `apply`, in tables with a schedule
    or weight decay: changes the state such that it gives the present weights at the present rate. A step at a rate of 0
    is left out then. None: weights do not follow from the state."""


class RowOptimizer(Section):
    """The optimizer of one part of a row."""

    kind: str
    """Its name."""
    lr: Positive
    """Learning rate."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Keys that both parts have in common: `first_order_optimizer` has those of `optimizer`."""
    lent: ClassVar[tuple[str, ...]] = ()
    """Keys that a part without weights has from the other part, as its state is in every row all the same."""
    adds_up: ClassVar[bool] = False
    """Whether one step with a sum of gradients is all their steps, as train.mode = "geo" needs."""
    follows_rate: ClassVar[bool] = False
    """Whether weights follow from the state and the rate, as where kernels have `adapt`: a table keeps its schedule."""

    @property
    def on_device(self) -> str | None:
        """Name of the function of trainer.train.row_learning that learns alike on a device; None: there is none."""
        return None

    @property
    def paddle_rule(self) -> str | None:
        """The rule of Paddle's sparse tables that learns alike and has the same state; None: there is none."""
        return None

    def numbers(self) -> list[float]:
        """The settings that kernels read, at most four: `lr`, which a schedule scales, and others."""
        raise NotImplementedError

    def state(self, num_weights: int) -> list[list[float]]:
        """The state of a part with so many weights in a new row, in groups. A row has the first group of its
        first-order weight, the first of its vector, then the second ones, and so on."""
        raise NotImplementedError

    def kernels(self) -> RowKernels:
        """Its kernels. Imports Numba."""
        raise NotImplementedError


class Sgd(RowOptimizer):
    """Plain gradient descent."""

    kind: Literal["sgd"]
    """SGD."""
    lr: Positive = 0.05
    """Learning rate."""

    adds_up: ClassVar[bool] = True

    @property
    @override
    def paddle_rule(self) -> str:
        return "naive"

    @property
    @override
    def on_device(self) -> str:
        return "sgd"

    @override
    def numbers(self) -> list[float]:
        return [self.lr]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return []

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        return RowKernels(kernels.sgd, kernels.sgd_reference)


class Momentum(RowOptimizer):
    """Gradient descent with momentum. A row's momentum changes in the steps that push the row, and rests between."""

    kind: Literal["momentum"]
    """Gradient descent with momentum."""
    lr: Positive = 0.05
    """Learning rate."""
    momentum: Beta = 0.9
    """Share of the last move that is in the next one."""

    @property
    @override
    def on_device(self) -> str:
        return "momentum"

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.momentum]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * num_weights]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        return RowKernels(kernels.momentum, kernels.momentum_reference)


class Adagrad(RowOptimizer):
    """Adagrad (Duchi, Hazan, Singer 2011)."""

    kind: Literal["adagrad"] = "adagrad"
    """Adagrad."""
    lr: Positive = 0.05
    """Learning rate."""
    per: Literal["row", "element"] = "row"
    """One accumulator for the first-order weight and one for the vector (mean of squares), or one for each element."""
    initial: NotNegative = 0.0
    """Accumulator of a new row."""
    epsilon: NotNegative = 1e-10
    """Added to the root."""

    shared: ClassVar[tuple[str, ...]] = ("per",)
    lent: ClassVar[tuple[str, ...]] = ("initial",)

    @property
    @override
    def on_device(self) -> str:
        return f"adagrad_{self.per}"

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.epsilon]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[self.initial] * (num_weights if self.per == "element" else 1)]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        if self.per == "element":
            return RowKernels(kernels.adagrad_element, kernels.adagrad_element_reference)
        return RowKernels(kernels.adagrad_row, kernels.adagrad_row_reference)


class Adam(RowOptimizer):
    """Adam (Kingma, Ba 2015), steps counted per row."""

    kind: Literal["adam"]
    """Adam."""
    lr: Positive = 0.001
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""

    @property
    @override
    def on_device(self) -> str:
        return "adam"

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.beta1, self.beta2, self.epsilon]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * num_weights, [0.0] * num_weights, [1.0, 1.0]]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        return RowKernels(kernels.adam, kernels.adam_reference)


class Ftrl(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013)."""

    kind: Literal["ftrl"]
    """FTRL."""
    lr: Positive = 0.05
    """Alpha of the paper."""
    beta: NotNegative = 1.0
    """Beta of the paper."""
    l1: NotNegative = 0.0
    """L1 strength: drives weights to exactly 0."""
    l2: NotNegative = 0.0
    """L2 strength."""

    follows_rate: ClassVar[bool] = True

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.beta, self.l1, self.l2]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * num_weights, [0.0] * num_weights]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        return RowKernels(kernels.ftrl, kernels.ftrl_reference, kernels.ftrl_start, kernels.ftrl_adapt)


class PaddleAdagrad(RowOptimizer):
    """Adagrad as in Paddle's parameter server: a step is scaled by sqrt(initial_g2sum / (initial_g2sum + g2sum)), with
    the sum of squares before this step; so the first one has the whole rate."""

    kind: Literal["paddle_adagrad"]
    """Paddle's Adagrad."""
    lr: Positive = 0.05
    """Paddle's `learning_rate`."""
    initial_g2sum: Positive = 3.0
    """The same in Paddle: the greater, the longer steps stay long."""
    per: Literal["row", "element"] = "row"
    """"row": one sum for the first-order weight and one for the vector (mean of squares), as SparseAdaGradSGDRule;
    "element": one for each element, as StdAdaGradSGDRule."""

    shared: ClassVar[tuple[str, ...]] = ("per",)

    @property
    @override
    def paddle_rule(self) -> str:
        return "std_adagrad" if self.per == "element" else "adagrad"

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.initial_g2sum]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * (num_weights if self.per == "element" else 1)]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        if self.per == "element":
            return RowKernels(kernels.paddle_adagrad_element, kernels.paddle_adagrad_element_reference)
        return RowKernels(kernels.paddle_adagrad_row, kernels.paddle_adagrad_row_reference)


class PaddleAdam(RowOptimizer):
    """Adam as in Paddle's parameter server: epsilon is added to the root of a moment without bias correction."""

    kind: Literal["paddle_adam"]
    """Paddle's Adam."""
    lr: Positive = 0.001
    """Paddle's `learning_rate`."""
    beta1: Beta = 0.9
    """Paddle's `beta1_decay_rate`."""
    beta2: Beta = 0.999
    """Paddle's `beta2_decay_rate`."""
    epsilon: Positive = 1e-8
    """Paddle's `ada_epsilon`."""

    @property
    @override
    def paddle_rule(self) -> str:
        return "adam"

    @override
    def numbers(self) -> list[float]:
        return [self.lr, self.beta1, self.beta2, self.epsilon]

    @override
    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * num_weights, [0.0] * num_weights, [self.beta1, self.beta2]]

    @override
    def kernels(self) -> RowKernels:
        from headrace.pserver import row_optimizer_kernels as kernels

        return RowKernels(kernels.paddle_adam, kernels.paddle_adam_reference)


ROW_OPTIMIZERS = Registry(
    kind="row optimizer",
    group="headrace.row_optimizers",
    base=RowOptimizer,
    own={
        "sgd": "pserver.row_optimizers:Sgd",
        "momentum": "pserver.row_optimizers:Momentum",
        "adagrad": "pserver.row_optimizers:Adagrad",
        "adam": "pserver.row_optimizers:Adam",
        "ftrl": "pserver.row_optimizers:Ftrl",
        "paddle_adagrad": "pserver.row_optimizers:PaddleAdagrad",
        "paddle_adam": "pserver.row_optimizers:PaddleAdam",
    },
)

if TYPE_CHECKING:
    AnyRowOptimizer = RowOptimizer
else:
    AnyRowOptimizer = ROW_OPTIMIZERS.union()
