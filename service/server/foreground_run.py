"""`headrace run`: one job in the foreground. Claims its store, launches its workers, shows progress, prints the end."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.http.open_pages import health_served, pages_served
from headrace.lifecycle import ExitCode
from headrace.printable import print_printable
from headrace.service.cluster.job_run import open_run, print_outcome
from headrace.service.cluster.store import REPORT
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.cluster.worker_logs import logged_to
from headrace.service.history.event_files import event_files
from headrace.service.history.version_ages import brief_lines, read_ages
from headrace.service.jobs.preflight import check_run
from headrace.service.monitor.shows import Show
from headrace.service.predict.after_training import RunThenPredict, prediction_lines
from headrace.service.spec.job import LoadedJob
from headrace.timeline import TraceWindow
from headrace.trainer.job_status import Status

GetStatus = Callable[[], Status]


def run_job(
    job: LoadedJob,
    show: Show,
    *,
    fresh: bool,
    listen: str | None = None,
    trace: TraceWindow | None = None,
    health: str | None = None,
    metrics: str | None = None,
    log_dir: Path | None = None,
    tensorboard: Path | None = None,
    stopped: ExitCode = ExitCode.DRAINED,
) -> RunOutcome:
    """Run `job` to its end; its outcome, with the exit code of the command.

    `listen` = "127.0.0.1:8080" serves the API meanwhile. `trace`: the steps of a timeline. `health`: where to answer
    probes. `metrics`: where to answer a scraper. `log_dir`: folder of a file for each worker's output. `tensorboard`:
    folder of event files. `stopped`: the exit code, also of its agents, where a signal stopped
    the job. Raises SpecError where the pipe command, the store or an address cannot be used, before any worker starts
    or the store is changed.
    """
    job = job if fresh else with_store_defaults(job)
    check_run(job, fresh=fresh)
    opened: RunThenPredict | None = None

    def lacks() -> str:
        return "the store is not open yet" if opened is None else opened.lacks()

    def status() -> Status:
        return Status() if opened is None else opened.status()

    with ExitStack() as held:
        serve = held.enter_context(_listening(job, listen)) if listen else None
        held.enter_context(health_served(health, lacks))
        held.enter_context(metrics_served(metrics, job.spec.name, status))
        on_line = held.enter_context(logged_to(log_dir, show.on_line))
        run = held.enter_context(open_run(job, on_line, fresh=fresh, trace=trace, stopped=stopped))
        held.enter_context(event_files(run.store / "log", tensorboard))
        opened = both = RunThenPredict(run, job, on_line)
        with ExitStack() as shown:
            if serve:
                shown.enter_context(serve(both.status))
            shown.enter_context(show.watching(both.status))
            outcome = both.run()
        code = print_outcome(outcome, run.launcher, run.report, run.store / REPORT)
        for line in _age_lines(run.store) if run.report else ():
            print_printable(line)
        if run.trace:
            print_printable(f"trace     {run.trace}")
        for line in prediction_lines(both.predicted) if both.predicted else ():
            print_printable(line)
        return replace(outcome, code=stopped) if run.launcher.stopped and code == ExitCode.DRAINED else outcome


def metrics_served(at: str | None, job: str, status: GetStatus) -> AbstractContextManager[None]:
    """Answer /metrics at HOST:PORT while the context lasts; nowhere for None."""

    def figures() -> ASGIApp:
        from starlette.datastructures import Headers

        from headrace.service.api.exposition import Exposition, exposition

        async def page(scope: Scope, receive: Receive, send: Send) -> None:
            found, accept = [(job, status())], Headers(scope=scope).get("accept", "")
            await Exposition.of(partial(exposition, found), accept)(scope, receive, send)

        return page

    return pages_served(at, {"/metrics": figures}, "--metrics", "0.0.0.0:8083")


def _age_lines(store: Path) -> Iterator[str]:
    """The price of a served version's age, if it was measured."""
    try:
        found = read_ages(store)
    except HeadraceError as error:
        yield f"age price not known: {error}"
        return
    yield from () if found is None else brief_lines(found)


@contextmanager
def _listening(job: LoadedJob, listen: str) -> Iterator[Callable[[GetStatus], AbstractContextManager[None]]]:
    """Hold the address, then serve the API there for a run.

    The modules for it are imported here: most runs serve nothing, and all would need twice the time to start.
    """
    from headrace.service.api.app import ApiSettings, app
    from headrace.service.api.problems import problem_of
    from headrace.service.api.server import bound, serving
    from headrace.service.jobs.foreground_host import foreground_host
    from headrace.service.ui.mount import mount

    @contextmanager
    def serve(status: GetStatus) -> Iterator[None]:
        with foreground_host(job, status, problem_of) as host:
            terms = ApiSettings.of_a_run()
            api = app(host, terms)
            mount(api, terms.limits.max_streams, terms.limits.max_streams_each)
            with serving(api, listener):
                yield

    with bound(listen) as listener:
        yield serve
