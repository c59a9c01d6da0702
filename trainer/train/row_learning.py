"""Row optimizers in torch operations, for rows on a device: the twins of pserver.row_optimizer_kernels.

Each function takes whole rows and returns whole rows. It makes the operations of its kernel one by one, in the kernel's
order: + - * / and square root are rounded alike on a CPU and on a GPU, and torch fuses none of them here. So all of
them have the kernels' bits on a CPU; tests/unit/test_row_learning.py compares them. Rows of one step are unique, so no
sum depends on an order but those below, which are made in the order of the kernels.

On a GPU torch divides by a number, and divides a number, through an inverse: divisors and dividends are tensors here.

Shapes: U rows of a step, D weights of a row, W floats of a row; R numbers of an optimizer (low, high, rate and others).
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Numbers:
    """The numbers of a table's optimizers for the rows of a step: (1 or U, D) columns, one number for each weight."""

    def __init__(self, numbers_C2R: Tensor, class_U: Tensor | None, first_order: int, num_weights: int) -> None:
        """`numbers_C2R`: by class and part. `class_U`: the class of each row; None: all have the first."""
        self._numbers = numbers_C2R[:1] if class_U is None else numbers_C2R.index_select(0, class_U)
        self._first_order, self._num_weights = first_order, num_weights

    def of_weights(self, place: int) -> Tensor:
        """(1 or U, D) the number at this place, for each weight that of its part."""
        return self.spread(self.of_part(0, place), self.of_part(1, place))

    def of_part(self, part: int, place: int) -> Tensor:
        """(1 or U, 1) the number at this place of the first-order weight (0) or the vector (1)."""
        return self._numbers[:, part, place : place + 1]

    def spread(self, first: Tensor, vector: Tensor) -> Tensor:
        """(., D) columns out of one for the first-order weight, if there is one, and one for the vector."""
        columns = [first] * self._first_order
        return torch.cat([*columns, vector.expand(-1, self._num_weights - self._first_order)], 1)

    def bounded(self, weights_UD: Tensor) -> Tensor:
        """The weights within their bounds."""
        return torch.minimum(torch.maximum(weights_UD, self.of_weights(0)), self.of_weights(1))

    @property
    def first_order(self) -> int:
        """1 if a row has a first-order weight, else 0."""
        return self._first_order


Learner = Callable[[Tensor, Tensor, Numbers], Tensor]
"""(U, W) rows after a step, of rows and (U, D) gradients."""


def sgd(rows_UW: Tensor, grads_UD: Tensor, numbers: Numbers) -> Tensor:
    """Gradient descent."""
    return numbers.bounded(rows_UW - numbers.of_weights(2) * grads_UD)


def momentum(rows_UW: Tensor, grads_UD: Tensor, numbers: Numbers) -> Tensor:
    """Gradient descent with momentum."""
    weights, before = torch.split(rows_UW, grads_UD.shape[1], 1)
    moved = numbers.of_weights(3) * before + grads_UD
    return torch.cat([numbers.bounded(weights - numbers.of_weights(2) * moved), moved], 1)


def adagrad_element(rows_UW: Tensor, grads_UD: Tensor, numbers: Numbers) -> Tensor:
    """Adagrad with a sum for each element."""
    weights, before = torch.split(rows_UW, grads_UD.shape[1], 1)
    total = before + grads_UD * grads_UD
    moves = numbers.of_weights(2) * grads_UD / (root(total) + numbers.of_weights(3))
    return torch.cat([numbers.bounded(weights - moves), total], 1)


def adagrad_row(rows_UW: Tensor, grads_UD: Tensor, numbers: Numbers) -> Tensor:
    """Adagrad with one sum for the first-order weight and one for the vector."""
    num_weights, first = grads_UD.shape[1], numbers.first_order
    weights, before = rows_UW[:, :num_weights], rows_UW[:, num_weights:]
    squares_DU = (grads_UD * grads_UD).t().contiguous()
    totals, rates = list[Tensor](), list[Tensor]()
    for part, (begin, end) in enumerate(((0, first), (first, num_weights))):
        total = before[:, part : part + 1]
        if begin < end:
            count = torch.full((), float(end - begin), device=rows_UW.device)
            total = total + (_in_order(squares_DU[begin:end]) / count)[:, None]
        totals.append(total)
        rates.append(numbers.of_part(part, 2) / (root(total) + numbers.of_part(part, 3)))
    moves = numbers.spread(*rates) * grads_UD
    return torch.cat([numbers.bounded(weights - moves), *totals], 1)


def adam(rows_UW: Tensor, grads_UD: Tensor, numbers: Numbers) -> Tensor:
    """Adam, with steps counted by row."""
    num_weights, one = grads_UD.shape[1], torch.ones((), device=rows_UW.device)
    weights, first_before, second_before, powers = torch.split(rows_UW, [num_weights] * 3 + [4], 1)
    beta1, beta2 = numbers.of_weights(3), numbers.of_weights(4)
    after = powers * torch.cat([numbers.of_part(part, place) for part in (0, 1) for place in (3, 4)], 1)
    if not numbers.first_order:
        after = torch.cat([powers[:, :2], after[:, 2:]], 1)
    rest1, rest2 = (one - numbers.spread(after[:, k : k + 1], after[:, 2 + k : 3 + k]) for k in (0, 1))
    first = beta1 * first_before + (one - beta1) * grads_UD
    second = beta2 * second_before + (one - beta2) * grads_UD * grads_UD
    moves = numbers.of_weights(2) * (first / rest1) / (root(second / rest2) + numbers.of_weights(5))
    return torch.cat([numbers.bounded(weights - moves), first, second, after], 1)


def root(values: Tensor) -> Tensor:
    """The square roots, rounded to nearest: on a CPU torch's own may be off by one bit in float32, not in float64."""
    return values.double().sqrt().float() if values.device.type == "cpu" else torch.sqrt(values)


def _in_order(values_EU: Tensor) -> Tensor:
    """(U,) sums of columns, from the first row to the last; torch.sum adds in an order of its own."""
    total = values_EU[0].clone()
    for values_U in values_EU[1:]:
        total += values_U
    return total


def by_show(grads_UD: Tensor, show_U: Tensor, batch_samples: int) -> Tensor:
    """The twin of pserver.rows.kernels.scale_by_show."""
    samples, one = torch.full((), float(batch_samples), device=show_U.device), torch.ones((), device=show_U.device)
    return grads_UD * torch.where(show_U > 0, samples / show_U, one)[:, None]


def clipped(grads_UD: Tensor, most: float) -> Tensor:
    """The twin of pserver.rows.kernels.clip_rows."""
    longest = torch.full((), most, dtype=torch.float64, device=grads_UD.device)
    wide_UD = grads_UD.double()
    squares_U = _in_order((wide_UD * wide_UD).t().contiguous())
    scaled_UD = (wide_UD * (longest / torch.sqrt(squares_U))[:, None]).float()
    return torch.where((squares_U <= longest * longest)[:, None], grads_UD, scaled_UD)


LEARNERS: dict[str, Learner] = {
    "sgd": sgd,
    "momentum": momentum,
    "adagrad_row": adagrad_row,
    "adagrad_element": adagrad_element,
    "adam": adam,
}
"""By `on_device` of an optimizer (pserver.row_optimizers)."""
