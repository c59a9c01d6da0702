"""Scores of a softmax over many classes: scaled cosines, with a margin for the class that is right.

The right class scores scale * (cos(m1 * angle + m2) - m3): SphereFace (Liu et al., CVPR 2017) has m1, ArcFace (Deng et
al., CVPR 2019) m2, CosFace (Wang et al., CVPR 2018) m3.

Shapes: T samples, N classes, V length of a vector, P samples whose class is among the N.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

ALMOST_ONE = 1 - 1e-6
"""Cosines of larger size have no gradient through the angle, which would be infinite at 1."""


@dataclass(frozen=True, slots=True)
class Margins:
    """Scale and margins of the scores."""

    scale: float
    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    def of_target(self, cosine: Tensor) -> Tensor:
        """The scores of right classes by their cosines."""
        if self.m1 != 1 or self.m2:
            cosine = torch.cos(self.m1 * torch.acos(cosine.clamp(-ALMOST_ONE, ALMOST_ONE)) + self.m2)
        return self.scale * (cosine - self.m3)


def cosines(user_TV: Tensor, row_NV: Tensor) -> Tensor:
    """(T, N) cosines of vectors of length 1 with rows of any length."""
    return user_TV @ functional.normalize(row_NV, dim=1).t()


def scores(user_TV: Tensor, row_NV: Tensor, target: tuple[Tensor, Tensor], margins: Margins) -> Tensor:
    """(T, N) scores. `target`: (P,) samples and (P,) the columns of their classes."""
    cosine_TN = cosines(user_TV, row_NV)
    return (margins.scale * cosine_TN).index_put(target, margins.of_target(cosine_TN[target]))
