"""The choice of kernels for matrix products: rank 0 measures them when a job is first made, and logs a table.

The table is a fact of the job: every restart, replay and rerun reads it from the log or the commit. It is made
anew only where the setting or the environment differs, and then holds for new passes. trainer.models.linear applies it.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.codec import plain, typed
from headrace.trainer.collectives.ranks import Ranks, on_rank_0
from headrace.trainer.config import TrainSection
from headrace.trainer.journal.records import MatmulOperation
from headrace.trainer.models.linear import (
    NO_TABLE,
    Kernel,
    KernelTable,
    ProductKernels,
    Size,
    forward_product,
    input_gradient,
    onednn_works,
    sizes_of,
    table_message,
    table_of,
    use_table,
    weight_gradient,
)
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.train.device import completed

MARGIN = 0.9
"""oneDNN is chosen where it takes less than this share of MKL's time."""
MIN_MULTIPLICATIONS = 1 << 23
"""Smaller products are not measured and have MKL: the gain would be some microseconds."""
MAX_MULTIPLICATIONS = 1_500_000_000
"""Multiplications of one call of all measured sizes together; above, fewer samples than `batch_size` are taken."""
MIN_SAMPLES = 64
"""Fewest samples of a measurement."""
TRIES = 5
"""Timed calls of each kernel for each product, after one that is not timed. The quickest one counts."""

KernelMessage = Mapping[str, Mapping[str, str]]
"""A table as JSON (trainer.models.linear.table_message)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelSchedule:
    """The tables of a job: each holds from its pass up to the pass of the next one."""

    logged: Sequence[tuple[int, MatmulOperation]] = ()

    def operation(self, number: int) -> MatmulOperation | None:
        """The record that holds for pass `number`; None: MKL everywhere."""
        return next((operation for first, operation in reversed(self.logged) if first <= number), None)

    def use(self, model: nn.Module, number: int) -> None:
        """Have the model follow the table of pass `number`."""
        operation = self.operation(number)
        use_table(model, NO_TABLE if operation is None else table_of(operation.kernels))

    def saved(self, version: int) -> dict[str, Any] | None:
        """The part of a commit of `version`, as JSON."""
        operation = self.operation(version)
        return None if operation is None else plain(operation)


def agreed_schedule(
    ranks: Ranks,
    beginning: RestartPoint | None,
    model: nn.Module,
    train: TrainSection,
    environment: Mapping[str, str],
    handed: KernelMessage | None,
    *,
    logged_only: bool,
) -> KernelSchedule:
    """The same schedule on all ranks. Rank 0, which has a `beginning`, logs a new table if one is due.

    `handed`: the table of another job, in place of a measurement. `logged_only`: only logged passes will be trained.
    """

    def entries() -> Any:
        assert beginning is not None, "rank 0"
        found = list(beginning.matmuls)
        if not logged_only and beginning.joblog is not None and is_due(beginning, train.matmul, environment):
            table = _new_table(model, train, beginning, handed)
            operation = MatmulOperation(setting=train.matmul, kernels=table, fingerprint=environment)
            beginning.joblog.append(operation)
            found.append((beginning.closed + 1, operation))
        return plain(found)

    found = on_rank_0(ranks, entries)
    message = ranks.broadcast({"matmuls": found} if ranks.rank == 0 else None)
    return KernelSchedule(typed(list[tuple[int, MatmulOperation]], message["matmuls"], "the kernels of rank 0"))


def is_due(beginning: RestartPoint, setting: str, environment: Mapping[str, str]) -> bool:
    """Whether the job needs a new table. One that was begun without a table goes on with MKL."""
    if not beginning.matmuls:
        return setting == "onednn" or not beginning.closed
    _, last = beginning.matmuls[-1]
    return last.setting != setting or (
        setting == "measured" and completed(last.fingerprint, environment) != dict(environment)
    )


def _new_table(
    model: nn.Module, train: TrainSection, beginning: RestartPoint, handed: KernelMessage | None
) -> KernelMessage:
    if handed is not None and not beginning.matmuls:
        return handed
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if train.matmul == "mkl" or train.amp != "off" or not on_cpu or not onednn_works():
        return {}
    sizes = sizes_of(model)
    if train.matmul == "onednn":
        return table_message(dict.fromkeys(sizes, ProductKernels(*[Kernel.ONEDNN] * 3)))
    begin_s = time.perf_counter()
    table = measured_table(sizes, train.batch_size)
    if table:
        log.info("measured the matrix products of %d sizes in %.2f s", len(table), time.perf_counter() - begin_s)
    return table_message(table)


def measured_table(sizes: Sequence[Size], batch_size: int) -> KernelTable:
    """The quicker kernel of each product, for all sizes that are large enough."""
    large = [size for size in sizes if batch_size * size[0] * size[1] >= MIN_MULTIPLICATIONS]
    most = MAX_MULTIPLICATIONS // max(1, sum(inputs * outputs for inputs, outputs in large))
    num_samples = min(batch_size, max(MIN_SAMPLES, most))
    return {size: _measured(size, num_samples) for size in large}


def _measured(size: Size, num_samples: int) -> ProductKernels:
    inputs, outputs = size
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x_BI, weight_OI, bias_O, grad_BO = (
        draw(num_samples, inputs),
        draw(outputs, inputs),
        draw(outputs),
        draw(num_samples, outputs),
    )
    return ProductKernels(
        forward=quicker(lambda kernel: forward_product(kernel, x_BI, weight_OI, bias_O)),
        input_gradient=quicker(lambda kernel: input_gradient(kernel, grad_BO, weight_OI)),
        weight_gradient=quicker(lambda kernel: weight_gradient(kernel, grad_BO, x_BI)),
    )


def quicker(product: Callable[[Kernel], Tensor], clock: Callable[[], float] = time.perf_counter) -> Kernel:
    """The kernel that computes `product` in less time: MKL unless oneDNN is clearly quicker."""
    least_s = dict.fromkeys(Kernel, math.inf)
    for number in range(1 + TRIES):
        for kernel in Kernel:
            begin_s = clock()
            product(kernel)
            if number:
                least_s[kernel] = min(least_s[kernel], clock() - begin_s)
    return Kernel.ONEDNN if least_s[Kernel.ONEDNN] < MARGIN * least_s[Kernel.MKL] else Kernel.MKL
