"""`millrace run`: one job in the foreground. Claims its store, launches its workers, shows progress, prints the end."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from millrace.lifecycle import ExitCode
from millrace.printable import say
from service.begun import as_begun
from service.launcher.local import LocalLauncher
from service.launcher.running import started
from service.launcher.supervision import Outcome
from service.lines import labelled, news, summary_lines
from service.predicting.after import ThenPredict, told
from service.preflight import check_run
from service.spec import LoadedJob
from service.status import Status
from service.store import REPORT

LINE_EVERY_S = 2.0
"""How often progress is printed as plain text."""


GetStatus = Callable[[], Mapping[str, Any]]


class Show(Protocol):
    """Shows a run: takes the workers' lines of output, and the status while a context lasts."""

    def on_line(self, worker: str, text: str) -> None:
        """Take one line of a worker's output. Any thread."""
        ...

    def watching(self, status: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[None]:
        """Show `status()` repeatedly until the context ends."""
        ...


class PlainShow:
    """Lines of text on standard error: the workers' output, and progress at an interval."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s

    def on_line(self, worker: str, text: str) -> None:
        """Print a worker's line."""
        self._print(labelled(worker, text))

    def watching(self, status: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[None]:
        """Print progress and alarms on a thread, where they have changed."""
        return _Ticking(lambda last: self._print_news(Status(status()), last), self._every_s)

    def _print_news(self, status: Status, last: Status | None) -> Status:
        for line in news(status, last):
            self._print(line)
        return status

    def _print(self, text: str) -> None:
        say(text, file=sys.stderr, flush=True)


class _Ticking:
    """Calls `act` with its last return value, every `every_s` on a thread, while the context lasts."""

    def __init__(self, act: Callable[[Status | None], Status], every_s: float) -> None:
        self._act, self._every_s = act, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="show", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        last: Status | None = None
        while not self._done.wait(self._every_s):
            last = self._act(last)
        self._act(last)  # the end


def run_job(job: LoadedJob, show: Show, *, fresh: bool, listen: str | None = None) -> int:
    """Run `job` to its end; returns the exit code.

    `listen` = "127.0.0.1:8080" serves the API meanwhile. Raises SpecError where the pipe command, the store or that
    address cannot be used, before any worker starts or the store is changed.
    """
    job = job if fresh else as_begun(job)
    check_run(job, fresh=fresh)
    with ExitStack() as held:
        serve = held.enter_context(_listening(job, listen)) if listen else None
        run = held.enter_context(started(job, show.on_line, fresh=fresh))
        both = ThenPredict(run, job, show.on_line)
        with ExitStack() as shown:
            if serve:
                shown.enter_context(serve(both.status))
            shown.enter_context(show.watching(both.status))
            outcome = both.run()
        code = tell_end(outcome, run.launcher, run.report, run.store / REPORT)
        for line in told(both.predicted) if both.predicted else ():
            say(line)
        return code


@contextmanager
def _listening(job: LoadedJob, listen: str) -> Iterator[Callable[[GetStatus], AbstractContextManager[None]]]:
    """Hold the address, then serve the API there for a run.

    The modules for it are imported here: most commands serve nothing, and all would need twice the time to start.
    """
    from service.api.app import Terms, app
    from service.api.problems import problem_of
    from service.api.server import bound, serving
    from service.hosting.one_job import hosted
    from service.ui.mounting import mount

    @contextmanager
    def serve(status: GetStatus) -> Iterator[None]:
        with hosted(job, status, problem_of) as host:
            terms = Terms.of_a_run()
            api = app(host, terms)
            mount(api, terms.limits.max_streams, terms.limits.max_streams_each)
            with serving(api, listener):
                yield

    with bound(listen) as listener:
        yield serve


def tell_end(outcome: Outcome, launcher: LocalLauncher, report: Mapping[str, Any], path: Path) -> int:
    """Print the end of a run; the exit code.

    A drained run goes to standard output, any other to standard error with the last lines of the first dead worker.
    """
    if outcome.code == ExitCode.DRAINED:
        say(f"done: {outcome.reason}")
        for line in summary_lines(report) if report else ():
            say(line)
        if report:
            print(f"report    {path}")
        return outcome.code
    if outcome.first_dead is not None:
        lines = launcher.last_lines(outcome.first_dead)
        say(f"last lines of {outcome.first_dead}:", *(lines or ["(none)"]), sep="\n  ", file=sys.stderr)
    say(f"error: {outcome.reason}", file=sys.stderr)
    return outcome.code
