"""Runs the demo: a service of its own in this process with three jobs, until all have ended."""

import json
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.address import format_address, parse_address
from headrace.config import load_toml
from headrace.dataset.pipe.command import check_pipe
from headrace.dataset.spec.config import PipeSection
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.durable import is_locked, writing
from headrace.errors import SpecError
from headrace.extras import missing
from headrace.http import listening
from headrace.lifecycle import ExitCode, on_stop_signal
from headrace.printable import print_printable
from headrace.process import run
from headrace.service.auth.config import AccessSection, AllowSection
from headrace.service.cluster.job_run import read_report
from headrace.service.cluster.store import REPORT, marker_of, remove
from headrace.service.history.fork_of_job import fork
from headrace.service.jobs.config import LimitsSection, ServiceConfig
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import AT_REST, Action, Host, HostedJob, NewJob, Phase
from headrace.service.monitor.display import REFRESH_PER_S, render
from headrace.service.monitor.lines import count, labelled, ratio, summary_lines
from headrace.service.monitor.shows import LINE_EVERY_S
from headrace.service.server.serve import running_service
from headrace.service.spec.examples import EXAMPLES
from headrace.service.spec.job import LoadedJob, job_of
from headrace.service.spec.launchers import check_launcher
from headrace.trainer.checkpoint.commits import Commits, order_of
from headrace.trainer.exposed_figures import numbers
from headrace.trainer.job_status import Measures, Status, read
from headrace.trainer.run_report import RunReport

# The specs of the demo's jobs: the example at a laptop's pace, its frozen twin, and one with late clicks. Pure.
#
# The first two read the same simulated stream, which began at the same time: the later job catches up, as on a topic.
# The third one joins two files, impressions and clicks that come minutes later; a program beside its job file writes
# them.

EXAMPLE = EXAMPLES / "clicks" / "job.toml"
"""The job of the demo."""
LATER = EXAMPLES / "clicks_later"
"""The example whose clicks come later."""
NAME, TWIN, LATE = "demo", "demo-frozen", "demo-late"
LATE_IMPRESSIONS = 10_000
"""Half an hour of event time."""
RATE = 1500
"""Events a second: two trainers and a page leave some room on a laptop with two cores."""
PASS_EVENTS = 2000
"""Most events of a pass."""
FREEZE_AFTER = 5
"""The twin has learnt from so many passes: 10,000 events, a tenth of a simulated day."""
STOP_S = 20.0
"""Longest time for a job to finish its pass and commit when the demo ends; then it is killed."""


def demo_job(
    root: Path, events: int | None, overrides: Sequence[str], since: float, example: Path = EXAMPLE
) -> LoadedJob:
    """The job that learns. Its stream began at the unix time `since` and ends after `events`. Raises SpecError."""
    ours = [f"name={json.dumps(NAME)}", f"passes.max_events={PASS_EVENTS}", f"commit.every_passes={FREEZE_AFTER}"]
    for name in load_toml(example).get("sources", {}):
        ours += [f"sources.{name}.rate={RATE}", f"sources.{name}.since={since}"]
        ours += [f"sources.{name}.events={events}"] if events else []
    raw = load_toml(example, [*ours, *overrides])
    store = {**raw.get("store", {}), "path": str(root / "jobs" / NAME / "store")}
    return job_of({**raw, "store": store}, example.resolve().parent)


def twin_of(job: LoadedJob) -> LoadedJob:
    """A copy of `job` that only predicts; it begins at a commit of `job`."""
    left_out = ("exports", "commit", "predict", "evaluator")
    raw: dict[str, Any] = {key: value for key, value in job.whole().items() if key not in left_out}
    store = job.store.parents[1] / TWIN / "store"
    raw["train"] = {key: value for key, value in raw.get("train", {}).items() if key != "learn_until"}
    sections: Mapping[str, Mapping[str, Any]] = {
        "train": {"learn": False},
        "metrics": {"halves": False},  # it has seen one half only
        "store": {"path": str(store)},
    }
    changed = {name: {**raw.get(name, {}), **section} for name, section in sections.items()}
    return job_of({**raw, **changed, "name": TWIN}, job.folder)


def data_of(root: Path) -> Path:
    """The folder of the files of the job with late clicks: beside the root, whose files no job may read."""
    return root.resolve().with_name(f"{root.name}-late")


def late_job(root: Path) -> LoadedJob:
    """The job with late clicks. Raises SpecError."""
    names = ("impressions", "clicks")
    paths = [f"sources.{name}.paths={json.dumps([f'{name}.jsonl'])}" for name in names]
    raw = load_toml(LATER / "job.toml", [f"name={json.dumps(LATE)}", "passes.max_events=1000", *paths])
    store = {"path": str(root.resolve() / "jobs" / LATE / "store")}
    return job_of({**raw, "store": store}, data_of(root))


def late_command(root: Path) -> list[str]:
    """The program that writes its events."""
    program, num = str(LATER / "events.py"), str(LATE_IMPRESSIONS)
    return [sys.executable, program, "--impressions", num, "--out", str(data_of(root))]


def service_of(root: Path, listen: str, job: LoadedJob) -> ServiceConfig:
    """The demo's own service: for this machine only, where every client may operate these jobs."""
    pipes = (job.spec.pipe.command,) if isinstance(job.spec.pipe, PipeSection) else ()
    commands = tuple(each.command for each in job.spec.exports.values() if each.command)
    return ServiceConfig(
        root=root,
        listen=listen,
        access=AccessSection(anonymous="operator"),
        allow=AllowSection(pipe_commands=pipes, export_commands=commands, roots=(str(job.folder), str(data_of(root)))),
        limits=LimitsSection(stop=STOP_S, max_jobs=8),
    )


# The display of the demo: the job that learns, and its AUC beside the AUC of its frozen twin.
#
# `race_line` and `render_race` are pure. Without a terminal, a line of text is printed now and then.


@dataclass(frozen=True, slots=True)
class Standing:
    """The status of the jobs."""

    job: Status
    twin: Status | None = None
    """None: it has not started."""
    frozen: str = ""
    """The state at which the twin is frozen, in words."""
    lines: Sequence[str] = ()
    """The last lines of the workers' output."""
    late: Status | None = None
    """The job with late clicks."""

    @property
    def aucs(self) -> tuple[float | None, float | None]:
        """The window AUC of the first task: of the job and of its twin."""
        twin = None if self.twin is None else auc_of(self.twin.metrics.window)
        return auc_of(self.job.metrics.window), twin


def auc_of(window: Measures) -> float | None:
    """The window AUC of the first task; None where there is none yet."""
    return next((numbers(found).get("auc") for found in window.values()), None)


def ahead_of(aucs: tuple[float | None, float | None]) -> float | None:
    """The AUC of the job that learns minus that of its twin."""
    job, twin = aucs
    return None if job is None or twin is None else job - twin


def ahead_text(ahead: float | None) -> str:
    """A difference of AUCs with its sign, or a dash."""
    return "-" if ahead is None else f"{ahead:+.4f}"


def frozen_text(version: int, events: float | None) -> str:
    """The state at which the twin is frozen, in words."""
    return f"frozen after {count(version)} passes, {count(events)} events"


def race_line(standing: Standing) -> str:
    """Both jobs in one line."""
    job, twin = standing.job, standing.twin
    parts = [f"{NAME} {job.state}, {count(job.events)} events"]
    mine, theirs = standing.aucs
    parts.append(f"window AUC {ratio(mine)}")
    if twin is None:
        parts.append(f"{TWIN} begins after pass {FREEZE_AFTER}")
    else:
        parts.append(f"{TWIN} {ratio(theirs)} at {count(twin.events)}")
        parts.append(f"learning wins {ahead_text(ahead_of(standing.aucs))}")
    return "  ".join(parts)


def render_race(standing: Standing) -> RenderableType:
    """Both jobs side by side, for a terminal."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("", "window AUC", "events", "state"):
        table.add_column(heading, justify="left" if heading in ("", "state") else "right")
    mine, theirs = standing.aucs
    job, twin = standing.job, standing.twin or Status()
    state = twin.state if standing.twin else f"begins after pass {FREEZE_AFTER}"
    table.add_row(f"{NAME}: learns on", Text(ratio(mine), style="bold green"), count(job.events), "")
    table.add_row(f"{TWIN}: {standing.frozen or 'only predicts'}", ratio(theirs), count(twin.events), state)
    late = standing.late or Status()
    table.add_row(f"{LATE}: clicks come minutes later", ratio(auc_of(late.metrics.window)), count(late.events), "")
    table.add_row("learning from the stream wins", Text(ahead_text(ahead_of(standing.aucs)), style="bold"), "", "")
    return Panel(table, title="every prediction is made before its event is learnt", title_align="left")


@contextmanager
def show_race(standing: Callable[[], Standing], console: Console) -> Iterator[Callable[[], None]]:
    """Show `standing()` while the context lasts. The caller often calls the function that it yields."""
    if console.is_terminal:

        def picture() -> RenderableType:
            now = standing()
            return Group(render(now.job, now.lines), render_race(now))

        with Live(console=console, get_renderable=picture, refresh_per_second=REFRESH_PER_S):
            yield lambda: None
    else:
        ticker = _Lines(standing)
        yield ticker.tick


class _Lines:
    """Prints a line on standard error now and then, where it has changed."""

    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._standing, self._at_s, self._last = standing, time.monotonic() + LINE_EVERY_S, ""

    def tick(self) -> None:
        if time.monotonic() < self._at_s:
            return
        self._at_s = time.monotonic() + LINE_EVERY_S
        if (line := race_line(self._standing())) != self._last:
            self._last = line
            print_printable(line, file=sys.stderr, flush=True)


LISTEN = "127.0.0.1:8080"
"""Address of the page, if it is free."""
POLL_S = 0.1
LINES = 4
"""Lines of the workers' output that a terminal shows."""
GONE_S = 10.0
"""Longest wait for launchers that were killed."""
WRITE_S = 60.0
"""Longest time to write the events of the job with late clicks."""
PARTS = ("jobs", "predicting", "records.db", "service.lock", "trash", "kept")
"""Names in the root of a service. Files of the database begin with records.db."""


def run_demo(events: int | None, overrides: Sequence[str], listen: str | None, root: Path) -> int:
    """Run the demo until its stream ends, or a signal; the exit code. Main thread only. Raises SpecError.

    1. Check everything, then empty `root`. 2. Start the service. 3. Start the job, and its twin after some passes.
    4. Wait until all have ended.
    """
    job, late = demo_job(root, events, overrides, time.time()), late_job(root)  # 1
    check_pipe(job.spec.pipe, Schema.of(job.spec.slots), job.folder)
    check_launcher(job.spec.cluster)
    address = listen or free_address(LISTEN)
    clear_root(root)
    logging.getLogger("headrace.service.jobs.supervisor").setLevel(logging.ERROR)  # the display shows what it does
    with stop_requests() as asked, running_service(service_of(root, address, job)) as service:  # 2
        print(page_line(service.url), jobs_line(), sep="\n", flush=True)
        write_late_events(root)
        demo = Demo(service.host, job, late)
        try:
            demo.begin()  # before the display reads its status
            with show_race(demo.standing, Console()) as tick:
                demo.run(asked, tick)  # 3, 4
        finally:
            demo.end()
        return demo.print_end()


def write_late_events(root: Path) -> None:
    """Write the events of the job with late clicks. Raises SpecError where that fails."""
    finished = run(late_command(root), deadline=Deadline.after(WRITE_S))
    if finished.code != 0:
        words = finished.errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SpecError(f"the events of late clicks were not written: {words or f'not within {WRITE_S:g} s'}")


@dataclass
class StopRequests:
    """Counts the requests to end the demo."""

    number: int = 0
    wake: threading.Event = field(default_factory=threading.Event)

    def one_more(self) -> None:
        """Count a request."""
        self.number += 1
        self.wake.set()


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Count SIGINT, SIGTERM and SIGHUP (a closed terminal). Main thread only."""
    asked = StopRequests()
    with on_stop_signal(asked.one_more, signal.SIGHUP):
        yield asked


class Demo:
    """The jobs. `standing` is for any thread."""

    def __init__(self, host: Host, job: LoadedJob, late: LoadedJob) -> None:
        self._host, self._job, self._twin, self._late = host, job, twin_of(job), late
        self._frozen = ""

    def begin(self) -> None:
        """Create the job that learns, and the one with late clicks. Raises SpecError."""
        for job in (self._job, self._late):
            self._host.create(NewJob(spec=job.whole(), base=job.folder), NAME)

    def run(self, asked: StopRequests, tick: Callable[[], None]) -> None:
        """Wait until all have ended. A first request stops them, a second one kills them."""
        done = 0
        while not self._over():
            tick()
            if asked.number > done:
                done = asked.number
                self._stop() if done == 1 else self._kill()
            elif not done:
                self._freeze()
            asked.wake.wait(POLL_S)
            asked.wake.clear()

    def standing(self) -> Standing:
        """The present status of all."""
        lines = [labelled(line.worker, line.text) for line in self._host.log_lines(NAME, None, -1, LINES)]
        twin = self._host.status(TWIN) if self._frozen else None
        return Standing(self._host.status(NAME), twin, self._frozen, lines, self._host.status(LATE))

    def end(self) -> None:
        """End all jobs, so that no process is left."""
        self._stop()
        deadline = Deadline.after(STOP_S + GONE_S)
        while not self._over():
            if deadline.passed():
                self._kill()
                return
            time.sleep(POLL_S)

    def print_end(self) -> int:
        """Print how the demo ended; the exit code."""
        for job in self._jobs():
            if job.outcome is not None and job.outcome.code != ExitCode.DRAINED:
                print_printable(f"{job.name}:", *job.outcome.lines, sep="\n  ", file=sys.stderr)
                print_printable(f"error: {job.name}: {job.outcome.reason}", file=sys.stderr)
                return job.outcome.code
            if job.phase is Phase.BROKEN:
                print_printable(f"error: {job.name}: {job.trouble}", file=sys.stderr)
                return ExitCode.FAILED
        standing = self.standing()
        print(f"done: {NAME} has ended after {count(standing.job.events)} events")
        report = read_report(self._job.store / REPORT)
        for line in summary_lines(report) if report else ():
            print(line)
        print(*race_lines(standing), *late_lines(read_report(self._late.store / REPORT)), sep="\n")
        return ExitCode.DRAINED

    def _jobs(self) -> list[HostedJob]:
        return [job for job in self._host.jobs() if job.name in (NAME, TWIN, LATE)]

    def _over(self) -> bool:
        return all(job.phase in AT_REST for job in self._jobs())

    def _freeze(self) -> None:
        """Start the twin once there is a commit of enough passes."""
        if self._frozen:
            return
        names = (name for name in Commits(self._job.store).names() if order_of(name)[1] >= FREEZE_AFTER)
        if (name := next(names, None)) is None:
            return
        self._host.create(NewJob(spec=self._twin.whole(), base=self._twin.folder, start=False), NAME)
        commit = fork(self._job.store, name, self._twin)
        self._host.act(TWIN, Action.RESUME, NAME)
        self._frozen = frozen_text(commit.version, commit.state["progress"]["num_events"])

    def _stop(self) -> None:
        for job in self._jobs():
            if job.phase not in AT_REST:
                self._host.act(job.name, Action.STOP, NAME)

    def _kill(self) -> None:
        self._stop()
        for job in self._jobs():
            JobFolder(job.folder).kill()


def race_lines(standing: Standing) -> Iterator[str]:
    """The comparison of both jobs at the end, as lines."""
    if standing.twin is None:
        yield f"{TWIN} did not run: it begins once {NAME} has committed {FREEZE_AFTER} passes"
        return
    mine, theirs = standing.aucs
    yield f"window AUC  {NAME} {ratio(mine)}  {TWIN} {ratio(theirs)} ({standing.frozen})"
    yield f"learning from the stream wins {ahead_text(ahead_of(standing.aucs))}"


def late_lines(report: Mapping[str, Any] | None) -> Iterator[str]:
    """The results of the job with late clicks, as lines."""
    if report is None:
        return
    found = read(RunReport, report)
    yield f"{LATE}: {count(found.samples)} impressions joined with clicks that came minutes later"
    counts = ", ".join(f"{count(number)} {name}" for name, number in found.left_out.items())
    yield f"  window AUC {ratio(auc_of(found.metrics.window))}; left out: {counts or '-'}"


def page_line(url: str) -> str:
    """The line that names the page's address."""
    if problem := missing("nicegui", "the live page"):
        return f"{problem}; the API answers at {url}/v1/jobs"
    return f"open {url}/ to watch it live; Ctrl-C ends it"


def jobs_line() -> str:
    """The line that says what each job does."""
    return f"{NAME} learns on; {TWIN} only predicts; {LATE} joins clicks that come minutes later, and ends by itself"


def free_address(listen: str) -> str:
    """`listen`, or any free port of the same host where that is taken."""
    host, port = parse_address(listen)
    try:
        listening.listen(host, port, "listen").close()
    except SpecError:
        return format_address(host, 0)
    return listen


def clear_root(root: Path) -> None:
    """End and remove an earlier demo at `root`. Raises SpecError where `root` holds other files."""
    if marker_of(root).exists():  # the demo of an early version was a store
        remove(root, "clicks")
    if not root.exists():
        return
    others = sorted(path.name for path in root.iterdir() if not path.name.startswith(PARTS))
    if others or not root.is_dir():
        raise SpecError(f"{root} holds files that are not of a demo ({', '.join(others[:3])}); move it away", "root")
    if is_locked(root / "service.lock"):
        raise SpecError(f"another demo runs in {root}; end it first", "root")
    folders = [JobFolder(path) for path in sorted(root.glob("jobs/*"))]
    for folder in folders:  # the jobs of a demo that was killed still run
        if folder.alive():
            folder.kill()
    deadline = Deadline.after(GONE_S)
    while any(folder.alive() for folder in folders):
        deadline.check(f"waiting for the jobs of an earlier demo in {root} to be gone")
        time.sleep(POLL_S)
    with writing(root):
        shutil.rmtree(root)
