"""The choice of a consistency policy by its name in the job file: the only place that knows all policies."""

from millrace.errors import SpecError
from pserver.consistency.policy import Consistency
from pserver.consistency.sync import Sync

POLICIES: dict[str, Consistency] = {policy.name: policy for policy in (Sync(),)}


def policy_of(mode: str) -> Consistency:
    """The policy of `train.mode`. Raises SpecError for a mode that is not built, and names those that are."""
    if mode not in POLICIES:
        raise SpecError(f'there is no mode "{mode}"; known: {", ".join(sorted(POLICIES))}', "train.mode")
    return POLICIES[mode]
