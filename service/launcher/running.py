"""One run of a job on this machine: its store claimed, its launcher made, what it says at the end.

How it is shown is its caller's: a person's terminal (service.running), or the service (service.hosting.launching).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.lifecycle import ExitCode
from service.begun import as_begun, told_once
from service.config import ClusterSection
from service.launcher.launchers import open_launcher
from service.launcher.local import LAUNCHER, LocalLauncher, NextPlan
from service.launcher.plan import JobPlan, plan_job
from service.launcher.restarts import RestartLimits
from service.launcher.run_folder import worker_folder
from service.launcher.runtime import OnLine
from service.launcher.supervision import Outcome
from service.spec import LoadedJob
from service.store import PAUSED, REPORT, WORKERS, claimed, clear_live
from trainer.commits import Commits
from trainer.log import newest_generation
from trainer.mirror.address import parse
from trainer.mirror.content import lookup
from trainer.mirror.fetch import fetch, newest_generation_in
from trainer.recovery import replay_first

FETCH_S = 3600.0
"""How long bringing a commit from the mirror may take."""


class Run:
    """A run whose store is claimed. `run` in the main thread; the rest in any."""

    def __init__(self, launcher: LocalLauncher, store: Path) -> None:
        self.launcher, self.store = launcher, store
        self.report: Mapping[str, Any] = {}
        """What the chief wrote at its end."""
        self._end: Mapping[str, Any] = {}

    def run(self) -> Outcome:
        """Run the job to its end; see Launcher.run."""
        outcome = self.launcher.run()
        self.report = read_report(self.store / REPORT)
        self._end = last_status(outcome, self.report, self.launcher.status())
        return outcome

    def status(self) -> Mapping[str, Any]:
        """See Launcher.status; after the end, how it ended."""
        return {**self.launcher.status(), **self._end}


@contextmanager
def started(
    job: LoadedJob, on_line: OnLine, *, fresh: bool = False, paused: bool = False, private: Path | None = None
) -> Iterator[Run]:
    """The run of `job` in its store, claimed and held until the context ends.

    `fresh` removes what the store holds; `paused`: it begins without planning a pass of events; `private`: where what
    workers are told lies instead of in the store. Raises SpecError where the store cannot be used.
    """
    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=fresh))
        held.callback(clear_live, store)  # commits hold what is needed; disk is not kept for a job that has ended
        hold(store, paused)
        newest = 0 if fresh else fetch_from_mirror(job, on_line)
        job = as_begun(job)
        if text := told_once(job):
            on_line(LAUNCHER, text)
        folder = held.enter_context(worker_folder(store / WORKERS, private))
        launcher = held.enter_context(open_launcher(preloaded(job.spec.cluster)))
        limits = restart_limits(job.spec.cluster)
        plans = phases(job, folder, newest)
        yield Run(LocalLauncher(job.spec.name, plans, on_line, launcher=launcher, restarts=limits), store)


def hold(store: Path, paused: bool) -> None:
    """Have the job in `store` plan no pass of events, or plan them again. Raises Unwritable."""
    with writing(store / PAUSED):
        if paused:
            (store / PAUSED).touch()
        else:
            (store / PAUSED).unlink(missing_ok=True)


def phases(job: LoadedJob, folder: Path, newest: int = 0) -> Iterator[NextPlan]:
    """The ways in which generations of `job` are planned, one after another; private files go below `folder`.

    Their numbers are above `newest`.

    Where the spec has changed, what is logged is first trained under the old ones, which the log holds.
    """
    while (old := replay_first(job.store, job.full)) is not None:
        yield partial(next_plan, job.under(old, job.store), folder, "logged", newest)
    yield partial(next_plan, job, folder, None, newest)


def next_plan(job: LoadedJob, folder: Path, until: str | None, newest: int, last: int) -> JobPlan:
    """The plan of the generation after `newest`, `last` and all that the log knows. No generation runs meanwhile."""
    generation = max(newest, last, newest_generation(job.store / "log")) + 1
    clear_live(job.store)
    return plan_job(job, folder / f"g{generation}", generation=generation, until=until)


def fetch_from_mirror(job: LoadedJob, on_line: OnLine) -> int:
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
        on_line(LAUNCHER, f"passed over in the mirror: {reason}")
    on_line(LAUNCHER, f"going on from the mirror, at commit {fetched.name}, on a new timeline")
    return fetched.generation


def preloaded(cluster: ClusterSection) -> list[str]:
    """What workers import, also where it is only as they go along.

    Shards, the first to start, are forked before torch is loaded.
    """
    trainer = ["trainer.job", "millrace.role", "pyarrow.compute"]
    return ["pserver.server", *trainer] if cluster.num_shards else trainer


def restart_limits(cluster: ClusterSection) -> RestartLimits:
    """How many restarts a job allows."""
    return RestartLimits(max_restarts=cluster.max_restarts, window_s=cluster.restart_window)


def read_report(path: Path) -> Mapping[str, Any]:
    """What the chief wrote at its end; empty where it did not come so far."""
    report = documents.read_object(path) if path.exists() else {}
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
