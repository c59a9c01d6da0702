"""The choice of a consistency policy by its name in the job file: the only place that knows all policies."""

from collections.abc import Callable

from headrace.errors import SpecError
from headrace.pserver.config import MergeSection
from headrace.pserver.consistency.asynchronous import Async
from headrace.pserver.consistency.geo import Geo
from headrace.pserver.consistency.policy import Consistency
from headrace.pserver.consistency.sync import Sync

POLICIES: dict[str, Callable[[int, MergeSection], Consistency]] = {
    Sync.name: lambda staleness, _merge: Sync(staleness),
    Async.name: lambda _staleness, merge: Async(merge),
    Geo.name: lambda _staleness, merge: Geo(merge),
}
"""By `train.mode`: makes the policy with the settings of that mode among those given."""


def policy_of(mode: str, staleness: int = 0, merge: MergeSection | None = None) -> Consistency:
    """The policy of `train.mode`, with `train.staleness` and `train.merge`. Raises SpecError for a mode that is not
    built, and names those that are."""
    if mode not in POLICIES:
        raise SpecError(f'there is no mode "{mode}"; known: {", ".join(sorted(POLICIES))}', "train.mode")
    return POLICIES[mode](staleness, merge or MergeSection())
