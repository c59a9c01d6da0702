"""The demo from its first line to its last: a service of its own in this process, two jobs in it, until both end.

What the jobs are is service.demo.plan's, what is seen of them service.demo.showing's.
"""

import importlib.util
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dataset.pipe.command import check_command
from millrace import listening
from millrace.address import format_address, parse_address
from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.errors import SpecError
from millrace.lifecycle import ExitCode, on_stop_signal
from millrace.locks import is_locked
from millrace.printable import say
from service.demo.forking import fork
from service.demo.plan import FREEZE_AFTER, NAME, STOP_S, TWIN, demo_job, service_of, twin_of
from service.demo.showing import Standing, ahead_of, ahead_text, frozen_text, shown
from service.hosting.folder import JobFolder
from service.hosting.host import AT_REST, Action, Host, HostedJob, NewJob, Phase
from service.launcher.running import read_report
from service.lines import count, labelled, ratio, summary_lines
from service.serve import served
from service.spec import LoadedJob
from service.status import Status
from service.store import MARKER, REPORT, remove
from trainer.commits import Commits, order_of

LISTEN = "127.0.0.1:8080"
"""Where the page is, if that is free."""
LOOK_S = 0.1
LINES = 4
"""Of the workers' output, shown on a terminal."""
GONE_S = 10.0
"""How long launchers that were killed may take to be gone."""
PARTS = ("jobs", "predicting", "records.db", "service.lock", "trash", "kept")
"""What a service keeps in its root; files beside the records' begin with their name."""


def run_demo(events: int | None, overrides: Sequence[str], listen: str | None, root: Path) -> int:
    """Show the demo until its stream ends, or a signal; the exit code. Main thread only. Raises SpecError.

    1. All is checked, then `root` is begun anew. 2. The service answers. 3. The job begins; its twin, once it knows
    something. 4. Both have ended.
    """
    job = demo_job(root, events, overrides, time.time())  # 1
    check_command(job.spec.pipe, job.folder)
    address = listen or free_address(LISTEN)
    begin_anew(root)
    logging.getLogger("service.hosting.supervisor").setLevel(logging.ERROR)  # what it does is seen in the picture
    with stop_requests() as asked, served(service_of(root, address, job)) as service:  # 2
        print(page_line(service.url), flush=True)
        demo = Demo(service.host, job)
        try:
            demo.begin()  # before it is looked at
            with shown(demo.standing, Console()) as tick:
                demo.run(asked, tick)  # 3, 4
        finally:
            demo.end()
        return demo.told_end()


@dataclass
class Requests:
    """How often the demo was asked to end."""

    number: int = 0
    wake: threading.Event = field(default_factory=threading.Event)

    def one_more(self) -> None:
        """Ask."""
        self.number += 1
        self.wake.set()


@contextmanager
def stop_requests() -> Iterator[Requests]:
    """SIGINT, SIGTERM, and that the terminal was closed, counted. Main thread only."""
    asked = Requests()
    with on_stop_signal(asked.one_more):
        before = signal.signal(signal.SIGHUP, lambda *_: asked.one_more())
        try:
            yield asked
        finally:
            signal.signal(signal.SIGHUP, before)


class Demo:
    """The two jobs. `standing` may be called on any thread."""

    def __init__(self, host: Host, job: LoadedJob) -> None:
        self._host, self._job, self._twin = host, job, twin_of(job)
        self._frozen = ""

    def begin(self) -> None:
        """Make the job that learns. Raises SpecError."""
        self._host.create(NewJob(spec=self._job.whole(), base=self._job.folder), NAME)

    def run(self, asked: Requests, tick: Callable[[], None]) -> None:
        """Until both have ended. A first request stops them, a second one kills them."""
        done = 0
        while not self._over():
            tick()
            if asked.number > done:
                done = asked.number
                self._stop() if done == 1 else self._kill()
            elif not done:
                self._freeze()
            asked.wake.wait(LOOK_S)
            asked.wake.clear()

    def standing(self) -> Standing:
        """Where the two stand now."""
        lines = [labelled(line.worker, line.text) for line in self._host.log_lines(NAME, None, -1, LINES)]
        twin = self._host.status(TWIN) if self._frozen else None
        return Standing(self._host.status(NAME), twin, self._frozen, lines)

    def end(self) -> None:
        """Have no process left, whatever happened."""
        self._stop()
        deadline = Deadline.after(STOP_S + GONE_S)
        while not self._over():
            if deadline.passed():
                self._kill()
                return
            time.sleep(LOOK_S)

    def told_end(self) -> int:
        """Say how it ended; the exit code."""
        for job in self._jobs():
            if job.outcome is not None and job.outcome.code != ExitCode.DRAINED:
                say(f"{job.name}:", *job.outcome.lines, sep="\n  ", file=sys.stderr)
                say(f"error: {job.name}: {job.outcome.reason}", file=sys.stderr)
                return job.outcome.code
            if job.phase is Phase.BROKEN:
                say(f"error: {job.name}: {job.trouble}", file=sys.stderr)
                return ExitCode.FAILED
        standing = self.standing()
        print(f"done: {NAME} has ended after {count(standing.job.number('events'))} events")
        report = read_report(self._job.store / REPORT)
        for line in summary_lines(report) if report else ():
            print(line)
        print(*told_race(standing), sep="\n")
        return ExitCode.DRAINED

    def _jobs(self) -> list[HostedJob]:
        return [job for job in self._host.jobs() if job.name in (NAME, TWIN)]

    def _over(self) -> bool:
        return all(job.phase in AT_REST for job in self._jobs())

    def _freeze(self) -> None:
        """Begin the twin where there is a commit of enough passes."""
        if self._frozen:
            return
        names = (name for name in Commits(self._job.store).names() if order_of(name)[1] >= FREEZE_AFTER)
        if (name := next(names, None)) is None:
            return
        self._host.create(NewJob(spec=self._twin.whole(), base=self._twin.folder, start=False), NAME)
        commit = fork(self._job.store, name, self._twin)
        self._host.act(TWIN, Action.RESUME, NAME)
        self._frozen = frozen_text(commit.version, Status(commit.state["progress"]).number("num_events"))

    def _stop(self) -> None:
        for job in self._jobs():
            if job.phase not in AT_REST:
                self._host.act(job.name, Action.STOP, NAME)

    def _kill(self) -> None:
        self._stop()
        for job in self._jobs():
            JobFolder(job.folder).kill()


def told_race(standing: Standing) -> Iterator[str]:
    """How the two did at the end."""
    if standing.twin is None:
        yield f"{TWIN} had no chance: it begins once {NAME} has committed {FREEZE_AFTER} passes"
        return
    mine, theirs = standing.aucs
    yield f"window AUC  {NAME} {ratio(mine)}  {TWIN} {ratio(theirs)} ({standing.frozen})"
    yield f"learning from the stream wins {ahead_text(ahead_of(standing.aucs))}"


def page_line(url: str) -> str:
    """Where to look."""
    if importlib.util.find_spec("nicegui") is None:
        return f"no live page: pip install 'millrace[ui]' brings it; the API answers at {url}/v1/jobs"
    return f"open {url}/ to watch it live; Ctrl-C ends it"


def free_address(listen: str) -> str:
    """`listen`, or any free port of the same host where it is taken."""
    host, port = parse_address(listen)
    try:
        listening.listen(host, port, "listen").close()
    except SpecError:
        return format_address(host, 0)
    return listen


def begin_anew(root: Path) -> None:
    """Remove what an earlier demo left at `root`, its processes first. Raises SpecError where it is something else."""
    if (root / MARKER).exists():  # the store of an earlier Millrace's demo
        remove(root, "clicks")
    if not root.exists():
        return
    others = sorted(path.name for path in root.iterdir() if not path.name.startswith(PARTS))
    if others or not root.is_dir():
        raise SpecError(f"{root} holds other things than a demo's ({', '.join(others[:3])}); move it away", "root")
    if is_locked(root / "service.lock"):
        raise SpecError(f"another demo runs in {root}; end it first", "root")
    folders = [JobFolder(path) for path in sorted(root.glob("jobs/*"))]
    for folder in folders:  # of a demo that was killed: its jobs go on without it
        if folder.alive():
            folder.kill()
    deadline = Deadline.after(GONE_S)
    while any(folder.alive() for folder in folders):
        deadline.check(f"waiting for the jobs of an earlier demo in {root} to be gone")
        time.sleep(LOOK_S)
    with writing(root):
        shutil.rmtree(root)
