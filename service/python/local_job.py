"""`Job`: a job of this machine in a program or a notebook. Each method does what the command of its name does."""

import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import documents
from headrace.config import load_toml, validate
from headrace.errors import HeadraceError, SpecError
from headrace.lifecycle import ExitCode
from headrace.printable import print_printable
from headrace.service.cluster.store import REPORT
from headrace.service.history.closes import MAX_KEPT, Closes
from headrace.service.history.metrics_table import metrics_table
from headrace.service.jobs.preflight import JobCheck, checked
from headrace.service.monitor.display import choose_show
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import read
from headrace.trainer.run_report import RunReport

if TYPE_CHECKING:
    from headrace.service.planning.sweep_runs import SweepResult

Event = Mapping[str, Any] | str | bytes
"""An event of the stream: an object, which is written as JSON, or its line."""

OF_FILES = ("partition",)
"""Columns of a prediction that name the files of its events."""


class RunFailed(HeadraceError):
    """A run that did not reach its end. Its exit code is that of `headrace run`."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.exit_code = ExitCode(code)


class Job:
    """A job of this machine, by its spec. Relative paths start at its folder."""

    def __init__(self, spec: Mapping[str, Any], folder: str | Path = ".") -> None:
        """`spec`: the content of a job file. Raises SpecError, which names the key."""
        self._raw, self._folder = dict(spec), Path(folder).resolve()
        self._loaded = job_of(self._raw, self._folder)
        self._path: Path | None = None
        self._overrides: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Job":
        """The job of a job file, with overrides such as "train.batch_size=256", as for `--set`. Raises SpecError."""
        path = Path(path).resolve()
        job = cls(load_toml(path, overrides), path.parent)
        job._path, job._overrides = path, tuple(overrides)  # noqa: SLF001  # its own
        return job

    def __repr__(self) -> str:
        return f"<headrace job {self.name} in {self._folder}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._loaded.spec.name

    @property
    def store(self) -> Path:
        """The folder of its store."""
        return self._loaded.store

    @property
    def spec(self) -> dict[str, Any]:
        """Its spec with every default, without secrets."""
        return self._loaded.full

    def check(self) -> JobCheck:
        """Check whether it could start on this machine. Raises SpecError."""
        return checked(self._loaded)

    def run(self, *, fresh: bool = False) -> RunReport:
        """Run it until its stream ends; the report. `fresh` removes an older run from the store; else it goes on.

        Progress is shown meanwhile: in a terminal, in a notebook, or as lines. An interrupt (Ctrl-C, "stop" of a
        notebook) ends it in order. On the main thread alone, also while its event loop runs. Raises SpecError, and
        RunFailed.
        """
        from headrace.service.server.foreground_run import run_job

        if threading.current_thread() is not threading.main_thread():  # no other one gets signals
            raise SpecError("Job.run needs the main thread; elsewhere start `headrace run`, or submit it to a service")
        outcome = run_job(self._loaded, choose_show(), fresh=fresh)
        if outcome.code != ExitCode.DRAINED:
            raise RunFailed(outcome.reason, outcome.code)
        return self.report()

    def report(self) -> RunReport:
        """The report of its last complete run. Raises SpecError where there is none."""
        path = self.store / REPORT
        if not path.exists():
            raise SpecError(f"{path} does not exist: the job has not run to the end of its stream")
        return read(RunReport, documents.read_object(path))

    def metrics(self) -> pa.Table:
        """The metrics of every pass in its log, also while it runs: a row for each pass and task.

        Metrics of the window begin with "window_", those of the pass alone with "pass_". Every sample is predicted
        before it is learnt. `to_pandas()` of the result makes it a data frame.
        """
        return metrics_table(Closes(self.store / "log").newest(MAX_KEPT))

    def predict(
        self,
        events: Iterable[Event] | None = None,
        *,
        files: Sequence[str | Path] = (),
        version: str = "live",
        columns: Sequence[str] = (),
        output: str | Path | None = None,
    ) -> pa.Table:
        """Predict events with one version of the model, as `headrace predict` does; a row for each sample.

        `events`: objects or lines; or `files` of events. `version`: "live" (the newest commit), a version, a commit, or
        an export's address. `columns`: slots to copy. `output`: a folder for the Parquet, which a repeated call
        continues; default: one that is removed at the end. Raises SpecError, PredictionFailed.
        """
        from headrace.service.predict.prediction import predict
        from headrace.trainer.predict.config import PredictionRequest

        if (events is None) == (not files):
            raise SpecError("give events, or files of them; one of the two")
        with tempfile.TemporaryDirectory(prefix="headrace-predict-") as scratch:
            paths = [str(Path(each).absolute()) for each in files]
            if events is not None:
                paths = [f"{scratch}/events"]
                with Path(paths[0]).open("wb") as file:
                    file.writelines(_line(each) + b"\n" for each in events)
            folder = Path(output or f"{scratch}/predicted").absolute()
            request = {"input": {"paths": paths}, "output": str(folder), "version": version, "columns": [*columns]}
            manifest = predict(self._loaded, validate(PredictionRequest, request), _silent, threading.Event())
            parts = [pq.read_table(folder / name) for name in manifest["parts"]]
            table = pa.concat_tables(parts) if parts else pa.table({})
            return (
                table
                if events is None
                else table.drop_columns([each for each in OF_FILES if each in table.schema.names])
            )

    def sweep(
        self,
        grid: Mapping[str, Sequence[Any]],
        *,
        jobs: int = 1,
        keep: str = "8GiB",
        after: int = 0,
        folder: str | Path | None = None,
    ) -> "list[SweepResult]":
        """Run each combination of values over the same events, as `headrace sweep` does; the results in order.

        `grid`: values by key, as in {"tables.default.dim": [8, 16]}; the first combination is what others are compared
        with. `jobs` run at a time. `keep`: most bytes of kept samples. `after`: passes left out of the test. `folder`
        is emptied; default: runs/sweep beside the job file. Needs a job of `Job.load`. Raises SpecError, SweepFailed.
        """
        from headrace.service.planning.sweep_runs import Sweep
        from headrace.service.planning.sweep_settings import check_settings
        from headrace.service.planning.sweep_settings import grid as settings_of

        if self._path is None:
            raise SpecError("a sweep runs a job file several times: write the spec to one, and use Job.load")
        sets = [f"{key}={','.join(map(_written, values))}" for key, values in grid.items()]
        chosen = settings_of([*self._overrides, *sets])
        check_settings(chosen)
        place = Path(folder) if folder else self._folder / "runs" / "sweep"
        return Sweep(self._path, place, chosen, keep=keep, after=after).run(jobs, _shown)


def _line(event: Event) -> bytes:
    """An event as a line of a file. Raises SpecError for one of several lines."""
    match event:
        case bytes():
            line = event
        case str():
            line = event.encode()
        case _:
            line = json.dumps(event).encode()
    if b"\n" in line.rstrip(b"\r\n"):
        raise SpecError(f"an event has a line break in its middle: {line[:100]!r}")
    return line.rstrip(b"\r\n")


def _written(value: Any) -> str:
    """A value as `--set` reads it: JSON of numbers, texts and lists is TOML as well."""
    return json.dumps(value)


def _silent(_share: float | None, _text: str) -> None:
    """Progress of a prediction, which nobody reads."""


def _shown(text: str) -> None:
    print_printable(text, file=sys.stderr, flush=True)
