"""The choice of a consistency policy by its name in the job file: the only place that knows all policies."""

from collections.abc import Callable

from millrace.errors import SpecError
from pserver.consistency.asynchronous import Async
from pserver.consistency.policy import Consistency
from pserver.consistency.sync import Sync

POLICIES: dict[str, Callable[[int], Consistency]] = {Sync.name: Sync, Async.name: Async}
"""By `train.mode`: makes the policy with a staleness."""


def policy_of(mode: str, staleness: int = 0) -> Consistency:
    """The policy of `train.mode` and `train.staleness`. Raises SpecError for a mode that is not built, and names those
    that are."""
    if mode not in POLICIES:
        raise SpecError(f'there is no mode "{mode}"; known: {", ".join(sorted(POLICIES))}', "train.mode")
    return POLICIES[mode](staleness)
