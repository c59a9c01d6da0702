"""An agent: it joins a launcher, runs one worker of each generation as its child, and reports until the job ends.

It draws the key of each worker; the launcher signs a certificate for it. `headrace worker` is an agent. The launcher's
side is service.cluster.external.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import DeadlineExceeded, HeadraceError, Refused, Unavailable, Unwritable
from headrace.extras import missing
from headrace.identity.certificates import draw_key, signing_request
from headrace.identity.credentials import Credentials
from headrace.identity.join_token import JoinToken
from headrace.identity.renewal import RenewedIdentity
from headrace.launcher_contact import LauncherContact
from headrace.lifecycle import ExitCode
from headrace.private_folder import private_folder
from headrace.rpc.joining import AgentFacts, Answer, JobEnd, JoinClient, Order, WorkerOffer, WorkerReport
from headrace.service.cluster.child import Spawner, Starter, WorkerProcess, local_starter
from headrace.service.cluster.local import LocalWorker, start_process
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.runtime import KILL_S, MODULES, PYTHON, CannotStart, WorkerRole, WorkerSpec
from headrace.service.cluster.store import clear_live_of
from headrace.warm_forkserver import VARIABLE

# The worker that an agent runs as its child, and its output until that is reported.

MAX_LINES = 2000
"""Most lines that wait to be reported. A worker that writes faster waits."""
GATHER_S = 0.02
"""Lines of this time go into one report."""


class AgentChild:
    """A running worker. One thread; its output and its end come on others."""

    def __init__(self, name: str, process: WorkerProcess, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._closed = self._asked = False
        self._worker = LocalWorker(name, process, self._take_line, self._take_exit)

    @property
    def code(self) -> int | None:
        """Its exit code once it and its group are gone."""
        return self._worker.poll()

    @property
    def over(self) -> bool:
        """Whether it is gone and no further line follows."""
        return self._worker.poll() is not None and self._worker.kill(within_s=0)

    def take_lines(self) -> tuple[str, ...]:
        """The lines since the last call."""
        with self._changed:
            lines = tuple(self._lines)
            self._lines.clear()
            self._changed.notify_all()
        return lines

    def wait(self, within_s: float) -> None:
        """Wait until there is something to report."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self.code is not None, within_s)
        if self.code is None:
            time.sleep(GATHER_S)
        else:
            self._worker.kill(within_s)  # it is gone; this waits for its last lines

    def terminate(self) -> None:
        """Ask it to end, once."""
        if not self._asked:
            self._asked = True
            self._worker.terminate()

    def kill(self) -> None:
        """End it; does not wait."""
        self._worker.kill(within_s=0)

    def end(self) -> None:
        """End it with its group, and forget its output."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.kill(KILL_S)

    def _take_line(self, _name: str, text: str) -> None:
        self._show(text)
        sys.stdout.flush()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._lines) < MAX_LINES)
            self._lines.append(text)
            self._changed.notify_all()

    def _take_exit(self, _name: str, _code: int) -> None:
        with self._changed:
            self._changed.notify_all()


WAIT_S = 300.0
"""Longest wait for a launcher that does not answer, unless another one is given: it may be started after its workers,
and again after it was lost."""
PAUSE_S = 0.2
"""Pause between two calls until the launcher has named one."""

Answered = TypeVar("Answered")

log = logging.getLogger(__name__)


class LauncherLost(Unavailable):
    """The launcher was not reachable for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Where an agent joins."""

    address: str
    token: JoinToken
    folder: Path | None = None
    """Where the files of the job are at this machine; None: where they are at the head."""
    wait_s: float = WAIT_S
    """Longest wait for a launcher that does not answer, before this agent ends."""


class Agent:
    """A context. One thread; `stopping` may be set on any."""

    def __init__(
        self,
        to: Joined,
        facts: AgentFacts,
        stopping: threading.Event,
        show: Callable[[str], None] = print,
    ) -> None:
        """`show` takes each line of its worker."""
        self._show = show
        self._to, self._facts, self._stopping = to, facts, stopping
        self._held = ExitStack()
        self._client = JoinClient(to.address, to.token)
        self._key = draw_key()
        self._identity: RenewedIdentity | None = None
        self._num_started = 0
        self._starter: Starter | None = None
        self._node_timeout_s, self._pause_s = to.wait_s, PAUSE_S
        self._heard_s = time.monotonic()
        self._shown = ""
        self._worker: str | None = None  # the one that runs

    def __enter__(self) -> "Agent":
        self._held.callback(self._client.close)
        self._private = self._held.enter_context(private_folder("agent"))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def lacks(self) -> str:
        """The things that it lacks to be ready, in words; "" while it runs a worker. Any thread."""
        if self._worker is not None:
            return ""
        return f"has no worker: the job {self._shown}" if self._shown else "has no worker"

    def run(self) -> int:
        """Run workers until the job ends; the exit code of the job, or RETRY where this agent was asked to end.

        Raises Refused and SpecError where it may not join, and LauncherLost. Its worker is gone then.
        """
        while not self._stopping.is_set():
            match self._ask().what:
                case JobEnd(code, reason):
                    log.info("the job has ended: %s", reason)
                    return code
                case WorkerOffer() as given:
                    self._work(given)
                case None:
                    self._stopping.wait(self._pause_s)
        self._call(lambda: self._client.leave(self._facts), self._to.wait_s)
        log.info("asked to end; the job goes on once another worker has joined")
        return ExitCode.RETRY

    def _ask(self) -> Answer:
        answer = self._call(lambda: self._client.join(self._facts, signing_request(self._key)), self._to.wait_s)
        self._node_timeout_s, self._pause_s = answer.node_timeout_s, answer.pause_s
        if answer.waits != self._shown:
            self._shown = answer.waits
            if answer.waits:
                log.info("the job %s", answer.waits)
        return answer

    def _call(self, call: Callable[[], Answered], within_s: float) -> Answered:
        """The result of `call`, repeated while the launcher is not reachable. Raises LauncherLost, and refusals.

        `within_s`: the longest time since the launcher has answered last.
        """
        while True:
            try:
                answered = call()
            except (Unavailable, DeadlineExceeded) as error:
                silent_s = time.monotonic() - self._heard_s
                if silent_s > within_s or self._stopping.is_set():
                    raise LauncherLost(f"{error}; it was not reachable for {silent_s:.0f} s") from error
                time.sleep(self._pause_s)
            else:
                self._heard_s = time.monotonic()
                return answered

    def _work(self, given: WorkerOffer) -> None:
        """Run a worker to its end, and report it. Without a launcher it ends after cluster.node_timeout."""
        self._facts = replace(self._facts, last=given.worker)
        if given.credentials is not None:
            mine = given.credentials.model_copy(update={"key": self._key})
            given = replace(given, credentials=mine, config={**given.config, "credentials": mine.model_dump()})
            self._identity = self._identity_of(given, mine)
        self._client.show(self._identity)
        try:
            self._work_reported(given)
        except Refused as refusal:  # given up: its generation goes on elsewhere, or has ended
            log.warning("%s", refusal)
        except LauncherLost as lost:
            log.warning("%s; %s was ended, and this agent joins again for %g s", lost, given.worker, self._to.wait_s)
        finally:
            self._identity = None
            self._client.show(None)
            self._key = draw_key()

    def _identity_of(self, given: WorkerOffer, mine: Credentials) -> RenewedIdentity:
        """This agent to the launcher while it runs a worker, which renews its own credentials."""
        return RenewedIdentity(mine, lambda request: self._client.renew(given.worker, given.generation, request))

    def _work_reported(self, given: WorkerOffer) -> None:
        live = given.config.get("live")
        with ExitStack() as held:
            folder = held.enter_context(run_folder(self._private / given.worker))
            if live is not None:
                clear_live_of(Path(live), given.generation)
                held.callback(clear_live_of, Path(live), given.generation)
            try:
                child = self._started(given, folder)
            except (CannotStart, Unwritable) as error:
                reason = error.reason if isinstance(error, CannotStart) else str(error)
                self._report(given, cannot_start=reason)
                return
            self._worker = given.worker
            try:
                self._attend(given, child)
            finally:
                self._worker = None
                child.end()

    def _attend(self, given: WorkerOffer, child: AgentChild) -> None:
        """Report until the child is gone and all its lines are told."""
        while True:
            over = child.over  # before its lines are taken: none follows
            order = self._report(given, lines=child.take_lines(), exit_code=child.code, over=over)
            if over:
                return
            if order is Order.KILL or self._stopping.is_set():
                child.kill()
            elif order is Order.TERMINATE:
                child.terminate()
            child.wait(self._pause_s)

    def _report(self, given: WorkerOffer, **what: Any) -> Order:
        if self._identity is not None:
            self._identity.attend()
        report = WorkerReport(agent=self._facts.id, worker=given.worker, generation=given.generation, **what)
        return self._call(lambda: self._client.report(report), self._node_timeout_s)

    def _started(self, given: WorkerOffer, folder: Path) -> AgentChild:
        """Start the worker, and report meanwhile: its imports may take long. Raises CannotStart, Unwritable."""
        with ThreadPoolExecutor(1, "start") as thread:
            starting = thread.submit(self._start, given, folder)
            try:
                while not wait([starting], self._pause_s).done:
                    self._report(given, starting=True)
            except HeadraceError:
                if starting.exception() is None:
                    starting.result().end()
                raise
            return starting.result()

    def _start(self, given: WorkerOffer, folder: Path) -> AgentChild:
        """Start the worker. Raises CannotStart, Unwritable."""
        role, _, number = given.worker.partition("-")
        if role in (WorkerRole.TRAINER, WorkerRole.PREDICTOR) and (problem := missing("torch", "a trainer")):
            raise CannotStart(given.worker, problem)
        config = dict(given.config)
        if self._to.folder is not None and "folder" in config:
            config["folder"] = str(self._to.folder)
        spec = WorkerSpec(
            role=WorkerRole(role),
            number=int(number),
            command=(*PYTHON, *given.command) if given.is_module else given.command,
            config=config,
            folder=self._to.folder or Path(given.folder),
            run_folder=folder,
        )
        contact = LauncherContact(
            address=self._to.address,
            secret=self._client.secret,
            worker=given.worker,
            generation=given.generation,
            **({} if given.credentials is not None else self._client.trust(given.generation)),
        )
        return AgentChild(given.worker, start_process(self._starter_of(spec.role), spec, contact), self._show)

    def _starter_of(self, role: WorkerRole) -> Starter:
        """The first worker is started from nothing, unless there is a warm forkserver; later ones are forked, as the
        job may restart again."""
        self._num_started += 1
        if self._num_started == 1 and VARIABLE not in os.environ:
            return Spawner()
        if self._starter is None:
            self._starter = self._held.enter_context(local_starter(MODULES.get(role, ())))
        return self._starter
