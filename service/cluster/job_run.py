"""One run of a job on this machine: claims its store, makes its launcher, reads its report at the end.

The caller shows it: on a terminal (service.server.foreground_run), or to the service (service.jobs.launcher).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace import documents
from headrace.codec import plain
from headrace.dataset.loader.dead_letters import format_example
from headrace.durable import REAL, write_whole, writing
from headrace.lifecycle import ExitCode, on_stop_signal
from headrace.printable import print_printable
from headrace.service.cluster.elastic import Elasticity, ElasticLauncher
from headrace.service.cluster.evaluating import Evaluating, evaluating
from headrace.service.cluster.fetched_commits import check_fresh, fetch_commits
from headrace.service.cluster.generation_plans import GenerationPlans, in_force, numbers_of
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.replica_joining import replicas_joining
from headrace.service.cluster.run_folder import worker_folder
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine, SpareLauncher, WorkerRole
from headrace.service.cluster.store import PAUSED, REPORT, WORKERS, claimed, clear_live
from headrace.service.cluster.store_defaults import old_defaults_note, with_store_defaults
from headrace.service.cluster.supervision import RestartLimits, RunOutcome
from headrace.service.cluster.trace_file import begin_trace, finish_trace
from headrace.service.cluster.tuning import tune_first
from headrace.service.monitor.lines import summary_lines
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import launcher_of
from headrace.shared_folder import SharedFolder
from headrace.timeline import TraceWindow
from headrace.trainer.exports.scores import EVALUATOR
from headrace.trainer.job_status import CommitStatus, MetricsStatus, Status, read
from headrace.trainer.run_report import RunReport


class JobRun:
    """A run whose store is claimed. `run` belongs to the main thread; the rest is for any thread."""

    def __init__(
        self,
        launcher: JobRunner,
        store: Path,
        finish_trace: Callable[[], str] = str,
        *,
        joins: bool = False,
        evaluator: Evaluating | None = None,
    ) -> None:
        """`finish_trace` is called at the end; see `trace`. `joins`: events may wait for others, and give no sample."""
        self.launcher, self.store, self._joins, self._evaluator = launcher, store, joins, evaluator
        self._finish_trace = finish_trace
        self.trace = ""
        """Where the trace is, in words; "" without one."""
        self.report: Mapping[str, Any] = {}
        """The report that rank 0 wrote at its end."""
        self._end: Status | None = None

    def run(self) -> RunOutcome:
        """Run the job to its end; see JobRunner.run. Once it has drained, the evaluator scores its last versions."""
        outcome = self.launcher.run()
        self.trace = self._finish_trace()
        self.report = read_report(self.store / REPORT)
        if outcome.code == ExitCode.DRAINED and not self.launcher.stopped:
            outcome = self.judged(outcome)
        if self._evaluator is not None and self.report:
            if outcome.code == ExitCode.DRAINED and not self.launcher.stopped:
                with on_stop_signal(self._stop_scoring):
                    self._evaluator.finish()
            self.add_to_report(EVALUATOR, plain(self._evaluator.status()))
        if self.report and self.launcher.tuning is not None:
            self.add_to_report("tuning", plain(self.launcher.tuning))
        self._end = last_status(outcome, self.report, self.launcher.status())
        return outcome

    def judged(self, outcome: RunOutcome) -> RunOutcome:
        """The outcome of a run whose stream is drained, by its report; see outcome_of_report. Any thread."""
        return outcome_of_report(outcome, read_report(self.store / REPORT), joins=self._joins)

    def _stop_scoring(self) -> None:
        assert self._evaluator is not None, "its scores are waited for"
        self.launcher.stopped = True
        self._evaluator.hurry()

    def status(self) -> Status:
        """After the end, with the final figures."""
        status = self._end or self.launcher.status()
        return status if self._evaluator is None else replace(status, evaluator=self._evaluator.status())

    def drain(self) -> None:
        """Stop after the pass in training, without waiting for scores. Any thread."""
        if self._evaluator is not None:
            self._evaluator.hurry()
        self.launcher.drain()

    def add_to_report(self, section: str, content: object) -> None:
        """Add a section to the report of the run. Raises Unwritable."""
        path = self.store / REPORT
        self.report = {**read_report(path), section: content}
        with writing(path):
            write_whole(REAL, path, json.dumps(self.report, indent=2, allow_nan=False).encode())


def outcome_of_report(outcome: RunOutcome, report: Mapping[str, Any], *, joins: bool) -> RunOutcome:
    """The outcome of a run whose stream is drained: a failure if there were events, and no sample came of them.

    Events outside `since` and `until` are left out, and events may wait in a join: neither is a fault."""
    rejected = Counter[str](report.get("rejected", {}))
    events = int(report.get("events", 0)) - sum(report.get("left_out", {}).values())
    if report.get("samples", 0) or events <= 0 or (joins and not rejected):
        return outcome
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in rejected.most_common(3))
    reasons += format_example(rejected, report.get("first_rejected", {}))
    advice = "look at the dead letters, repair the stream or the pipe, and start again with --fresh"
    if not rejected:
        reasons, advice = "none", "look at what the pipe emits: python -m headrace.dataset --spec"
    text = f"nothing was learned: no sample came of {events:,} events (rejected: {reasons}); {advice}"
    return RunOutcome(ExitCode.NO_SAMPLES, text)


@contextmanager
def open_run(
    job: LoadedJob,
    on_line: OnLine,
    *,
    fresh: bool = False,
    paused: bool = False,
    private: Path | None = None,
    trace: TraceWindow | None = None,
    stopped: ExitCode = ExitCode.DRAINED,
) -> Iterator[JobRun]:
    """The run of `job` in its store, which is claimed until the context ends.

    `fresh` removes the old content of the store. `paused`: the run begins without planning a pass of events.
    `private`: the folder for configurations of workers, instead of one in the store. `trace`: the steps of a timeline.
    `stopped`: the exit code of agents where the job was stopped. Raises SpecError where the store cannot be used.
    """
    if fresh:
        check_fresh(job)
    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=fresh))
        held.callback(clear_live, store)  # commits hold all that is needed
        set_paused(store, paused)
        newest = fetch_commits(job, on_line, fresh=fresh)
        written, job = job, with_store_defaults(job)
        if text := old_defaults_note(job):
            on_line(LAUNCHER, text)
        folder = held.enter_context(worker_folder(store / WORKERS, private))
        launcher: Launcher = held.enter_context(launcher_of(job.spec.cluster).of_job(job))
        held.enter_context(replicas_joining(job, on_line))
        limits = restart_limits(job.spec.cluster)
        spare, sees = isinstance(launcher, SpareLauncher), held.enter_context(_seen_by_workers(job))
        plans = GenerationPlans(job, folder, newest, spare=spare, sees=sees, trace=trace)
        elastic = None
        if job.spec.cluster.elastic is not None:
            assert isinstance(launcher, ElasticLauncher), "the check of the job has refused any other"
            elastic = Elasticity(job.spec.cluster, launcher, plans, on_line)
        runner = JobRunner(
            job.spec.name,
            plans.phases(),
            on_line,
            launcher=launcher,
            restarts=limits,
            standbys=plans,
            elastic=elastic,
            stop_code=stopped,
        )
        tune_first(job, plans, runner, launcher, folder, on_line)
        joins, evaluator = job.spec.join is not None, held.enter_context(evaluating(written, folder, on_line))
        if trace is None:
            yield JobRun(runner, store, joins=joins, evaluator=evaluator)
            return
        begin_trace(store)
        yield JobRun(runner, store, lambda: finish_trace(store, workers_of(job)), joins=joins, evaluator=evaluator)


def workers_of(job: LoadedJob) -> list[str]:
    """The names of the trainers and shards in force that are processes."""
    trainers, shards = numbers_of(in_force(job))
    inside = job.spec.train.rows == "device"
    numbers = (WorkerRole.TRAINER, trainers), (WorkerRole.SHARD, 0 if inside else shards)
    return [f"{role}-{number}" for role, count in numbers for number in range(count)]


def _seen_by_workers(job: LoadedJob) -> AbstractContextManager[SharedFolder | None]:
    """The store, if workers may run on machines that do not see it, and their files of commits must go there."""
    if launcher_of(job.spec.cluster).same_machine or job.spec.store.parts == "object":
        return nullcontext()
    return SharedFolder.proved(job.store)


def set_paused(store: Path, paused: bool) -> None:
    """Pause or resume the planning of passes of events in `store`. Raises Unwritable."""
    with writing(store / PAUSED):
        if paused:
            (store / PAUSED).touch()
        else:
            (store / PAUSED).unlink(missing_ok=True)


def restart_limits(cluster: ClusterSection) -> RestartLimits:
    """The restarts that a job allows."""
    return RestartLimits(max_restarts=cluster.max_restarts, window_s=cluster.restart_window)


def read_report(path: Path) -> Mapping[str, Any]:
    """The report that rank 0 wrote at its end; empty where there is none."""
    return documents.read_object(path) if path.exists() else {}


def last_status(outcome: RunOutcome, found: Mapping[str, Any], before: Status) -> Status:
    """Rank 0's last status, from some time before the end, with the final figures of the report that it wrote."""
    if outcome.code != ExitCode.DRAINED:
        return replace(before, state="failed")
    if not found:
        return replace(before, state="done")
    report = read(RunReport, found)
    return replace(
        before,
        state="done",
        pass_number=report.passes,
        version=report.passes,
        events=report.events,
        samples=report.samples,
        rejected=report.rejected,
        positions=report.positions,
        metrics=read(MetricsStatus, found.get("metrics", {})),
        lag={},
        commit=replace(before.commit or CommitStatus(), version=report.passes, age_s=0.0, failing=None),  # waited for
        trouble="",
    )


def print_outcome(outcome: RunOutcome, launcher: JobRunner, report: Mapping[str, Any], path: Path) -> int:
    """Print the end of a run; the exit code.

    A drained run goes to standard output, any other to standard error with the last lines of the first dead worker.
    """
    if outcome.code == ExitCode.DRAINED:
        print_printable(f"done: {outcome.reason}")
        for line in summary_lines(report) if report else ():
            print_printable(line)
        if report:
            print(f"report    {path}")
        return outcome.code
    if outcome.first_dead is not None:
        lines = launcher.last_lines(outcome.first_dead)
        print_printable(f"last lines of {outcome.first_dead}:", *(lines or ["(none)"]), sep="\n  ", file=sys.stderr)
    print_printable(f"error: {outcome.reason}", file=sys.stderr)
    return outcome.code
