"""The process that holds a launcher's connection to a Ray cluster.

`python -m headrace.service.cluster.ray_driver ADDRESS` starts it.

Ray ends a driver whose node has died, so it must not be the launcher's own process. Reads requests and writes events,
each a line of JSON: service.cluster.ray_launcher is the other end. All that it placed ends with it.
"""

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace import documents
from headrace.address import is_loopback, parse_address
from headrace.identity.sealed import seal
from headrace.lifecycle import ExitCode
from headrace.private_folder import private_folder
from headrace.service.cluster.machine import machine_id
from headrace.service.cluster.ray_agent import PlacedAgent
from headrace.service.cluster.ray_launcher import Node, WorkerNeeds, missing

REACH_S = 3.0
"""Longest wait for the cluster to accept a connection."""
HELLO_S = 60.0
"""Longest time until all actors of a placement have started."""
QUIET_S = 1.5
"""A placement that waits for longer says what it lacks. Places of the one before come back within this time."""
LEAVE_S = 2.0
"""Longest wait for the agents of the placement before to end by themselves; then they are killed."""
POLL_S = 0.1
AGAIN_S = 1.0
"""Pause between two tries to reach the cluster."""
ALIVE_S = 1.0
"""How often the launcher hears that Ray answers."""
CLOSE_S = 4.0
"""Longest time for an orderly end."""

Tell = Callable[[Mapping[str, Any]], None]


class CannotPlace(Exception):
    """This placement has failed; the text says why."""


@dataclass
class PlacedWorkers:
    """A placement group, and the actors in it."""

    attempt: int
    """Events of it carry its number."""
    needs: Sequence[WorkerNeeds]
    address: str
    """Where the agents join."""
    token: str = field(repr=False)
    group: PlacementGroup
    since_s: float
    actors: list[Any] = field(default_factory=list)
    hellos: list[Any] = field(default_factory=list)
    """Their first answers, until all have been taken."""
    runs: dict[Any, WorkerNeeds] = field(default_factory=dict)
    """Their ends, and the workers of those that still run."""


class Driver:
    """Places the workers of one generation after another. One thread."""

    def __init__(self, cluster: str, tell: Tell) -> None:
        self.cluster, self._tell = cluster, tell
        self._placement: PlacedWorkers | None = None
        self._failed = False
        self._this_node = ray.util.get_node_ip_address()

    def place(self, attempt: int, needs: Sequence[WorkerNeeds], address: str, token: str) -> None:
        """Ask for places for `needs`, in place of all that was placed before."""
        self.remove()
        group = placement_group([need.bundle(self._this_node) for need in needs], strategy="PACK")
        self._placement = PlacedWorkers(attempt, needs, address, token, group, time.monotonic())
        self._failed = False

    def remove(self) -> None:
        """End what was placed. Its agents have heard that they are given up, so most end by themselves."""
        placement, self._placement = self._placement, None
        if placement is None:
            return
        if placement.runs:
            ray.wait(list(placement.runs), num_returns=len(placement.runs), timeout=LEAVE_S)
        remove_placement_group(placement.group)  # with its actors

    def step(self) -> None:
        """Go on with the placement, and tell what has happened."""
        placement = self._placement
        if placement is None or self._failed:
            return
        try:
            if placement.runs:
                self._watch(placement)
            elif placement.hellos:
                self._greet(placement)
            elif placement.actors:
                pass  # all have ended
            elif placement_group_table(placement.group)["state"] == "CREATED":
                self._start(placement)
            elif time.monotonic() - placement.since_s > QUIET_S:
                self._tell({"attempt": placement.attempt, "waits": self._missing(placement.needs)})
        except CannotPlace as error:
            self._failed = True
            self._tell({"attempt": placement.attempt, "failed": str(error)})

    def _missing(self, needs: Sequence[WorkerNeeds]) -> str:
        nodes = [Node(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        return missing(needs, nodes, ray.available_resources(), self._this_node, self.cluster)

    def _start(self, placement: PlacedWorkers) -> None:
        actor = ray.remote(PlacedAgent)
        for rank, need in enumerate(placement.needs):
            placed = actor.options(
                num_cpus=need.cores,
                num_gpus=need.gpus,
                memory=need.memory_bytes or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, rank),
            )
            placement.actors.append(placed.remote(need.agent, rank, len(placement.needs), need.gpus > 0))
        placement.hellos = [actor.hello.remote() for actor in placement.actors]
        placement.since_s = time.monotonic()

    def _greet(self, placement: PlacedWorkers) -> None:
        """Give each actor the token once all have started."""
        ready, waiting = ray.wait(placement.hellos, num_returns=len(placement.hellos), timeout=POLL_S)
        answers = {ref: self._hello(placement, ref) for ref in ready}
        if waiting:
            if time.monotonic() - placement.since_s > HELLO_S:
                name = placement.needs[placement.hellos.index(waiting[0])].worker
                raise CannotPlace(f"{name} has not started on the Ray cluster within {HELLO_S:g} s")
            return
        for need, actor, hello in zip(placement.needs, placement.actors, placement.hellos, strict=True):
            public, machine = answers[hello]
            self._check_machine(need, machine, placement.address)
            placement.runs[actor.run.remote(placement.address, seal(placement.token, public))] = need
        placement.hellos = []
        self._tell({"attempt": placement.attempt, "started": len(placement.runs)})

    def _hello(self, placement: PlacedWorkers, ref: Any) -> list[str]:
        try:
            answer: list[str] = ray.get(ref)
        except RayError as error:
            name = placement.needs[placement.hellos.index(ref)].worker
            raise CannotPlace(f"{name} cannot be started on the Ray cluster: {last_line(error)}") from error
        return answer

    def _check_machine(self, need: WorkerNeeds, machine: str, address: str) -> None:
        if machine != machine_id() and is_loopback(parse_address(address)[0]):
            raise CannotPlace(
                f"Ray has a place for {need.worker} on another machine, which does not reach the launcher at "
                f"{address}; let cluster.listen and cluster.interface name the network of the cluster"
            )

    def _watch(self, placement: PlacedWorkers) -> None:
        """Tell which actors have ended."""
        for ref in ray.wait(list(placement.runs), num_returns=1, timeout=POLL_S)[0]:
            need = placement.runs.pop(ref)
            try:
                trouble: str = ray.get(ref)
            except RayError as error:
                trouble = last_line(error)
            self._tell(
                {
                    "attempt": placement.attempt,
                    "lost": need.agent,
                    "worker": need.worker,
                    "reason": trouble or "it has left",
                }
            )


def last_line(error: BaseException) -> str:
    """The last line of an error's text that says something: Ray puts whole traces of other processes before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class Requests:
    """The launcher's requests, read on a thread."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.over = threading.Event()
        """Set when the launcher is gone."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Read to the end."""
        for line in sys.stdin.buffer:
            self.waiting.put(documents.parse_object(line, "a request of the launcher"))
        self.over.set()
        bound_end()


def bound_end() -> None:
    """End this process where its orderly end takes too long: Ray waits long for a head that is gone."""
    timer = threading.Timer(CLOSE_S, os._exit, (ExitCode.RETRY,))
    timer.daemon = True
    timer.start()


def await_cluster(address: str, requests: Requests, tell: Tell) -> None:
    """Wait until the cluster takes connections, or the launcher is gone. Tells why it has to wait."""
    while (trouble := unreachable(address)) and not requests.over.is_set():
        tell({"unreachable": trouble})
        requests.over.wait(AGAIN_S)


def unreachable(address: str) -> str:
    """Why the head does not take connections; empty where it does."""
    try:
        with socket.create_connection(parse_address(address), REACH_S):
            return ""
    except OSError as error:
        return str(error)


def serve(driver: Driver, requests: Requests, tell: Tell) -> None:
    """Do what is requested until the launcher is gone."""
    told_s = 0.0
    while not requests.over.is_set():
        with suppress(queue.Empty):
            request = requests.waiting.get(timeout=POLL_S)
            if trouble := unreachable(driver.cluster):  # Ray itself would wait a minute for its head
                tell({"failed": trouble})
                bound_end()
                sys.exit(ExitCode.RETRY)
            needs = [WorkerNeeds(**need) for need in request["workers"]]
            driver.place(request["attempt"], needs, request["address"], request["token"])
        driver.step()
        if time.monotonic() - told_s > ALIVE_S:
            told_s = time.monotonic()
            tell({})


def events_to(output: IO[bytes]) -> Tell:
    """Writes each event as it comes."""
    return lambda event: write_line(output, event)


def write_line(output: IO[bytes], event: Mapping[str, Any]) -> None:
    """One event. A launcher that is gone reads none."""
    with suppress(BrokenPipeError):
        output.write(json.dumps(event).encode() + b"\n")


def main() -> None:
    """Run the process until the launcher closes its pipe."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever Ray prints is no event
    tell = events_to(output)
    requests = Requests()
    await_cluster(sys.argv[1], requests, tell)
    if requests.over.is_set():
        return
    with private_folder("ray") as folder:
        os.chdir(folder)  # Ray has its workers import from the driver's folder
        try:
            ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, RayError) as error:  # as Ray tells it; another one is a bug
            tell({"failed": last_line(error.__cause__ or error)})
            sys.exit(ExitCode.RETRY)
        driver = Driver(sys.argv[1], tell)
        try:
            serve(driver, requests, tell)
            driver.remove()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
