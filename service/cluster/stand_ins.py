"""Agents of the launcher's own, which run trainers in place of machines that are lost.

Passes must be replayed by as many trainers as they had. The stand-ins take the places of the missing ones for that time
alone, at the machine of the launcher.
"""

import logging
import os
import secrets
import threading
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.identity.join_token import read_token
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.agent import Agent, Joined
from headrace.service.cluster.machine import machine_id
from headrace.service.cluster.runtime import WorkerRole

END_S = 30.0
"""Longest wait for a stand-in to end; its worker has ended before."""

log = logging.getLogger(__name__)


class StandIns:
    """Threads, each with an agent. `ids`: any thread; the rest: the launcher's."""

    def __init__(self, token_file: Path) -> None:
        self._token_file = token_file
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.ids: frozenset[str] = frozenset()
        """The identities of these agents."""

    def begin(self, number: int, address: str) -> None:
        """Have `number` of them join at `address`."""
        while len(self._threads) < number:
            facts = AgentFacts(
                id=secrets.token_hex(16),
                machine=machine_id(),
                role=WorkerRole.TRAINER.value,
                cores=max(1, (os.cpu_count() or 1) // number),
            )
            self.ids |= {facts.id}
            thread = threading.Thread(target=self._run, args=(address, facts), name="stand-in", daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """End all of them, and what they run."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(END_S)
        self._stopping, self._threads, self.ids = threading.Event(), [], frozenset()

    def _run(self, address: str, facts: AgentFacts) -> None:
        to = Joined(address=address, token=read_token(self._token_file))
        try:
            with Agent(to, facts, self._stopping, show=lambda _: None) as agent:  # the launcher shows its lines
                agent.run()
        except HeadraceError as error:
            log.warning("a stand-in for a trainer has ended: %s", error)
