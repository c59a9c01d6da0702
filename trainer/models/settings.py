"""Settings of Millrace's own models: the keys of [model.settings].

This module does not import torch, so that a spec is checked without it. Each model is a file beside this one.
"""

from typing import Annotated, Literal

from pydantic import Field

from millrace.config import Section

Width = Annotated[int, Field(ge=1, le=65_536)]
Hidden = Annotated[tuple[Width, ...], Field(max_length=64)]
Layers = Annotated[int, Field(ge=1, le=64)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class LrSettings(Section):
    """lr has none."""


class FmSettings(Section):
    """fm has none."""


class DeepSettings(Section):
    """Settings of every model with a multi-layer perceptron."""

    hidden: Hidden = (128, 64)
    """Widths of the layers, each followed by ReLU."""
    dropout: Dropout = 0.0
    """Share of each layer's outputs that is dropped in training, also in the predictions before learning."""
    towers: Hidden = ()
    """Widths of each task's own layers, on top of the shared ones."""


class WideDeepSettings(DeepSettings):
    """wide_deep."""


class DeepFmSettings(DeepSettings):
    """deepfm."""


class DeepCrossingSettings(DeepSettings):
    """deep_crossing."""

    hidden: Hidden = (128, 128)
    """Inner widths of the residual units, one unit each."""


class DcnSettings(DeepSettings):
    """dcn."""

    cross_layers: Layers = 2
    """Number of cross layers: the highest degree of interactions minus one."""


class DcnV2Settings(DcnSettings):
    """dcn_v2."""

    low_rank: Width | None = None
    """Rank of each cross layer's matrix; full unless set."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """"parallel": cross and deep part side by side; "stacked": the deep part reads the output of the cross part."""


class DlrmSettings(DeepSettings):
    """dlrm."""

    bottom: Hidden = (64,)
    """Widths of the layers for dense values, without the last one, which has the length of the vectors."""
