"""The client of a running job: it finds rank 0 through the job's store, and asks it for status, answers and operations.

The address of rank 0 and the secret of its generation are private files in the store: who can read them may ask. Both
change when the job restarts, so `poll` looks for them again and continues until its deadline. What a request means is
trainer.rank0.operations' matter.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace import documents
from headrace.deadline import Deadline
from headrace.durable import is_locked
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Unavailable
from headrace.identity import FOLDER
from headrace.identity.authority import open_authority
from headrace.identity.peers import PeerName, PeerRole
from headrace.rpc.channels import TlsPeer
from headrace.rpc.role import RoleClient
from headrace.rpc.run_files import LOCK, RANK0, WORKERS

CALL_S = 5.0
"""Longest time for one call that rank 0 answers from memory."""
ANSWER_S, MIN_ANSWER_S = 30.0, 0.5
"""Longest time for one answer that needs the shards; and the shortest time left for it near the caller's deadline."""
RETRY_S = 0.1
"""Pause between two tries."""
_LOGGED = "it is logged, and acts at the close of a pass"

T = TypeVar("T")


class NotRunning(HeadraceError):
    """The job does not run, so there is no rank 0."""

    def __init__(self, store: Path) -> None:
        super().__init__(
            f"no run is active in {store}; what the last run learned is committed or in the log, and `headrace run` "
            "continues from there"
        )


class Unfinished(HeadraceError):
    """The deadline passed, or the run ended, before an operation acted."""


@dataclass(frozen=True, slots=True)
class JobClient:
    """The job that runs in `store`. Any thread may call."""

    store: Path

    @contextmanager
    def rank0(self) -> Iterator[RoleClient]:
        """A client of rank 0 of the newest generation. Raises NotRunning; Unavailable between two generations."""
        if not is_locked(self.store / LOCK):
            raise NotRunning(self.store)
        folders = [path.parent for path in (self.store / WORKERS).glob(f"g*/{RANK0}")]
        newest = max(folders, key=lambda path: int(path.name[1:]), default=None)
        try:
            found = None if newest is None else documents.read_object(newest / RANK0)
        except FileNotFoundError:
            found = None
        if newest is None or found is None:
            raise Unavailable(f"rank 0 of the run in {self.store} is starting; try again soon")
        client = RoleClient(found["address"], found["secret"], self._peer(found.get("name")))
        try:
            yield client
        finally:
            client.close()

    def _peer(self, name: str | None) -> TlsPeer | None:
        """Rank 0 by its name, and the credentials of a head of its generation; None where it needs none."""
        if name is None:
            return None
        rank0 = PeerName.parse(name)
        authority = open_authority(self.store / FOLDER, rank0.job)
        return TlsPeer(authority.credentials(authority.name(rank0.generation, PeerRole.HEAD, 0)), rank0)

    def poll(
        self, ask: Callable[[RoleClient], T | None], deadline: Deadline, late: Callable[[str], HeadraceError]
    ) -> T:
        """Call `ask` until it returns something, and return that. A restarted rank 0 is asked again.

        At the deadline raises `late(reason)`; the reason is the last failure of a call, or empty. Raises NotRunning,
        and what `ask` raises, except Unavailable, DeadlineExceeded and NotYet.
        """
        reason = ""
        while True:
            try:
                with self.rank0() as client:
                    while (found := ask(client)) is None:
                        _pause(deadline, reason, late)
                    return found
            except (Unavailable, DeadlineExceeded, NotYet) as error:
                reason = str(error)
            _pause(deadline, reason, late)

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """The status that rank 0 reports. Raises NotRunning, Unfinished."""
        return self.poll(lambda client: client.status(Deadline.after(CALL_S)), deadline, _unanswered)

    def answer(self, request: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The answer to a request that changes nothing. Raises NotRunning, Unfinished, and the refusal of rank 0."""
        return self.poll(lambda client: client.operate(request, _within(deadline)), deadline, _unanswered)

    def carry_out(self, operation: Mapping[str, Any], deadline: Deadline) -> int:
        """Have `operation` logged and wait until it acts; return the first version it holds for.

        The operation gets an id, so a second request for it has no effect. Raises NotRunning where it was never sent,
        Unfinished, and the refusal of rank 0.
        """
        request = {"do": "ask", "operation": {**operation, "id": uuid.uuid4().hex}}
        sent = logged = False

        def ask(client: RoleClient) -> int | None:
            nonlocal sent, logged
            sent = True
            reply = client.operate(request, _within(deadline))
            version, logged = reply["version"], reply.get("logged", True)
            if version is None or client.status(Deadline.after(CALL_S))["version"] < version:
                return None
            return int(version)

        def late(reason: str) -> HeadraceError:
            if logged:
                return Unfinished(f"{_LOGGED} that is still open; the status shows when it has acted")
            return _unanswered(reason)

        try:
            return self.poll(ask, deadline, late)
        except NotRunning:
            if logged:
                raise Unfinished(f"{_LOGGED}; the run has ended, and the next run carries it out") from None
            if sent:
                raise Unfinished(f"the run ended without an answer: `headrace log` shows whether {_LOGGED}") from None
            raise


def _unanswered(reason: str) -> HeadraceError:
    return Unfinished(f"no answer in time: {reason}")


def _pause(deadline: Deadline, reason: str, late: Callable[[str], HeadraceError]) -> None:
    if deadline.passed():
        raise late(reason)
    time.sleep(RETRY_S)


def _within(deadline: Deadline) -> Deadline:
    return Deadline.after(max(MIN_ANSWER_S, min(ANSWER_S, deadline.left_s())))
