"""Sums over ranks that begin when the gradient is complete: in a step it is prepared once."""

from abc import ABC, abstractmethod

from torch import Tensor


class CompleteSums(ABC):
    """The part of GradientSums that such sums share."""

    checks = True

    def __init__(self, gradient: Tensor) -> None:
        """`gradient`: the flat one."""
        self._gradient = gradient
        self._loss_scale = 1.0
        self._finite: bool | None = None

    @abstractmethod
    def _prepare(self) -> bool:
        """Change the gradient, which has no loss scale any more, to what is summed. Whether it can be summed."""

    def clear(self) -> None:
        self._loss_scale, self._finite = 1.0, None

    def fills(self, loss_scale: float) -> None:
        """Nothing is sent before the gradient is complete."""
        self._loss_scale = loss_scale

    def finite(self) -> bool:
        if self._finite is None:
            if self._loss_scale != 1:
                self._gradient.div_(self._loss_scale)
            self._finite = self._prepare()
        return self._finite

    def begin(self, loss_scale: float) -> None:
        """The gradient is prepared, if it is not yet."""
        self._loss_scale = loss_scale
        self.finite()
