"""Gives samples the values of other samples in some slots: what the metrics then lose is what those slots are worth.

Shapes: B samples.
"""

from collections.abc import Sequence

import numpy as np

from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.seeds import derive
from headrace.validation import nearest


def check_shuffled(schema: Schema, names: Sequence[str]) -> None:
    """Raise SpecError unless each name is that of a sparse or dense slot."""
    known = [slot.name for slot in schema.slots if slot.kind is not SlotKind.META]
    for name in names:
        if name not in known:
            raise SpecError(f"{name!r} is no slot that the model gets; {nearest(name, known)}", "shuffle")


def shuffled(samples: Samples, names: Sequence[str], seed: int) -> Samples:
    """The samples, with the values of each slot of `names` among them moved to others.

    A function of its arguments alone. Each slot has a permutation of its own, so slots also lose what links them.
    """
    if not names:
        return samples
    sparse, dense = dict(samples.sparse), dict(samples.dense)
    for name in names:
        order_B = np.random.default_rng(derive(seed, "shuffle", name)).permutation(len(samples))
        if name in dense:
            dense[name] = dense[name][order_B]
        else:
            sparse[name] = sparse[name].take(order_B)
    return Samples(sparse, dense, samples.meta, samples.event_B, samples.time_s_B)
