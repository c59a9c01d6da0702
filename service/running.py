"""One job in the foreground: claims its store, launches its workers, shows how it goes, tells how it ended."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dataset.pipe.command import check_command
from millrace.config import validate
from millrace.deadline import Deadline
from millrace.lifecycle import ExitCode
from service.api.app import app
from service.api.jobs import OneJob
from service.api.server import bound, serving
from service.config import ClusterSection
from service.launcher.local import LAUNCHER, Launcher, LocalLauncher, NextPlan
from service.launcher.nursery import Nursery, able
from service.launcher.plan import JobPlan, plan_job
from service.launcher.restarts import RestartLimits
from service.launcher.run_folder import run_folder
from service.launcher.supervision import Outcome
from service.lines import labelled, news, summary_lines
from service.spec import Job, LoadedJob
from service.status import Status
from service.store import REPORT, WORKERS, claimed, clear_live
from trainer.commits import Commits
from trainer.log import newest_generation
from trainer.mirror.address import parse
from trainer.mirror.content import lookup
from trainer.mirror.fetch import fetch, newest_generation_in
from trainer.recovery import replay_first

FETCH_S = 3600.0
"""How long bringing a commit from the mirror may take."""
LINE_EVERY_S = 2.0
"""How often plain text says where the job stands."""


class Show(Protocol):
    """How a run is shown while it goes on: a context that takes the workers' lines of output."""

    def on_line(self, worker: str, text: str) -> None:
        """Take one line of a worker's output. Any thread."""
        ...

    def watching(self, status: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[None]:
        """Show what `status` answers, again and again, until the context ends."""
        ...


class PlainShow:
    """Lines of text on standard error: the workers' output, and progress at an interval."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s

    def on_line(self, worker: str, text: str) -> None:
        """Print a worker's line."""
        self._print(labelled(worker, text))

    def watching(self, status: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[None]:
        """Print progress and alarms from a thread, where they have changed."""
        return _Ticking(lambda last: self._tell(Status(status()), last), self._every_s)

    def _tell(self, status: Status, last: Status | None) -> Status:
        for line in news(status, last):
            self._print(line)
        return status

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Ticking:
    """Calls `act` with its own last answer every `every_s` on a thread, as long as the context lasts."""

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
        self._act(last)  # how it ended


def run_job(job: LoadedJob, show: Show, *, fresh: bool, listen: str | None = None) -> int:
    """Run `job` to its end; returns the exit code.

    `listen` = "127.0.0.1:8080" serves the API meanwhile. Raises SpecError, before any worker starts and the store is
    touched, where the pipe command, the store or that address cannot be used.
    """
    check_command(job.spec.pipe, job.folder)
    with ExitStack() as held:
        listener = held.enter_context(bound(listen)) if listen else None
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=fresh))
        held.callback(clear_live, store)  # commits hold what is needed; disk is not kept for a job that has ended
        newest = 0 if fresh else fetch_from_mirror(job, show)
        folder = held.enter_context(run_folder(store / WORKERS))
        launcher = LocalLauncher(
            job.spec.name,
            phases(job, folder, newest),
            show.on_line,
            starter=held.enter_context(Nursery(preloaded(job.spec.cluster))) if able() else None,
            restarts=restart_limits(job.spec.cluster),
        )
        end: dict[str, Any] = {}

        def status() -> Mapping[str, Any]:
            return {**launcher.status(), **end}

        with ExitStack() as shown:
            if listener:
                shown.enter_context(serving(app(OneJob(job.spec.name, status, store)), listener))
            shown.enter_context(show.watching(status))
            outcome = launcher.run()
            report = read_report(store / REPORT)
            end |= last_status(outcome, report, launcher.status())
        return tell_end(outcome, launcher, report, store / REPORT)


def phases(job: LoadedJob, folder: Path, newest: int = 0) -> Iterator[NextPlan]:
    """The ways in which generations of `job` are planned, one after another; private files go below `folder`.

    Their numbers are above `newest`.

    Where the spec has changed, what is logged is first trained under the old ones, which the log holds.
    """
    while (old := replay_first(job.store, job.raw)) is not None:
        before = LoadedJob(spec=validate(Job, old), raw=dict(old), folder=job.folder, store=job.store)
        yield partial(next_plan, before, folder, "logged", newest)
    yield partial(next_plan, job, folder, None, newest)


def next_plan(job: LoadedJob, folder: Path, until: str | None, newest: int, last: int) -> JobPlan:
    """The plan of the generation after `newest`, `last` and all that the log knows. No generation runs meanwhile."""
    generation = max(newest, last, newest_generation(job.store / "log")) + 1
    clear_live(job.store)
    return plan_job(job, folder / f"g{generation}", generation=generation, until=until)


def fetch_from_mirror(job: LoadedJob, show: Show) -> int:
    """Bring the newest commit of `store.mirror` to a store that holds none: the job goes on from it.

    -> the newest generation that the mirror knows of; 0 where nothing came from it.
    """
    if job.spec.store.mirror is None or newest_generation(job.store / "log"):
        return 0
    uri, deadline = parse(job.spec.store.mirror, job.folder).text, Deadline.after(FETCH_S)
    if Commits(job.store).names():  # fetched by a run that was killed before it claimed
        return newest_generation_in(uri, deadline)
    catalog = lookup(uri, deadline)
    if not catalog.commits and not catalog.damaged:
        return 0
    fetched = fetch(uri, job.store, job.spec.name, deadline)
    for reason in fetched.passed_over:
        show.on_line(LAUNCHER, f"passed over in the mirror: {reason}")
    show.on_line(LAUNCHER, f"going on from the mirror, at commit {fetched.name}, on a new timeline")
    return fetched.generation


def preloaded(cluster: ClusterSection) -> list[str]:
    """What workers import, also where it is only as they go along.

    Shards, the first to start, are forked before torch is loaded.
    """
    trainer = ["trainer.job", "millrace.role", "pyarrow.compute", "torch._inductor.config"]
    return ["pserver.server", *trainer] if cluster.num_shards else trainer


def restart_limits(cluster: ClusterSection) -> RestartLimits:
    """How many restarts a job allows."""
    return RestartLimits(max_restarts=cluster.max_restarts, window_s=cluster.restart_window)


def read_report(path: Path) -> Mapping[str, Any]:
    """What the chief wrote at its end; empty where it did not come so far."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return report


def last_status(outcome: Outcome, report: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What to put over the chief's last answer, which was given some time before the end."""
    if outcome.code != ExitCode.DRAINED:
        return {"state": "failed"}
    told = {key: report[key] for key in ("events", "samples", "rejected", "positions", "metrics") if key in report}
    if "passes" not in report:
        return {"state": "done", **told}
    version = report["passes"]
    commit = {**(before.get("commit") or {}), "version": version, "age_s": 0.0, "failing": None}  # an end waits for it
    return {"state": "done", **told, "pass": version, "version": version, "lag": {}, "commit": commit, "trouble": ""}


def tell_end(outcome: Outcome, launcher: Launcher, report: Mapping[str, Any], path: Path) -> int:
    """Say how the run ended, on standard output if well, else on standard error with the first death's last lines."""
    if outcome.code == ExitCode.DRAINED:
        print(f"done: {outcome.reason}")
        for line in summary_lines(report) if report else ():
            print(line)
        if report:
            print(f"report    {path}")
        return outcome.code
    if outcome.first_dead is not None:
        lines = launcher.last_lines(outcome.first_dead)
        print(f"last lines of {outcome.first_dead}:", *(lines or ["(none)"]), sep="\n  ", file=sys.stderr)
    print(f"error: {outcome.reason}", file=sys.stderr)
    return outcome.code
