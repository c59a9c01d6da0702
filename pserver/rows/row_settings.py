"""How rows of a table are initialised and learn, by the class of their slot: sections as arrays for kernels. Pure.

Shapes: W floats of a row, D weights of a row, C classes of slots.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SpecError
from headrace.pserver.config import TableSection, extends
from headrace.pserver.protocol.shards import ABSENT_BITS
from headrace.pserver.row_optimizers import RowKernels, RowOptimizer
from headrace.pserver.rows import weight_decay
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.initial_values import DRAWS, initialise, spread_of
from headrace.pserver.rows.slot_classes import SlotClasses, classes_of

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
RATE = 2
"""The column of the learning rate in the settings of an optimizer."""


@dataclass(frozen=True, slots=True)
class TableOptimizer:
    """The optimizer of both parts of a table's rows."""

    kernels: RowKernels
    settings: F32
    """(2, 6): for first-order weight and vector: low, high, the rate, then the optimizer's other numbers."""
    rates: NDArray[np.float64]
    """(2,) the whole rates of both."""
    start_state: F32
    """(W - D,): the state of a new row. In tables whose rows get their vector later, its last float is 1: it records in
    commits whether the vector is there."""
    parts_W: NDArray[np.int8]
    """(W,) the part of each float of a row: 0 first-order weight, 1 vector, 2 the flag of the vector."""

    def at(self, share: float) -> Self:
        """This optimizer at a share of its rates."""
        settings = self.settings.copy()
        settings[:, RATE] = self.rates * share
        return replace(self, settings=settings)


def _starts(own: RowOptimizer, other: RowOptimizer, num_weights: int) -> list[list[float]]:
    """The state that a part of a new row begins with; one without weights has some keys from the other part."""
    lent = {} if num_weights else {key: getattr(other, key) for key in own.lent}
    return own.model_copy(update=lent).state(num_weights)


def optimizer_of(section: TableSection) -> TableOptimizer:
    """The optimizer of a table's section. Raises SpecError for parts of two kinds, or none."""
    vector, first = section.optimizer, section.first_order_optimizer or section.optimizer
    first_order, dim = int(section.first_order), section.dim
    if first.kind != vector.kind:
        raise SpecError(f"is {first.kind!r}, must be {vector.kind!r} as optimizer is", "first_order_optimizer.kind")
    if not first_order and not dim:
        raise SpecError("is 0 without first_order: a row would hold nothing", "dim")
    first = first.model_copy(update={key: getattr(vector, key) for key in vector.shared})
    settings = np.zeros((2, 6), np.float32)
    for part, own in enumerate((first, vector)):
        numbers = [section.bounds.low, section.bounds.high, *own.numbers()]
        if numbers[RATE : RATE + 1] != [own.lr]:
            raise SpecError(f"is {own.kind!r}, whose numbers() do not begin with lr", "optimizer.kind")
        settings[part, : len(numbers)] = numbers
    start, parts = list[float](), [0] * first_order + [1] * dim
    of_first, of_vector = _starts(first, vector, first_order), _starts(vector, first, dim)
    for one, other in zip(of_first, of_vector, strict=True):
        start += [*one, *other]
        parts += [0] * len(one) + [1] * len(other)
    if extends(section):
        start, parts = [*start, 1.0], [*parts, 2]
    rates, start_state = np.array([first.lr, vector.lr]), np.array(start, np.float32)
    return TableOptimizer(vector.kernels(), settings, rates, start_state, np.array(parts, np.int8))


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """How long the first-order steps of a table with `in_batch` are in one pass (kernels.gather_learning)."""

    rests_G: NDArray[np.bool_]
    """(65536,) by slot group: whether its rows do not learn; empty: all do."""
    rates_C2: F32
    """(C, 2) by class: rate and epsilon of the first-order Adagrad."""


@dataclass(frozen=True)
class RowSettings:
    """The row settings of one table. Classes differ in settings, never in the layout of a row."""

    classes: SlotClasses
    optimizers: tuple[TableOptimizer, ...]
    """Optimizers by class."""
    first_order: int
    """1 if a row has a first-order weight, else 0."""
    num_weights: int
    """D: floats of a row that a model reads."""
    start_W: F32
    """(W,) a new row, except for its vector."""
    spread_G: F32
    """(65536,) by slot group: the factor of a new vector's draws."""
    draw_G: NDArray[np.int8]
    """(65536,) by slot group: how a new vector is drawn, see pserver.rows.initial_values."""
    settings_C: F32
    """(C, 2, 6) settings of optimizers by class."""
    parts_W: NDArray[np.int8]
    """(W,) the part of each float of a row: see TableOptimizer."""
    extends: bool
    """Whether some rows get their vector later."""
    extend_G: F32
    """(65536,) by slot group: the score at which a row gets its vector; minus infinity: at once."""
    absent: np.float32
    """The value that is read for every weight of an absent row."""
    kept: np.float32
    """The share of its weights that a row keeps for each pass since its last push; 1: all."""
    l2: np.float32
    """Its product with the weights is added to gradients; 0: nothing is."""
    share: float = 1.0
    """The share of the rates at which rows learn."""

    @classmethod
    def of(cls, section: TableSection, groups: Mapping[str, int]) -> Self:
        """`groups` are the slot groups of the table's slots, by name. Raises SpecError."""
        classes = classes_of(section, groups)
        optimizers, of_table = tuple(optimizer_of(each) for each in classes.sections), optimizer_of(section)
        num_weights = section.num_weights
        spread_C = np.array([spread_of(each) for each in classes.sections], np.float32)
        draw_C = np.array([DRAWS[each.init] for each in classes.sections], np.int8)
        scores = (each.extend_at for each in classes.sections)
        extend_C = np.array([-np.inf if score is None else score for score in scores], np.float32)
        return cls(
            classes,
            optimizers,
            int(section.first_order),
            num_weights,
            np.concatenate([np.zeros(num_weights, np.float32), of_table.start_state]),
            spread_C[classes.class_G],
            draw_C[classes.class_G],
            np.stack([each.settings for each in optimizers]),
            of_table.parts_W,
            extends(section),
            extend_C[classes.class_G],
            ABSENT_BITS.view(np.float32) if section.learns_default_row else np.float32(0),
            np.float32(1 - section.weight_decay),
            np.float32(section.l2),
        )

    def at(self, share: float) -> Self:
        """These settings, learning at a share of the whole rates."""
        if share == self.share:
            return self
        return replace(self, share=share, optimizers=tuple(each.at(share) for each in self.optimizers))

    def share_after(self, samples: int, versions: int) -> float:
        """The share of the rates after so many samples and versions."""
        schedule = self.classes.sections[0].schedule
        return 1.0 if schedule is None else schedule.share_after(samples, versions)

    def first_steps(self, resting: Collection[int]) -> FirstSteps:
        """At the present rates; `resting`: the slot groups that do not learn."""
        rests_G = np.zeros(len(self.class_G) if resting else 0, np.bool_)
        if resting:
            rests_G[list(resting)] = True
        rates_C2 = np.stack([each.settings[0, RATE : RATE + 2] for each in self.optimizers])
        return FirstSteps(frozen(rests_G), frozen(rates_C2))

    @property
    def class_G(self) -> NDArray[np.uint8]:  # noqa: N802  # a suffix of shape
        """(65536,) class of each slot group."""
        return self.classes.class_G

    def initialise(
        self,
        slab_RW: F32,
        keys_R: NDArray[np.uint64],
        group_R: NDArray[np.uint16],
        begin: int,
        end: int,
        table_seed: np.uint64,
    ) -> None:
        """Write the initial floats of rows begin .. end - 1, including vectors."""
        draws = self.start_W, self.spread_G, self.draw_G, table_seed
        initialise(slab_RW, keys_R, group_R, begin, end, self.first_order, self.num_weights, *draws)
        self.start(slab_RW, group_R, begin, end)

    def start(self, slab_RW: F32, group_R: NDArray[np.uint16], begin: int, end: int) -> None:
        """Set the state of rows begin .. end - 1 as far as it depends on their weights, for rows that begin now."""
        start = self.optimizers[0].kernels.start
        if start is not None:
            start(slab_RW, group_R, begin, end, self.first_order, self.num_weights, self.settings_C, self.class_G)

    def learn(
        self,
        slab_RW: F32,
        rows_U: I32,
        grads_UD: F32,
        group_R: NDArray[np.uint16],
        begin: int,
        end: int,
        passes_U: U32 | None = None,
    ) -> None:
        """Apply gradients begin .. end - 1 to their rows, each with the settings of its class.

        `passes_U`: (U,) passes for which each row owes weight decay; None: there is none.
        """
        if passes_U is not None and self.kept != 1:
            weight_decay.decay(slab_RW, rows_U, passes_U, begin, end, self.num_weights, self.kept)
        if self.l2:
            rows_U, sums_UD = frozen(rows_U[begin:end]), np.empty((end - begin, grads_UD.shape[1]), np.float32)
            weight_decay.add_weights(slab_RW, rows_U, frozen(grads_UD[begin:end]), self.l2, sums_UD)
            grads_UD, begin, end = frozen(sums_UD), 0, end - begin
        if len(self.optimizers) == 1:
            self._apply(self.optimizers[0], slab_RW, rows_U, grads_UD, begin, end)
            return
        rows_U, grads_UD = rows_U[begin:end], grads_UD[begin:end]
        class_U = self.class_G[group_R[rows_U]]
        for number, optimizer in enumerate(self.optimizers):
            mine_M = np.flatnonzero(class_U == number)
            if len(mine_M):
                rows_M, grads_MD = frozen(rows_U[mine_M]), frozen(grads_UD[mine_M])
                self._apply(optimizer, slab_RW, rows_M, grads_MD, 0, len(mine_M))

    def _apply(self, optimizer: TableOptimizer, slab_RW: F32, rows_U: I32, grads_UD: F32, begin: int, end: int) -> None:
        kernels, settings, section = optimizer.kernels, optimizer.settings, self.classes.sections[0]
        if kernels.adapt is not None and (section.schedule is not None or section.weight_decay):
            if not self.share:
                return
            kernels.adapt(slab_RW, rows_U, begin, end, self.first_order, self.num_weights, settings)
        kernels.apply(slab_RW, rows_U, grads_UD, begin, end, self.first_order, settings)
