"""Runs a plan of fake workers under the local launcher, in a process of its own.

`python -m tests.fakes.launch PLAN.json`.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from headrace.service.cluster.child import ForkingStarter, Spawner, Starter
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.runtime import PYTHON, Launcher, WorkerRole, WorkerSpec
from headrace.service.cluster.supervision import EndingLimits, RestartLimits
from headrace.service.cluster.worker_plan import JobPlan

WORKER = (*PYTHON, "tests.fakes.worker")
"""Found by PYTHONPATH."""
PRELOAD = ["headrace.rpc.role"]


def starting(forked: bool) -> AbstractContextManager[Starter]:
    """The starter of workers: a forkserver, or each from nothing."""
    return ForkingStarter(PRELOAD) if forked else nullcontext(Spawner())


def fake_worker(folder: Path, run: Path, role: WorkerRole, number: int, do: list, command=WORKER, **more) -> WorkerSpec:
    """A worker that follows the script `do`. It notes its process number in a file of `folder`."""
    config = {"do": do, "pids": str(folder / "pids"), "secret": "s", **more}
    return WorkerSpec(role=role, number=number, command=command, config=config, folder=folder, run_folder=run)


def fake_plan(folder: Path, shards: list, trainers: list, generation: int = 1) -> JobPlan:
    """A plan whose workers follow scripts: one list of verbs for each."""
    run = folder / "run" / f"g{generation}"

    def plan(role: WorkerRole, number: int, do: list) -> WorkerSpec:
        return fake_worker(folder, run, role, number, do, generation=generation)

    return JobPlan(
        job="fake",
        generation=generation,
        run_folder=run,
        shards=tuple(plan(WorkerRole.SHARD, number, do) for number, do in enumerate(shards)),
        trainers=tuple(plan(WorkerRole.TRAINER, number, do) for number, do in enumerate(trainers)),
        max_silent_s=60.0,
        secret="s",
    )


def fake_launcher(
    folder: Path,
    shards: list,
    trainers: list,
    on_line,
    limits: dict,
    max_restarts=0,
    *,
    launcher: Launcher,
    standbys=None,
) -> JobRunner:
    """Runs such plans, one after another, on `launcher`."""
    return JobRunner(
        "fake",
        [lambda last: fake_plan(folder, shards, trainers, last + 1)],
        on_line,
        launcher=launcher,
        limits=EndingLimits(**limits),
        restarts=RestartLimits(max_restarts=max_restarts),
        status_interval_s=0.05,
        standbys=standbys,
    )


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    with starting(told.pop("forked")) as starter, ProcessLauncher(starter) as workers:
        launcher = fake_launcher(
            Path(told.pop("folder")), on_line=lambda who, text: print(who, text, flush=True), launcher=workers, **told
        )
        outcome = launcher.run()
    print("outcome", outcome.code, outcome.reason, flush=True)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
