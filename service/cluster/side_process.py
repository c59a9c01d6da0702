"""A process that reads a stream beside its job: it is run to its end, also where it is killed."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import SpecError
from headrace.lifecycle import error_in
from headrace.service.cluster.child import Starter, WorkerProcess
from headrace.service.cluster.local import LocalWorker
from headrace.service.cluster.run_folder import write_private
from headrace.service.cluster.runtime import PYTHON, CannotStart
from headrace.service.spec.job import LoadedJob

MAX_STARTS = 4
"""Most starts of the process; one that is killed so often is given up."""


def run_beside(
    module: str,
    config: Callable[[Path], Mapping[str, Any]],
    folder: Path,
    private: Path,
    job: LoadedJob,
    starter: Starter,
    look: Callable[[], None],
) -> None:
    """Run a process to its end, also where it is killed, with a new `folder` for its files; call `look` meanwhile.

    `look` waits a moment, and raises to end the process. `config`: of `folder`, its configuration, which is written
    below `private`, as it has secrets. Raises SpecError with the error of the process, CannotStart.
    """
    for _ in range(MAX_STARTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_private(private / "beside.json", config(folder))
        command = (*PYTHON, module, "--config", str(private / "beside.json"))
        try:
            child = starter.start(command, job.folder)
        except OSError as error:
            raise CannotStart(module.rpartition(".")[2], error) from error
        with _running(child) as worker:
            while worker.poll() is None:
                look()
        code = worker.poll()
        if code == 0:
            return
        assert code is not None
        if code > 0:
            break
    raise SpecError(error_in(worker.last_lines()) or f"the process ended with code {code}")


@contextmanager
def _running(child: WorkerProcess) -> Iterator[LocalWorker]:
    """The process; it and what it started are gone at the end."""
    worker = LocalWorker("beside", child, lambda name, text: None, lambda name, code: None)
    try:
        yield worker
    finally:
        worker.kill()  # also waits for the last lines of one that has ended
