"""The actor that runs one worker of a generation on a node of a Ray cluster: an agent, as `headrace worker` is one.

Its worker is its child process and dies with it. Texts and numbers alone pass through Ray, which pickles them; the join
token passes sealed for the key of this process. Imports no Ray: service.cluster.ray_driver makes it an actor.
"""

import logging
import os
import threading

from headrace.errors import HeadraceError
from headrace.identity.join_token import JoinToken
from headrace.identity.sealed import SealKey
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.agent import Agent, Joined
from headrace.service.cluster.machine import machine_id

WAIT_S = 30.0
"""Longest wait for a launcher that does not answer. Another one places agents of its own."""

log = logging.getLogger(__name__)


class PlacedAgent:
    """One actor. Its calls come on one thread."""

    def __init__(self, agent: str, rank: int, world: int, own_gpus: bool) -> None:
        """`rank` among the `world` workers of a generation: trainers first. `own_gpus`: it sees those of its worker."""
        self._key = SealKey()
        self._facts = AgentFacts(
            id=agent,
            machine=machine_id(),
            rank=rank,
            world=world,
            local_rank=0 if own_gpus else None,
            cores=len(os.sched_getaffinity(0)),
        )

    def hello(self) -> list[str]:
        """The key for which to seal the token, and the machine."""
        return [self._key.public, self._facts.machine]

    def run(self, address: str, sealed_token: str) -> str:
        """Run workers until the launcher at `address` refuses this agent, or the job ends: nothing, or the trouble."""
        try:
            token = JoinToken.parse(self._key.unseal(sealed_token))
            to = Joined(address=address, token=token, wait_s=WAIT_S)
            with Agent(to, self._facts, threading.Event()) as agent:
                agent.run()
        except HeadraceError as error:
            log.warning("%s", error)
            return str(error)
        return ""
