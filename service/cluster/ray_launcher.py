"""The Ray launcher: a Ray cluster runs an agent for each worker, in a placement group of each generation.

From there on a worker is one of the external launcher: its agent joins, starts it as its child, and reports. This
module asks for places and tells what is missing; service.cluster.ray_driver asks Ray, service.cluster.ray_agent is what
runs on a node.
"""

import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import Refused
from headrace.identity.join_token import read_token
from headrace.lifecycle import ExitCode
from headrace.rpc.joining import AgentFacts, Answer, JobEnd
from headrace.service.cluster.external import ExternalLauncher, JoinPoint
from headrace.service.cluster.places import CHIEF
from headrace.service.cluster.ray_connection import RayConnection
from headrace.service.cluster.ray_resources import WorkerNeeds
from headrace.service.cluster.runtime import WorkerRole, WorkerSpec

SILENT_S = 10.0
"""A cluster that does not answer for longer is told of; so are agents that Ray has started and that do not join."""
REPLACE_S = 60.0
"""A connection that is silent for longer is replaced by another one."""
AGAIN_S = 3.0
"""Pause before another attempt to place the workers."""


class RayLauncher(ExternalLauncher):
    """See Launcher. A context. Ray's actors and the process that holds the connection end with it."""

    def __init__(self, point: JoinPoint, cluster: str) -> None:
        """`cluster`: the address of the Ray cluster. Raises Unavailable where the port of `point` is taken."""
        super().__init__(point)
        self._at = f"the Ray cluster at {cluster}"
        self._cluster = cluster
        self._specs: list[WorkerSpec] = []
        self._connection: RayConnection | None = None
        self._state = threading.Lock()  # held for what follows
        self._attempt = 0
        self._agents: frozenset[str] = frozenset()
        """Those of the newest attempt to place the workers: no other agent may join."""
        self._former: frozenset[str] = frozenset()
        """Those of the attempt before."""
        self._waits = ""
        self._started_s: float | None = None
        self._again_at_s: float | None = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._disconnect()

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        """See Launcher.prepare."""
        super().prepare(specs, generation)
        with self._state:
            self._waits = f"{self._at}, which starts {len(specs)} workers"
        self._specs = sorted(specs, key=lambda spec: spec.role is not WorkerRole.TRAINER)  # the order of ranks
        self._place()

    def waits_for(self) -> str | None:
        """See Launcher.waits_for. Tries again what has failed."""
        missing, now_s = self._missing(), time.monotonic()
        if missing is None:
            return None
        with self._state:
            waits, started_s, again_at_s = self._waits, self._started_s, self._again_at_s
        if again_at_s is not None and now_s >= again_at_s:
            self._place()
        elif again_at_s is None and self._connection is not None and self._connection.silent_s > SILENT_S:
            if self._connection.silent_s > REPLACE_S:
                self._disconnect()
                self._place()
            return f"waits for {self._at}, which does not answer"
        elif started_s is not None and now_s - started_s > SILENT_S:
            return f"{missing}; {self._at} has started them, and they have not joined at {self.address} yet"
        return f"waits for {waits}"

    def join(self, agent: AgentFacts, signing_request: str) -> Answer:
        """See Dispatcher.join."""
        if agent.id in self._agents or self._end is not None:
            return super().join(agent, signing_request)
        if agent.id in self._former:
            return self._answer(what=JobEnd(ExitCode.RETRY, "Ray starts other agents for the next generation"))
        raise Refused("Ray has not started this agent for the job, which takes no others, or has given it up long ago")

    def _of_machine(self, spec: WorkerSpec, agent: AgentFacts) -> dict[str, int]:
        """Trainers use the cores that Ray has reserved for them."""
        given = super()._of_machine(spec, agent)
        return {**given, "cores": max(1, int(spec.resources.cores or 1))} if given else {}

    def _place(self) -> None:
        """Ask for places for all workers, in place of those that were asked for before."""
        if self._connection is not None and self._connection.gone:
            self._disconnect()  # first, for its end concerns the attempt before
        needs = [WorkerNeeds.of(spec, secrets.token_hex(16), spec.name == CHIEF) for spec in self._specs]
        with self._state:
            self._attempt += 1
            self._former, self._agents = self._agents, frozenset(need.agent for need in needs)
            self._started_s = self._again_at_s = None
            attempt = self._attempt
        with self._lock:
            for agent in self._former:
                self._places.leave(agent)
        if self._connection is None:
            self._connection = RayConnection(self._cluster, self._take)
        self._connection.request(
            {
                "attempt": attempt,
                "workers": [need.as_json() for need in needs],
                "address": self.address,
                "token": str(read_token(self._point.token_file)),  # an operator may have replaced it
            }
        )

    def _take(self, event: Mapping[str, Any]) -> None:
        """An event of the connection (service.cluster.ray_driver)."""
        with self._state:
            if event.get("attempt", self._attempt) != self._attempt:
                return
            match event:
                case {"waits": text}:
                    self._waits = text
                case {"started": number}:
                    self._waits = f"{self._at}, which starts {number} workers"
                    self._started_s = time.monotonic()
                case {"unreachable": text}:  # the connection itself tries again
                    self._waits = f"{self._at}: {text}; this is tried again"
                case {"failed": text}:
                    self._again(f"{self._at}: {text}")
                case {"gone": text} if self._again_at_s is None:
                    self._again(f"{self._at}: {text}")
                case {"lost": _, "worker": worker, "reason": reason}:
                    self._again(f"{self._at}: {worker} has ended there: {reason}")
            agents = self._agents
        match event:
            case {"lost": agent, "reason": reason}:
                self._lose([agent], f"(its actor on {self._at} has ended: {reason})", -signal.SIGKILL)
            case {"gone": reason}:
                self._lose(agents, f"({reason})", -signal.SIGKILL)

    def _again(self, waits: str) -> None:
        """The attempt has failed: the next one follows if the workers still wait for it. Holds `_state`."""
        self._waits, self._again_at_s = f"{waits}; this is tried again", time.monotonic() + AGAIN_S

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
