"""The section `train.loss_scale` of a job spec: the scale of the loss with float16.

trainer.train.mixed_precision follows it.
"""

from typing import Annotated

from pydantic import Field, model_validator

from headrace.config import PositiveCount, Section

MAX_LOSS_SCALE = 2.0**100
"""Largest scale of the loss."""


class LossScaleSection(Section):
    """The scale of the loss with `amp = "float16"`, as of torch.amp.GradScaler."""

    initial: Annotated[float, Field(ge=1, le=MAX_LOSS_SCALE)] = 65536.0
    """Scale at the start."""
    growth: Annotated[float, Field(gt=1, le=65536)] = 2.0
    """Factor of the scale"""
    growth_every: PositiveCount = 2000
    """after so many steps without overflow, one after the other."""
    decrease: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor of the scale, which is never below 1,"""
    decrease_every: PositiveCount = 1
    """after so many overflows, one after the other."""
    dynamic: bool = True
    """False: the scale stays `initial`. It is not lowered after an overflow, which train.on_nonfinite then decides."""

    @model_validator(mode="after")
    def _constant(self) -> "LossScaleSection":
        for key in () if self.dynamic else ("growth", "growth_every", "decrease", "decrease_every"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"dynamic = false keeps the scale, and {key} changes it: remove one")
        return self
