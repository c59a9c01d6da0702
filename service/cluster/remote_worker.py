"""A worker that an agent runs, as the external launcher holds it.

The agent's reports come on threads of the rendezvous; service.cluster.external passes them on.
"""

import signal
import threading
from collections import deque
from collections.abc import Sequence

from headrace.deadline import Deadline
from headrace.printable import printable
from headrace.rpc.joining import Order, WorkerOffer
from headrace.service.cluster.runtime import KILL_S, TAIL_LINES, OnExit, OnLine


class RemoteWorker:
    """See WorkerHandle. `take_*` and `lose` belong to the launcher. Any thread.

    Nothing is told to `on_line` and `on_exit` before `release`, and nothing at all of a worker that was not released.
    """

    def __init__(self, assignment: WorkerOffer, agent: str, on_line: OnLine, on_exit: OnExit) -> None:
        self.name, self.assignment, self.agent = assignment.worker, assignment, agent
        self._on_line, self._on_exit = on_line, on_exit
        self._changed = threading.Condition()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.order = Order.GO_ON
        self._fetched = self._started = self._over = False
        self._trouble = ""
        self._code: int | None = None
        self._telling = threading.Lock()  # held while `on_line` and `on_exit` are called, so that their order is kept
        self._untold: list[str] | None = []  # lines before `release`; None after it
        self._told_exit = False

    def poll(self) -> int | None:
        """See WorkerHandle.poll."""
        return self._code

    def terminate(self) -> None:
        """See WorkerHandle.terminate."""
        self.order = max(self.order, Order.TERMINATE)

    def kill(self, within_s: float = KILL_S) -> bool:
        """See WorkerHandle.kill."""
        with self._changed:
            self.order = Order.KILL
            never_fetched = not self._fetched and not self._over
        if never_fetched:
            self.take_exit(-signal.SIGKILL)
            self.take_end()
        with self._changed:
            return self._changed.wait_for(lambda: self._over, within_s)

    def last_lines(self) -> list[str]:
        """See WorkerHandle.last_lines."""
        with self._changed:
            return list(self._tail)

    @property
    def over(self) -> bool:
        """Whether nothing more is reported of it."""
        return self._over

    def fetch(self) -> WorkerOffer | None:
        """The worker to run, for its agent, which asks again where an answer was lost; None once it has begun."""
        with self._changed:
            if self._started or self._over or self.order is Order.KILL:
                return None
            self._fetched = True
            return self.assignment

    def await_start(self, deadline: Deadline) -> str:
        """Wait until its agent has started it: nothing, or why it cannot be started."""
        with self._changed:
            known = self._changed.wait_for(lambda: self._started or self._over, deadline.left_s())
        return self._trouble if known else "its agent has not started it in time"

    def release(self) -> None:
        """Its start has succeeded: tell what was reported, and from now on at once."""
        with self._telling:
            lines, self._untold = self._untold or [], None
            for text in lines:
                self._on_line(self.name, text)
            self._tell_exit()

    def take_lines(self, lines: Sequence[str]) -> Order:
        """The agent runs it, and it wrote `lines`; the answer is what to do with it."""
        texts = [printable(line) for line in lines]
        with self._changed:
            self._started = True
            self._tail.extend(texts)
            self._changed.notify_all()
        with self._telling:
            if self._untold is not None:
                self._untold.extend(texts)
            else:
                for text in texts:
                    self._on_line(self.name, text)
        return self.order

    def take_trouble(self, reason: str) -> None:
        """The agent cannot start it."""
        self._trouble = reason
        self.take_end()

    def take_exit(self, code: int) -> None:
        """It is gone. A repeat changes nothing."""
        with self._telling:
            if self._code is None:
                self._code = code
                self._tell_exit()

    def take_end(self) -> None:
        """Nothing more is reported."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def lose(self, reason: str, code: int) -> None:
        """Its agent is gone or unreachable: it counts as ended with `code`."""
        with self._changed:
            if self._over:
                return
            self._tail.append(reason)
            self._trouble = reason
        self.take_exit(code)
        self.take_end()

    def _tell_exit(self) -> None:
        """Call `on_exit` once, when it is gone and was released. Holds `_telling`."""
        if self._code is not None and self._untold is None and not self._told_exit:
            self._told_exit = True
            self._on_exit(self.name, self._code)
