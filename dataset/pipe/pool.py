"""Runs segments through several commands in parallel: outcomes in order, retries for a failing segment.

The number of processes changes the speed, never the outcomes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import LifoQueue

from headrace.dataset.pipe.command import Command
from headrace.dataset.pipe.process import PipeProcessFailed
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput, PipeRunner
from headrace.dataset.stream.errors import PipeFailed
from headrace.timeline import Span, span

log = logging.getLogger(__name__)


class PipePool:
    """`processes` runners of one command, or of a pipe without one. Any thread."""

    def __init__(self, command: Command | None, make: Callable[[], PipeRunner], processes: int, tries: int) -> None:
        self._command, self._tries = command, tries
        self._runners = [make() for _ in range(processes)]
        self._idle: LifoQueue[PipeRunner] = LifoQueue()
        for runner in self._runners:
            self._idle.put(runner)
        # Even a single process has a thread of its own, so that the source is read while it works.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="pipe")
        self._closed = False

    def run(
        self, works: Iterable[PipeInput], max_in_memory: int | None = None
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        """The outcomes in the order of `works`, at most `max_in_memory` (`processes` + 1) of which are in memory.

        Raises PipeFailed."""
        max_in_memory = max_in_memory or len(self._runners) + 1
        in_flight: deque[tuple[PipeInput, Future[PipeOutput]]] = deque()
        try:
            for work in works:
                in_flight.append((work, self._submit(work)))
                if len(in_flight) >= max_in_memory:
                    done, future = in_flight.popleft()
                    yield done, future.result()
            while in_flight:
                done, future = in_flight.popleft()
                yield done, future.result()
        finally:
            for _, future in in_flight:
                future.cancel()

    def close(self) -> None:
        """Kill the commands and wait for their threads."""
        self._closed = True
        for runner in self._runners:
            runner.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for runner in self._runners:
            runner.reset()

    def _submit(self, work: PipeInput) -> Future[PipeOutput]:
        try:
            return self._threads.submit(self._try, work)
        except RuntimeError as error:
            what = "the pipe" if self._command is None else f"pipe command {str(self._command)!r}"
            raise PipeFailed(f"{what} was closed while it was in use") from error

    def _try(self, work: PipeInput) -> PipeOutput:
        runner = self._idle.get()
        try:
            return self._tried(runner, work)
        finally:
            self._idle.put(runner)

    def _tried(self, runner: PipeRunner, work: PipeInput) -> PipeOutput:
        """The outcome of the first try that succeeds."""
        segment = work.segment
        place = f"{segment.partition} [{segment.begin}, {segment.end})"
        attempt = 0
        while True:
            attempt += 1
            begin_s = time.monotonic()
            try:
                with span(Span.PIPE):
                    outcome = runner.run(work)
                outcome.parse_s = time.monotonic() - begin_s - outcome.pipe_s
                return outcome
            except PipeProcessFailed as failure:
                assert self._command is not None, "only commands fail so"
                runner.reset()
                if not self._closed:
                    log.warning("pipe command %s on %s, try %d: it %s", self._command, place, attempt, failure.what)
                if attempt < self._tries and not self._closed:
                    continue
                has_code = failure.exit_code is None or "exit code" in failure.what
                code = "" if has_code else f" (exit code {failure.exit_code})"
                stderr = (
                    f"; its last lines on stderr:\n{failure.stderr}"
                    if failure.stderr
                    else "; it printed nothing on stderr"
                )
                raise PipeFailed(
                    f"pipe command {str(self._command)!r} in {self._command.folder} {failure.what}{code} on segment "
                    f"{place}, try {attempt} of {self._tries} (repair it, or skip its events with `headrace skip`)"
                    f"{stderr}"
                ) from failure
