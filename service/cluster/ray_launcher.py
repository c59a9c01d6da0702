"""The Ray launcher: a Ray cluster runs an agent for each worker, in a placement group of each generation.

From there on a worker is one of the external launcher: its agent joins, starts it as its child, and reports. This
module asks for places and tells what is missing; service.cluster.ray_driver asks Ray, service.cluster.ray_agent is what
runs on a node.
"""

import json
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace import documents
from headrace.errors import Refused
from headrace.extras import require
from headrace.identity.join_token import read_token
from headrace.lifecycle import ExitCode
from headrace.printable import counted
from headrace.process import ChildProcess, unbuffered
from headrace.rpc.joining import AgentFacts, Answer, JobEnd
from headrace.service.cluster.external import ExternalLauncher, JoinPoint
from headrace.service.cluster.places import RANK_0
from headrace.service.cluster.runtime import PYTHON, WorkerRole, WorkerSpec
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import LoadedJob

# The resources of a generation on a Ray cluster: its bundles, and in words which of them are missing. Pure.
#
# service.cluster.ray_driver asks Ray.

GIB = 1 << 30
HERE = 0.001
"""The share of a node's own resource "node:ADDRESS" that binds a bundle to that node."""
UNITS = {"CPU": "core", "GPU": "GPU", "memory": "GiB of memory"}
"""Kinds of resources in Ray's words, and in ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """A worker, and what it needs on its node."""

    worker: str
    agent: str
    """Identity of its agent, drawn anew for each attempt to place it."""
    cores: float = 1.0
    memory_bytes: int = 0
    gpus: int = 0
    here: bool = False
    """It runs at the machine of the launcher."""

    @classmethod
    def of(cls, spec: WorkerSpec, agent: str, here: bool) -> "WorkerNeeds":
        """The needs of a worker of a plan."""
        given = spec.resources
        return cls(
            worker=spec.name,
            agent=agent,
            cores=given.cores or 1.0,
            memory_bytes=given.memory_bytes or 0,
            gpus=given.gpus or 0,
            here=here,
        )

    def as_json(self) -> dict[str, Any]:
        """For the driver, which reads it as keyword arguments."""
        return asdict(self)

    def bundle(self, this_node: str) -> dict[str, float]:
        """In Ray's words; `this_node` is the address of the launcher's node."""
        wanted = {"CPU": self.cores, "GPU": float(self.gpus), "memory": float(self.memory_bytes)}
        bound = {f"node:{this_node}": HERE} if self.here else {}
        return {**{kind: number for kind, number in wanted.items() if number}, **bound}


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster, and all that it has."""

    address: str
    total: Mapping[str, float]


def missing(
    needs: Sequence[WorkerNeeds], nodes: Sequence[Node], free: Mapping[str, float], this_node: str, cluster: str
) -> str:
    """The things that `needs` lack on the Ray cluster at `cluster`, and those that it has; for after "waits for".

    `free`: what is left of each kind on all nodes together.
    """
    at = f"the Ray cluster at {cluster}"
    bundles = {need.worker: need.bundle(this_node) for need in needs}
    lacks = dict(_deficits(list(bundles.values()), free))
    if lacks:
        wanted = " and ".join(_count(number, kind, "more ") for kind, number in lacks.items())
        return f"{wanted} on {at}, which has {_has(lacks, nodes, free)}"
    for worker, bundle in bundles.items():
        if not any(_fits(bundle, node.total) for node in nodes):
            wanted = ", ".join(_count(number, kind) for kind, number in bundle.items() if kind in UNITS)
            where = f"this machine ({this_node})" if f"node:{this_node}" in bundle else "one node"
            return f"{wanted} for {worker} on {where} of {at}, which has {_nodes(nodes)}"
    return f"{len(needs)} places on {at}: enough is free, but not together on single nodes"


def _deficits(bundles: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for kind in UNITS:
        wanted = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if wanted > free.get(kind, 0.0):
            yield kind, wanted - free.get(kind, 0.0)


def _has(kinds: Mapping[str, float], nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    parts = []
    for kind in kinds:
        total = sum(node.total.get(kind, 0.0) for node in nodes)
        left = f" ({_number(free.get(kind, 0.0), kind)} free)" if total else ""
        parts.append(f"{_count(total, kind)}{left}")
    return f"{' and '.join(parts)} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"


def _nodes(nodes: Sequence[Node]) -> str:
    """The nodes with what each has."""
    return "; ".join(
        f"{node.address}: {', '.join(_count(node.total.get(kind, 0.0), kind) for kind in UNITS)}" for node in nodes
    )


def _fits(bundle: Mapping[str, float], total: Mapping[str, float]) -> bool:
    return all(total.get(kind, 0.0) >= number for kind, number in bundle.items())


def _count(number: float, kind: str, more: str = "") -> str:
    """Such as "2 cores", "1 more GPU", "1.5 GiB of memory"."""
    text, unit = _number(number, kind), UNITS[kind]
    many = text != "1" and kind != "memory"
    return f"{text if number else 'no'} {more}{unit}{'s' if many else ''}"


def _number(number: float, kind: str) -> str:
    return f"{number / GIB:.1f}" if kind == "memory" else f"{number:.4g}"


# The process that holds the connection to a Ray cluster, as the launcher has it. service.cluster.ray_driver is it.

CLOSE_S = 6.0
"""Longest time for an orderly end: the actors end, and Ray hears of it. Then the process is killed."""
MAX_LINES = 20
"""Lines kept of all that Ray prints there, to explain an end."""

OnEvent = Callable[[Mapping[str, Any]], None]
"""Takes an event. The last one is {"gone": the reason}: whatever was placed is ended. Called on a thread of its own."""


class RayConnection:
    """One process. Any thread."""

    def __init__(self, address: str, on_event: OnEvent) -> None:
        """Connect to the cluster at `address`. Raises OSError."""
        self._on_event = on_event
        command = (*PYTHON, "headrace.service.cluster.ray_driver", address)
        self._process = ChildProcess(command, environment=unbuffered(os.environ))
        self._printed: deque[str] = deque(maxlen=MAX_LINES)
        self._heard_s = time.monotonic()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._drain)]
        for thread in self._threads:
            thread.start()

    @property
    def silent_s(self) -> float:
        """The time since it was last heard. It tells every second that Ray answers."""
        return time.monotonic() - self._heard_s

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.ends_within(0)

    def request(self, request: Mapping[str, Any]) -> None:
        """Send a request. One that is gone does not hear it."""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """End the process, and with it all that it has placed."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.ends_within(CLOSE_S)
        self._process.end()
        for thread in self._threads:
            thread.join()
        self._process.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._heard_s = time.monotonic()
            if event := documents.parse_object(line, "an event of the connection to Ray"):
                self._on_event(event)
        code = self._process.end()
        said = next((line for line in reversed(self._printed) if line), "")
        self._on_event({"gone": f"the connection to the Ray cluster has ended with code {code}: {said}"})

    def _drain(self) -> None:
        for line in self._process.stderr:
            self._printed.append(line.decode(errors="replace").strip())


SILENT_S = 10.0
"""A cluster that does not answer for longer is told of; so are agents that Ray has started and that do not join."""
REPLACE_S = 60.0
"""A connection that is silent for longer is replaced by another one."""
AGAIN_S = 3.0
"""Pause before another attempt to place the workers."""


class RayLauncher(ExternalLauncher):
    """A context. Ray's actors and the process that holds the connection end with it."""

    elastic = False  # Ray starts agents for a whole generation at once

    @classmethod
    def check(cls, cluster: ClusterSection) -> None:
        require("ray", "every machine of a Ray cluster", "cluster.launcher")

    @classmethod
    def of_job(cls, job: LoadedJob) -> "RayLauncher":
        cls.check(job.spec.cluster)
        return cls(JoinPoint.of_job(job), job.spec.cluster.ray_address or "")

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
        super().prepare(specs, generation)
        with self._state:
            self._waits = f"{self._at}, which starts {counted(len(specs), 'worker')}"
        last = WorkerRole.SHARD, WorkerRole.READER
        self._specs = sorted(specs, key=lambda spec: spec.role in last)  # the order of ranks
        self._place()

    def waits_for(self) -> str | None:
        """Tries again what has failed."""
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
        needs = [WorkerNeeds.of(spec, secrets.token_hex(16), spec.name == RANK_0) for spec in self._specs]
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
                    self._waits = f"{self._at}, which starts {counted(number, 'worker')}"
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
