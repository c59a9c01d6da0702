"""What a changed job file means for a job that goes on: what may change at once, what only between passes, what never.

Pure. The spec in force is what the log says; a new one is logged as an operation before it acts.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import SpecError

AT_ONCE = (
    "commit",
    "store",
    "cluster.shards",
    "cluster.max_restarts",
    "cluster.restart_window",
    "cluster.max_message",
    "pipe.dead_letters",
    "pipe.processes",
    "train.step_deadline",
    "train.prefetch_batches",
    "train.on_nonfinite",
    "passes.max_outage",
)
"""Sections and keys that have no part in what a pass gives."""
NEVER = ("name", "seed", "slots")
"""What rows and their keys are made with."""
NEVER_OF_TABLES = ("dim", "first_order", "optimizer.kind", "optimizer.per")
"""What a row is made of."""


def flat(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value of a spec by the path of its key, as text; lists are values."""
    for name, value in spec.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}.")
        else:
            yield path, json.dumps(value, default=str, sort_keys=True)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys that are not alike in two specs."""
    before, after = dict(flat(old)), dict(flat(new))
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def significant(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Those that change what a pass gives, and so act between passes only.

    Raises SpecError for one that rows made so far do not survive.
    """
    keys = [key for key in changed(old, new) if not _below(key, AT_ONCE)]
    for key in keys:
        table = key.split(".", 2)[2] if key.startswith("tables.") and key.count(".") > 1 else ""
        if _below(key, NEVER) or _below(table, NEVER_OF_TABLES):
            raise SpecError(
                "cannot change while the store holds rows made with its old value; put it back, "
                "choose another store.path, or start over with --fresh",
                key,
            )
    return keys


def _below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
