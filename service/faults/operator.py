"""An operator of a job that is killed repeatedly: each request is repeated under one id until it has acted.

The version at which a request acts depends on timing, so such a run is compared with a rerun of its own log.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Unavailable
from headrace.pserver.protocol.table_operations import SLOT_CHANGES
from headrace.rpc.job_client import JobClient, NotRunning
from headrace.service.spec.job import JobFile
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log import read_history

MAX_REQUESTS = 40
"""Most requests of a run: while there are requests, a stream at its end continues with passes of no events."""
MAX_PAUSE_S = 0.3
"""Longest pause between two requests."""
REPEAT_S = 0.05
"""Pause before a request is repeated."""
CALL_S = 5.0
MAX_SIGN = 300
"""Feature ids to forget are below it."""
RATES = (0.01, 0.02, 0.05)
"""Learning rates to choose from."""


@dataclass
class OperatorRequest:
    """One operation that the operator requests."""

    body: Mapping[str, Any]
    """The operation, with its id."""
    version: int | None = None
    """The version from which on it holds, as the job answered; None: no such answer yet."""
    refused: str = ""
    """Why the job refuses it."""


class FaultRunOperator:
    """One operator with one request at a time."""

    def __init__(self, spec: JobFile, store: Path, seed: int) -> None:
        self.requests: list[OperatorRequest] = []
        self._spec, self._store, self._random = spec, store, Random(seed)
        self._over = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Send requests on a thread while the context lasts."""
        thread = threading.Thread(target=self._work, name="operator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _work(self) -> None:
        while len(self.requests) < MAX_REQUESTS and not self._over.wait(self._random.uniform(0, MAX_PAUSE_S)):
            request = OperatorRequest({**self._draw(), "id": f"request-{len(self.requests):04d}"})
            self.requests.append(request)
            while not self._over.is_set() and request.version is None and not request.refused:
                self._send(request)
                self._over.wait(REPEAT_S)

    def _send(self, request: OperatorRequest) -> None:
        try:
            with JobClient(self._store).rank0() as client:
                answer = client.operate({"do": "ask", "operation": request.body}, Deadline.after(CALL_S))
            request.version = answer["version"]
        except (Unavailable, DeadlineExceeded, NotYet, NotRunning):
            pass
        except HeadraceError as error:
            request.refused = str(error)

    def _draw(self) -> dict[str, Any]:
        random, tables = self._random, sorted(self._spec.tables)
        changes = [each.name for each in SLOT_CHANGES]
        kinds = ["set", "shrink", "forget", *changes, *(["export"] if self._spec.exports else [])]
        slots = [slot.name for slot in Schema.of(self._spec.slots).sparse]
        match random.choice(kinds):
            case "set":
                return {"op": "set", "keys": {f"tables.{random.choice(tables)}.optimizer.lr": random.choice(RATES)}}
            case "shrink":
                return {"op": "shrink", "table": random.choice(tables), "delete_after_days": 1, "allow": True}
            case "forget":
                return {"op": "forget", "slot": random.choice(slots), "sign": random.randrange(MAX_SIGN)}
            case change if change in changes:
                return {"op": change, "slot": random.choice(slots)}
            case _:
                kind = random.choice(["base", None])
                return {"op": "export", "stream": random.choice(sorted(self._spec.exports)), "kind": kind}


def request_violations(requests: list[OperatorRequest], log: Path) -> Iterator[str]:
    """Requests that did not act exactly once, in words. `log`: a folder with every record ever logged."""
    history = read_history(log)
    logged = Counter(
        record.content.id for record in history.operations if isinstance(record.content, log_records.RequestedOperation)
    )
    acted = {
        record.content.id: version
        for version, records in history.operations_by_version().items()
        for record in records
        if isinstance(record.content, log_records.RequestedOperation)
    }
    for request in requests:
        name = request.body["id"]
        most, least = (0, 0) if request.refused else (1, 0 if request.version is None else 1)
        if not least <= logged[name] <= most:
            yield f"{request.body['op']} {name} is logged {logged[name]} times"
        if request.version is not None and acted.get(name) != request.version:
            yield f"{request.body['op']} {name} acted at {acted.get(name)}, not at {request.version}"


def carried_out(requests: list[OperatorRequest]) -> int:
    """The number of requests that have acted."""
    return sum(request.version is not None for request in requests)
