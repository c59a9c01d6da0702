"""Runs a plan of fake workers under the local launcher, as a process of its own: `python launch.py PLAN.json`."""

import json
import sys
from pathlib import Path

from service.launcher.local import LocalLauncher
from service.launcher.plan import JobPlan, WorkerPlan
from service.launcher.run_folder import run_folder
from service.launcher.supervision import Limits

WORKER = Path(__file__).with_name("worker.py")


def fake_plan(folder: Path, shards: list, trainers: list) -> JobPlan:
    """A plan whose workers do as told: each list holds the verbs of each worker."""
    run = folder / "run"

    def plan(role: str, number: int, do: list) -> WorkerPlan:
        name = f"{role}-{number}"
        address_file = run / f"{name}.address"
        config = {"do": do, "pids": str(folder / "pids"), "secret": "s", "address_file": str(address_file)}
        return WorkerPlan(name=name, command=(sys.executable, str(WORKER)), config=config, address_file=address_file)

    return JobPlan(
        job="fake",
        folder=folder,
        run_folder=run,
        shards=tuple(plan("shard", number, do) for number, do in enumerate(shards)),
        trainers=tuple(plan("trainer", number, do) for number, do in enumerate(trainers)),
        secret="s",
    )


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    plan = fake_plan(Path(told["folder"]), told["shards"], told["trainers"])
    with run_folder(plan.run_folder):
        launcher = LocalLauncher(
            plan,
            lambda worker, text: print(worker, text, flush=True),
            limits=Limits(**told["limits"]),
            status_interval_s=0.05,
        )
        outcome = launcher.run()
    print("outcome", outcome.code, outcome.reason, flush=True)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
