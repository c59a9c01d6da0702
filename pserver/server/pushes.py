"""Batches that ranks read from a shard in a step, and the gradients that they push for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.protocol.parts import WHOLE, Part
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.rows.table_rows import I32


@dataclass(frozen=True, slots=True)
class ResolvedBatch:
    """A batch with the row numbers of its keys on this shard, kept until its push."""

    learn: bool
    rows: Mapping[str, I32]
    """(U,) row numbers by table, valid until they are released. In a batch that is only predicted, and in tables with
    admission, a key without a row has EMPTY."""
    keys: Mapping[str, Keys]
    """By table in which an earlier step, of any rank, may still create a row."""
    known: dict[str, I32] = field(default_factory=dict)
    """Row numbers in tables with admission, as they were when the batch was pulled."""
    admitted: dict[str, int] = field(default_factory=dict)
    """Keys admitted to these tables until then."""


NONE_SENT: Mapping[str, NDArray[np.bool_]] = MappingProxyType({})
"""No row is left out of an answer."""


@dataclass(frozen=True, slots=True)
class Push:
    """The push of one rank in a step."""

    batch: ResolvedBatch
    gradients: Mapping[str, Gradients]
    batch_samples: int
    """Samples of all ranks in the step."""
    part: Part = WHOLE
    """The rows that it has."""

    def copied(self) -> "Push":
        """The same push in arrays of its own."""
        return replace(self, gradients={name: push.copied() for name, push in self.gradients.items()})


def as_one_step(pushes: Sequence[Push]) -> Sequence[Push]:
    """Pushes whose gradients are means over the samples of each, as parts of one step over the samples of all."""
    total = sum(push.batch_samples for push in pushes)
    if len(pushes) < 2:
        return pushes
    return [replace(push, batch_samples=total, gradients=_scaled(push, total)) for push in pushes]


def _scaled(push: Push, total: int) -> dict[str, Gradients]:
    share = np.float32(push.batch_samples / total)
    return {name: replace(each, grads_UD=each.grads_UD * share) for name, each in push.gradients.items()}
