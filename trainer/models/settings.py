"""Settings of Millrace's own models: what may stand in [model.settings].

No torch here, so that a spec is checked without it. The models themselves are one file each beside this one.
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
    """What every model with a multi-layer perceptron takes."""

    hidden: Hidden = (128, 64)
    """Widths of the layers, each followed by ReLU."""
    dropout: Dropout = 0.0
    """Share of each layer's outputs dropped while training; predictions taken before learning see it too."""
    towers: Hidden = ()
    """Widths of layers that each task has for itself, on top of the shared ones."""


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
    """Number of cross layers: the highest degree of interactions less one."""


class DcnV2Settings(DcnSettings):
    """dcn_v2."""

    low_rank: Width | None = None
    """Rank of each cross layer's matrix; full unless set."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """"parallel": cross and deep part side by side; "stacked": the deep part reads what the cross part gives."""


class DlrmSettings(DeepSettings):
    """dlrm."""

    bottom: Hidden = (64,)
    """Widths of the layers that dense values pass before they meet the vectors, less the last: the vectors' length."""
