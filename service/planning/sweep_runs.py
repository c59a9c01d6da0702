"""Runs the settings of a sweep, each as `headrace run` in a store of its own, over one reading of the stream.

The first run reads source and pipe, and keeps the samples in files (`passes.keep_in`). The others read those: the same
events in the same passes.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace import documents
from headrace.durable import REAL, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.lifecycle import on_stop_signal
from headrace.process import DEVNULL, STDOUT, ChildProcess, dying_with_parent
from headrace.service.cluster.run_folder import run_folder, write_private
from headrace.service.cluster.runtime import OF_ANY_JOB
from headrace.service.cluster.store import REPORT
from headrace.service.cluster.warm import warm_launchers
from headrace.service.history.paired_test import JobComparison, PairedResult, compare_jobs
from headrace.service.planning.sweep_settings import SweepSetting
from headrace.service.spec.job import LoadedJob, load_job
from headrace.service.spec.launchers import check_launcher
from headrace.service.spec.side_groups import group_overrides
from headrace.trainer.exports.scores import EVALUATOR

SAMPLES, RESULTS, OUTPUT, MARK, PRIVATE = "samples", "sweep.json", "output.txt", "SWEEP", "private"
"""In the sweep's folder: the kept samples, the results, the end of the name of a run's output; a file which says that
the folder is a sweep's, and may be emptied; and while it runs what its runs are told, for the owner only."""
SUFFIX = "-sweep"
"""Of the Kafka groups of its runs: the job's own positions stay as they are."""
FIGURES = ("auc", "gauc", "logloss")
EXPLAINED = (
    "AUC, GAUC and logloss: of all samples of the run, predicted before they were learnt. Differences: means over the "
    "passes that the setting and the first one closed, with the p-value of a paired test (as `headrace compare`); of "
    "twenty settings without any effect, one has p below 0.05. A test needs six passes at least. samples/s: the first "
    "run also ran source and pipe."
)
SECOND = " AUC 2nd: of the last half of the samples alone."


class SweepFailed(HeadraceError):
    """A run of a sweep did not reach its end."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of one setting."""

    setting: SweepSetting
    metrics: dict[str, dict[str, float | None]]
    """By task: FIGURES, of all samples, each predicted before it was learnt."""
    last_half: dict[str, dict[str, float | None]]
    """The same of the last half of the samples, which a model has begun to know; empty with metrics.halves = false."""
    samples_per_s: float
    rows: int
    wall_s: float
    against_first: JobComparison | None
    """The paired test against the first setting; None for that one, and where there are too few passes."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data, without secrets."""
        return {**asdict(self), "setting": self.setting.message()}


class Sweep:
    """The runs of a sweep of `job` in `folder`, which is emptied."""

    def __init__(self, job: Path, folder: Path, settings: Sequence[SweepSetting], *, keep: str, after: int) -> None:
        """`keep`: most bytes of kept samples; `after`: how many passes are left out of the paired test.

        Raises SpecError if a setting cannot be run, before any runs.
        """
        self._job, self._folder, self._settings = job, folder.absolute(), settings
        self._keep, self._after = keep, after
        self._private = self._folder / PRIVATE
        self._stopping = threading.Event()
        self._children: dict[int, ChildProcess] = {}
        loaded = [self._loaded(number) for number in range(len(settings))]
        for each in loaded:
            check_swept(each)
            check_launcher(each.spec.cluster)
        self._groups = [group_overrides(each.spec, SUFFIX) for each in loaded]

    def run(self, jobs: int, show: Callable[[str], None]) -> list[SweepResult]:
        """Run all settings, after the first `jobs` at a time; the results, which are also in RESULTS.

        Raises SweepFailed. Ctrl-C kills the runs.
        """
        self._empty()
        with on_stop_signal(self._stop), run_folder(self._private), warm_launchers(OF_ANY_JOB):
            results = [self._run(0, show)]
            with ThreadPoolExecutor(jobs, thread_name_prefix="sweep") as threads:
                rest = [threads.submit(self._run, number, show) for number in range(1, len(self._settings))]
                try:
                    results += [each.result() for each in rest]
                except BaseException:
                    self._stop()
                    raise
        shutil.rmtree(self._folder / SAMPLES, ignore_errors=True)
        path = self._folder / RESULTS
        with writing(path):
            write_whole(REAL, path, json.dumps([each.message() for each in results], indent=2).encode())
        return results

    def command(self, number: int) -> list[str]:
        """The command of a run. Its settings may be secrets, and other users see arguments: they are in a file."""
        overrides = self._private / f"{number:02}.json"
        write_private(overrides, [*self._overrides(number), *self._groups[number]])
        return [sys.executable, "-m", "headrace.service", "run", str(self._job), "--fresh", "--set", f"@{overrides}"]

    def _loaded(self, number: int) -> LoadedJob:
        """The job with a setting. Raises SpecError, which names the setting."""
        try:
            return load_job(self._job, self._overrides(number))
        except SpecError as error:
            raise SpecError(f"{error} (in the setting {self._settings[number].name!r})") from error

    def _empty(self) -> None:
        """Empty the folder, or make it. Raises SpecError for a folder with other content."""
        if self._folder.exists() and not self._folder.is_dir():
            raise SpecError(f"{self._folder} is no folder; name another one", "--out")
        if self._folder.exists() and any(self._folder.iterdir()) and not (self._folder / MARK).exists():
            raise SpecError(f"{self._folder} holds something else than a sweep; name another folder", "--out")
        shutil.rmtree(self._folder, ignore_errors=True)
        with writing(self._folder):
            self._folder.mkdir(parents=True)
            (self._folder / MARK).touch()

    def _overrides(self, number: int) -> list[str]:
        """The overrides of a run: its own, its store, no exports, no tuning, and where samples are kept."""
        store = json.dumps(str(self._store(number)))
        kept = f"passes.keep_in={json.dumps(str(self._folder / SAMPLES))}", f"passes.keep={self._keep}"
        return ["train.tune=off", *self._settings[number].overrides, f"store={{path = {store}}}", "exports={}", *kept]

    def _output(self, number: int) -> Path:
        return self._folder / f"{number:02}-{OUTPUT}"

    def _store(self, number: int) -> Path:
        return self._folder / f"{number:02}"

    def _run(self, number: int, show: Callable[[str], None]) -> SweepResult:
        name, store = self._settings[number].name, self._store(number)
        output = self._output(number)
        with output.open("wb") as file:
            child = ChildProcess(
                dying_with_parent(self.command(number)), stdin=DEVNULL, stdout=file.fileno(), stderr=STDOUT
            )
        self._children[number] = child
        try:
            if self._stopping.is_set():
                child.kill()
            child.ends_within(None)
        finally:
            child.end()
            del self._children[number]
        if child.code != 0 or not (store / REPORT).exists():
            why = "was stopped" if self._stopping.is_set() else f"ended with code {child.code}"
            raise SweepFailed(f"setting {name!r} {why}; its output is in {output}")
        result = self._result(number)
        show(f"{number + 1} of {len(self._settings)}: {name}, {result.wall_s:.1f} s")
        return result

    def _result(self, number: int) -> SweepResult:
        report = documents.read_object(self._store(number) / REPORT)
        life, wall_s = report.get("metrics", {}).get("life"), float(report["wall_s"])
        if not life or not report.get("samples"):
            raise SweepFailed(
                f"setting {self._settings[number].name!r} has predicted no sample, so there is nothing to compare: "
                f"{report.get('events', 0):,} events were read, and {sum(report.get('rejected', {}).values()):,} "
                f"rejected; its output is in {self._output(number)}"
            )
        return SweepResult(
            self._settings[number],
            _figures(life),
            _figures((report.get("halves") or {}).get("last", {})),
            report["samples"] / max(wall_s, 1e-9),
            sum(int(table["rows"]) for table in report["tables"].values()),
            wall_s,
            None if number == 0 else self._compared(number),
        )

    def _compared(self, number: int) -> JobComparison | None:
        try:
            return compare_jobs(self._store(0) / "log", self._store(number) / "log", self._after)
        except SpecError:  # too few passes
            return None

    def _stop(self) -> None:
        self._stopping.set()
        for child in list(self._children.values()):
            child.kill()


def _figures(measures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    return {task: {name: found.get(name) for name in FIGURES} for task, found in measures.items()}


def check_swept(job: LoadedJob) -> None:
    """Raise SpecError if runs of the job would not read the same events, or would act outside their stores."""
    for name, source in job.spec.sources.items():
        if not source.ends:
            raise SpecError(
                "a sweep reads a stream to its end, and this source never ends; give Kafka a time as `end`, or sweep a "
                "job file that reads files",
                f"sources.{name}",
            )
        for key, words in source.not_repeated():
            raise SpecError(words, f"sources.{name}.{key}")
    for section, act in (("predict", "predict"), (EVALUATOR, "score their versions")):
        if getattr(job.spec, section) is not None:
            raise SpecError(f"the runs of a sweep would all {act}; leave this section out", section)


def table_of(results: Sequence[SweepResult], *, second_half: bool = False) -> Table:
    """A row for each setting and task; `second_half`: with the AUC of the last half of the samples, too."""
    several = len(results[0].metrics) > 1
    table = Table(caption=EXPLAINED + (SECOND if second_half else ""), caption_justify="left")
    table.add_column("setting")
    if several:
        table.add_column("task")
    second = ["AUC 2nd"] if second_half else []
    for name in ("AUC", "GAUC", "logloss", *second, "samples/s", "rows", "AUC vs first", "p", "GAUC vs first", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        for task, found in each.metrics.items():
            figures = [_number(found.get(name)) for name in ("auc", "gauc", "logloss")]
            figures += [_number(each.last_half.get(task, {}).get("auc"))] * second_half
            against = [cell for metric in ("auc", "gauc") for cell in _difference(_paired(each, task, metric))]
            first = [each.setting.name, *([task] if several else [])]
            table.add_row(*first, *figures, f"{each.samples_per_s:,.0f}", f"{each.rows:,}", *against)
    return table


def _paired(result: SweepResult, task: str, metric: str) -> PairedResult | None:
    found = () if result.against_first is None else result.against_first.results
    return next((each for each in found if (each.task, each.metric) == (task, metric)), None)


def _difference(found: PairedResult | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.difference:+.4f}", f"{found.p:.4f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
