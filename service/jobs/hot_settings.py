"""Changes hot settings of a running job, as `headrace set` does: an operation that ends when they take effect."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.rpc.job_client import JobClient
from headrace.service.jobs.operation_queue import Operation, OperationQueue, ReportProgress, UntilCancelled

CHANGE_S = 600.0
"""How long to wait for the close of a pass."""


def change(
    work: OperationQueue, job: str, store: Path, keys: Mapping[str, Any], who: str, changed: Callable[[], object]
) -> Operation:
    """Start the operation that sets `keys`; `changed` is called when they take effect.

    Its result has the `version` from which on they count.
    """

    def act(progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
        progress(None, "waiting for the next close")
        operation = {"op": "set", "keys": dict(keys)}
        version = JobClient(store).carry_out(operation, UntilCancelled.within(CHANGE_S, cancelled))
        changed()
        return {"version": version, "keys": dict(keys)}

    return work.start("set", job, who, act)
