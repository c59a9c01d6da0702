"""A linear model of vectors and dense values: its section, which needs no torch."""

from typing import TYPE_CHECKING

from pydantic import Field

from headrace.trainer.models.contract import Shape
from headrace.trainer.models.settings import ModelSettings, some_values

if TYPE_CHECKING:
    from torch import nn


class ScaledSettings(ModelSettings):
    """scaled."""

    needs = (some_values,)
    scale: float = Field(default=1.0, gt=0, le=10)
    """Factor of the logits."""

    def build(self, shape: Shape) -> "nn.Module":
        from outside_kinds.module import Scaled

        return Scaled(shape, self)
