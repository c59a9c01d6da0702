"""The process that runs one job of the service: `python -m headrace.service.jobs.launcher FOLDER ...`.

It has a session of its own and does not depend on the service: a restarted service finds it by its folder
(service.jobs.folder). The service has checked that the job is allowed.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import headrace
from headrace.errors import HeadraceError
from headrace.lifecycle import ExitCode
from headrace.logs import setup
from headrace.rpc import channels, unix_sockets
from headrace.rpc.role import serve_role
from headrace.service.cluster.job_run import JobRun, open_run
from headrace.service.cluster.runtime import LAUNCHER
from headrace.service.cluster.store import OUTPUT
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.jobs.activation import Fence
from headrace.service.jobs.build_check import environment
from headrace.service.jobs.folder import Assignment, JobFolder, LauncherProcess
from headrace.service.jobs.host import Ending
from headrace.service.jobs.output_files import OutputWriter, shortened_periodically
from headrace.service.jobs.preflight import check_run
from headrace.service.predict.after_training import RunThenPredict
from headrace.service.records.database import utc_now
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import Status

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job; the exit code is its outcome's."""
    parser = argparse.ArgumentParser(prog="headrace.service.jobs.launcher")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock", type=int, required=True, help="descriptor of the folder's lock, which is held")
    parser.add_argument("--max-output", type=int, required=True, help="bytes of workers' output that are kept")
    parser.add_argument("--paused", action="store_true", help="begin without planning a pass of events")
    parser.add_argument("--fence-file", type=Path, help="file with the number of the newest active service")
    parser.add_argument("--fence", type=int, default=0, help="number of the service that starts this launcher")
    given = parser.parse_args(arguments)
    os.set_inheritable(given.lock, False)  # workers that outlive this process for a moment must not hold its lock
    setup(LAUNCHER)
    if given.fence_file is not None and not Fence(given.fence_file, given.fence).passed():
        log.warning("a newer service is active; the one that started this launcher was frozen, or cut off")
        sys.exit(ExitCode.RETRY)  # without an outcome: the newer service decides
    folder = JobFolder(given.folder)
    with shortened_periodically(folder.printed):
        code = launch(folder, max_output=given.max_output, paused=given.paused)
    sys.exit(code)


def launch(folder: JobFolder, *, max_output: int, paused: bool) -> int:
    """Run the job of `folder` to its end; the exit code.

    1. Report this process. 2. Claim the store, and report that. 3. Serve the Role: status and drain. 4. Run the job.
    5. Write the outcome: from here on the service does not restart it.
    """
    assigned = folder.assigned()
    assert assigned is not None, "the service writes the identity of a launcher before it starts it"
    folder.report(_this_process(assigned, claimed=False))  # 1
    try:
        ending, status = _run(folder, assigned, max_output, paused)
    except HeadraceError as error:
        ending, status = Ending(error.exit_code, str(error), (), utc_now()), Status(state="failed")
    except Exception as error:  # the top of the process: the outcome has the error
        log.exception("a bug")
        reason = f"the launcher failed by a bug: {type(error).__name__}: {error}"
        ending = Ending(ExitCode.BUG, reason, tuple(traceback.format_exc().splitlines()[-20:]), utc_now())
        status = Status(state="failed")
    folder.write_outcome(assigned.ask, ending, status)  # 5
    return ending.code


def _this_process(assigned: Assignment, *, claimed: bool) -> LauncherProcess:
    return LauncherProcess(assigned.id, os.getpid(), claimed, headrace.__version__, environment())


def _run(folder: JobFolder, assigned: Assignment, max_output: int, paused: bool) -> tuple[Ending, Status]:
    spec, base = folder.job()
    job = with_store_defaults(job_of(spec, base))
    with ExitStack() as held:
        late = _Lines()
        check_run(job)
        run = held.enter_context(open_run(job, late.write, paused=paused, private=folder.workers))  # 2
        folder.report(_this_process(assigned, claimed=True))
        output = OutputWriter(run.store / OUTPUT, max_output)
        held.callback(output.close)
        late.give(output)
        both = RunThenPredict(run, job, output.write)
        server = held.enter_context(
            serve_role(both.status, both.drain, assigned.secret, unix_sockets.beside(folder.address))
        )
        channels.write_address(folder.address, server.address)  # 3
        outcome = both.run()  # 4
        return _ending(outcome, run), both.status()


class _Lines:
    """Buffers lines until there is a store to write them to, so that lines about its claim come first."""

    def __init__(self) -> None:
        self._early: list[tuple[str, str]] = []
        self._output: OutputWriter | None = None

    def write(self, worker: str, text: str) -> None:
        if self._output is None:
            self._early.append((worker, text))
        else:
            self._output.write(worker, text)

    def give(self, output: OutputWriter) -> None:
        """Write the buffered lines, and all later ones, to `output`."""
        for worker, text in self._early:
            output.write(worker, text)
        self._output = output


def _ending(outcome: RunOutcome, run: JobRun) -> Ending:
    lines = [] if outcome.first_dead is None else run.launcher.last_lines(outcome.first_dead)
    return Ending(int(outcome.code), outcome.reason, tuple(lines), utc_now())


if __name__ == "__main__":
    main()
