"""Merges the changes of several versions of one table: of each key the newest counts.

Pure. Different shards have different keys, so the changes of each shard are merged separately.

Shapes: U keys of a part, S keys seen in newer parts.
"""

from collections.abc import Sequence

import numpy as np

from headrace.keys import are_among, unique_keys
from headrace.pserver.feed.table_changes import PresentRows, TableDelta
from headrace.trainer.replica.updates import U64, ReplicaRows, TableUpdate

NONE = np.empty(0, np.uint64)


def merge_steps(steps: Sequence[Sequence[TableDelta]], *, whole: bool) -> TableUpdate:
    """Merge one shard's steps, oldest first, each in parts. Within a step a row overrides a deletion of its key.

    The last part of a step that has a key counts. `whole`: the replica has no earlier rows, so no deletions are needed.
    """
    rows: list[list[ReplicaRows]] = []
    gone: list[U64] = [NONE]
    seen_S = NONE
    for number, step in reversed(list(enumerate(steps))):
        rows.append([_without(part.rows, seen_S) for part in step])
        if whole and not number:
            break  # the base, which is large: nothing is older
        keys_U = unique_keys(seen_S, *(part.rows.keys_P for part in step))
        gone_U = unique_keys(NONE, *(part.gone_U for part in step))
        gone.append(gone_U[~are_among(gone_U, keys_U)])
        seen_S = unique_keys(keys_U, gone_U)
    kept = tuple(each for step in reversed(rows) for each in step if len(each.keys_U))
    return TableUpdate(kept, NONE if whole else np.concatenate(gone))


def _without(present: PresentRows, seen_S: U64) -> ReplicaRows:
    """Rows of keys that are not among `seen_S`."""
    if not len(seen_S):
        return ReplicaRows(present.keys_P, present.group_P, present.rows_PD)
    fresh_U = ~are_among(present.keys_P, seen_S)
    return ReplicaRows(present.keys_P[fresh_U], present.group_P[fresh_U], present.rows_PD[fresh_U])
