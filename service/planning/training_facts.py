"""Measures a few passes of a job: one trainer and one shard train the first events in a store beside the job's own.

Both are processes of this machine, started plainly, so that /proc tells what each takes. The store is removed.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from headrace.errors import BadInput
from headrace.periodic import periodically
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_run import print_outcome, read_report
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.store import REPORT, WORKERS, claimed
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.spec.job import LoadedJob, job_of
from headrace.service.spec.side_groups import with_own_groups
from headrace.trainer.checkpoint.commits import Commits

# CPU time and memory that processes of this machine have used, as /proc tells.

PROC = Path("/proc")
TICKS_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PARENT, USER, SYSTEM, RESIDENT = 1, 11, 12, 21
"""Numbers of the fields in /proc/<n>/stat, from 0 after the name."""
PIPE = "pipe"
"""The name of all children of the trainer together."""
TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Of one or more processes."""

    core_s: float = 0.0
    """CPU seconds since they began."""
    resident_bytes: int = 0

    def plus(self, other: "ProcessUse") -> "ProcessUse":
        """Of both."""
        return ProcessUse(self.core_s + other.core_s, self.resident_bytes + other.resident_bytes)


def use_of_children(parent: int) -> ProcessUse:
    """The sum over the direct children of a process that run now."""
    total = ProcessUse()
    for _, above, use in _processes():
        if above == parent:
            total = total.plus(use)
    return total


def use_by_worker(folder: Path) -> dict[str, ProcessUse]:
    """By name, each worker whose configuration is in `folder`; and PIPE."""
    processes = list(_processes())
    names = {pid: name for pid, _, _ in processes if (name := _worker(pid, folder))}
    found: dict[str, ProcessUse] = {}
    for pid, above, use in processes:
        if name := names.get(pid) or (PIPE if names.get(above) == TRAINER else ""):
            found[name] = found.get(name, ProcessUse()).plus(use)
    return found


def _processes() -> Iterator[tuple[int, int, ProcessUse]]:
    """Each process with the number of its parent."""
    for pid in map(int, filter(str.isdecimal, os.listdir(PROC))):
        with suppress(OSError):
            stat = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            took_s = (int(stat[USER]) + int(stat[SYSTEM])) / TICKS_S
            yield pid, int(stat[PARENT]), ProcessUse(took_s, int(stat[RESIDENT]) * PAGE_BYTES)


def _worker(pid: int, folder: Path) -> str:
    """The name of a worker, which is that of its configuration; "" for another process."""
    with suppress(OSError):
        for argument in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0"):
            path = Path(os.fsdecode(argument))
            if path.suffix == ".json" and folder in path.parents:
                return path.stem
    return ""


POLL_S = 0.1
DENSE_FILE = "dense.safetensors"
SUFFIX = "-size"
"""Of the store that is trained in, and of its Kafka groups."""


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time and memory of one part of the job."""

    core_s: float
    """CPU seconds for each sample."""
    resident_bytes: int
    """Memory at the last look, of all its processes."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """Figures of a few passes."""

    events: int
    samples: int
    passes: int
    costs: Mapping[str, ProcessCost]
    """By part: "trainer-0", "shard-0", "pipe"."""
    with_start: bool
    """Whether the sample was so short that the costs have the start of the processes in them."""
    rows: Mapping[str, int]
    """By table, after the sample."""
    row_memory_bytes: Mapping[str, int]
    """By table: of rows and their index."""
    sent_bytes: float
    """From a trainer to the shards, for each sample: keys, gradients."""
    received_bytes: float
    """From the shards to a trainer, for each sample: rows."""
    dense_parameters: int
    commit_row_bytes: Mapping[str, float]
    """By table: of a commit, for each row."""
    commit_other_bytes: int
    """Of a commit: dense part, metrics, manifest."""
    log_pass_bytes: float
    """Of the log, for each pass."""


@dataclass
class _Watch:
    """Looks at the processes and at the status, and stops the job when it has learnt enough."""

    folder: Path
    enough: int
    looks: list[tuple[int, Mapping[str, ProcessUse]]] = field(default_factory=list)
    """Samples of all closed passes, and what the processes had used soon after the close."""

    def look(self, runner: JobRunner) -> None:
        """Once."""
        status = runner.status()
        version = status.version or 0
        samples = status.samples or 0
        if version and (not self.looks or samples > self.looks[-1][0]):
            found = use_by_worker(self.folder)
            if {"trainer-0", "shard-0"} <= found.keys():  # they may have ended since that status
                self.looks.append((samples, found))
        if version and (status.events or 0) >= self.enough:
            runner.drain()

    def costs(self) -> dict[str, ProcessCost]:
        """Between the first look and the last one; with one look alone, from the start. Raises BadInput without any."""
        if not self.looks:
            raise BadInput("the sample is over too soon to measure; give more events")
        nothing = (0, dict.fromkeys(self.looks[0][1], ProcessUse()))
        begin, before = self.looks[0] if len(self.looks) > 1 else nothing
        end, after = self.looks[-1]
        return {
            part: ProcessCost((after[part].core_s - before[part].core_s) / (end - begin), after[part].resident_bytes)
            for part in after
            if part in before
        }


def measure_training(job: LoadedJob, num_events: int) -> TrainingFacts:
    """Train the first events of `job`, which is `alone`. Main thread only.

    Raises SpecError where its store is in use, and BadInput where the run fails.
    """
    store = job.store
    with ExitStack() as held:
        held.enter_context(claimed(store, job.spec.name, fresh=True))
        held.callback(shutil.rmtree, store, ignore_errors=True)
        folder = held.enter_context(run_folder(store / WORKERS))
        watch = _Watch(folder, num_events)
        launcher = held.enter_context(ProcessLauncher(Spawner()))
        runner = JobRunner(
            job.spec.name,
            GenerationPlans(job, folder).phases(),
            lambda worker, text: None,
            launcher=launcher,
            restarts=RestartLimits(max_restarts=0),
            status_interval_s=POLL_S,
        )
        with periodically(lambda: watch.look(runner), POLL_S, "size"):
            outcome = runner.run()
        report = read_report(store / REPORT)
        if not report:
            print_outcome(outcome, runner, {}, store / REPORT)
            raise BadInput(f"the job cannot be measured: {outcome.reason}")
        return _facts(store, report, watch)


def alone(job: LoadedJob) -> LoadedJob:
    """The job with one trainer and one shard in a store beside its own, without what leaves it."""
    store = job.store.with_name(f"{job.store.name}{SUFFIX}")
    raw = {
        key: value for key, value in job.whole().items() if key not in ("exports", "predict", "evaluator", "cluster")
    }
    raw |= {"store": {"path": str(store)}, "cluster": {"trainers": 1, "shards": 1}}
    return job_of(with_own_groups(raw, job.spec, SUFFIX), job.folder)


def _facts(store: Path, report: Mapping[str, Any], watch: _Watch) -> TrainingFacts:
    samples, tables = int(report["samples"]), report["tables"]
    link = report["links"]["trainer-0"]["shard-0"]
    commit = Commits(store).whole()[-1]
    sizes = {name: file.num_bytes for name, file in commit.files.items()}
    by_table = {table: sum(size for name, size in sizes.items() if f"/{table}/" in name) for table in tables}
    logged = sum(path.stat().st_size for path in (store / "log").glob("*.log"))
    return TrainingFacts(
        events=int(report["events"]),
        samples=samples,
        passes=int(report["passes"]),
        costs=watch.costs(),
        with_start=len(watch.looks) < 2,
        rows={name: table["rows"] for name, table in tables.items()},
        row_memory_bytes={name: table["bytes"] for name, table in tables.items()},
        sent_bytes=(link["sent_bytes"] + link["shared_sent_bytes"]) / samples,
        received_bytes=(link["received_bytes"] + link["shared_received_bytes"]) / samples,
        dense_parameters=_num_parameters(commit.folder / DENSE_FILE),
        commit_row_bytes={name: by_table[name] / max(1, table["rows"]) for name, table in tables.items()},
        commit_other_bytes=sum(sizes.values()) - sum(by_table.values()),
        log_pass_bytes=logged / max(1, int(report["passes"])),
    )


def _num_parameters(path: Path) -> int:
    """Numbers in the model's dense tensors."""
    with safe_open(path, framework="numpy") as file:
        names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118  it is no mapping
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
