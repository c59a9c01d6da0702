"""Weights for impressions that are learnt as negatives at once, and again as positives when their click comes.

Shapes: B samples of the batch.
"""

import torch
from torch import Tensor

from headrace.dataset.spec.join_section import JoinSection, LearnAt


def label_learnt_at_once(join: JoinSection | None) -> str | None:
    """The label whose negatives are learnt before it is known; None if there is none."""
    return join.label if join is not None and join.learn is LearnAt.AT_ONCE else None


def fake_negative_weights(output_B: Tensor, label_B: Tensor) -> Tensor:
    """(B,) the fake negative weights of Ktena et al., "Addressing delayed feedback for continuous training with neural
    networks in CTR prediction" (RecSys 2019).

    Every impression is learnt once as a negative, and a clicked one again as a positive. So of the samples of an
    impression with click probability p, 1 / (1 + p) are negatives and p / (1 + p) positives. Importance sampling back
    to the true shares gives a positive the weight 1 + p, and a negative (1 - p) (1 + p). With the model's own p, which
    no gradient passes, the expected gradient of the log loss is 0 where the model has the true p: its predictions need
    no calibration afterwards. `output_B` are logits.
    """
    p_B = torch.sigmoid(output_B.detach())
    return torch.where(label_B > 0, 1 + p_B, (1 - p_B) * (1 + p_B))
