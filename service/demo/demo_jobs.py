"""The specs of the demo's jobs: the example at a laptop's pace, its frozen twin, and one with late clicks. Pure.

The first two read the same simulated stream, which began at the same time: the later job catches up, as on a topic. The
third one joins two files, impressions and clicks that come minutes later; a program beside its job file writes them.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import load_toml
from headrace.dataset.spec.config import PipeSection
from headrace.service.auth.config import AccessSection, AllowSection
from headrace.service.demo.examples import EXAMPLES
from headrace.service.jobs.config import LimitsSection, ServiceConfig
from headrace.service.spec.job import LoadedJob, job_of

EXAMPLE = EXAMPLES / "clicks" / "job.toml"
"""The job of the demo."""
LATER = EXAMPLES / "clicks_later"
"""The example whose clicks come later."""
NAME, TWIN, LATE = "demo", "demo-frozen", "demo-late"
LATE_IMPRESSIONS = 10_000
"""Half an hour of event time."""
RATE = 1500
"""Events a second: two trainers and a page leave some room on a laptop with two cores."""
PASS_EVENTS = 2000
"""Most events of a pass."""
FREEZE_AFTER = 5
"""The twin has learnt from so many passes: 10,000 events, a tenth of a simulated day."""
STOP_S = 20.0
"""Longest time for a job to finish its pass and commit when the demo ends; then it is killed."""


def demo_job(
    root: Path, events: int | None, overrides: Sequence[str], since: float, example: Path = EXAMPLE
) -> LoadedJob:
    """The job that learns. Its stream began at the unix time `since` and ends after `events`. Raises SpecError."""
    ours = [f"name={json.dumps(NAME)}", f"passes.max_events={PASS_EVENTS}", f"commit.every_passes={FREEZE_AFTER}"]
    for name in load_toml(example).get("sources", {}):
        ours += [f"sources.{name}.rate={RATE}", f"sources.{name}.since={since}"]
        ours += [f"sources.{name}.events={events}"] if events else []
    raw = load_toml(example, [*ours, *overrides])
    store = {**raw.get("store", {}), "path": str(root / "jobs" / NAME / "store")}
    return job_of({**raw, "store": store}, example.resolve().parent)


def twin_of(job: LoadedJob) -> LoadedJob:
    """A copy of `job` that only predicts; it begins at a commit of `job`."""
    left_out = ("exports", "commit", "predict")
    raw: dict[str, Any] = {key: value for key, value in job.whole().items() if key not in left_out}
    store = job.store.parents[1] / TWIN / "store"
    raw["train"] = {key: value for key, value in raw.get("train", {}).items() if key != "learn_until"}
    sections: Mapping[str, Mapping[str, Any]] = {
        "train": {"learn": False},
        "metrics": {"halves": False},  # it has seen one half only
        "store": {"path": str(store)},
    }
    changed = {name: {**raw.get(name, {}), **section} for name, section in sections.items()}
    return job_of({**raw, **changed, "name": TWIN}, job.folder)


def data_of(root: Path) -> Path:
    """The folder of the files of the job with late clicks: beside the root, whose files no job may read."""
    return root.resolve().with_name(f"{root.name}-late")


def late_job(root: Path) -> LoadedJob:
    """The job with late clicks. Raises SpecError."""
    names = ("impressions", "clicks")
    paths = [f"sources.{name}.paths={json.dumps([f'{name}.jsonl'])}" for name in names]
    raw = load_toml(LATER / "job.toml", [f"name={json.dumps(LATE)}", "passes.max_events=1000", *paths])
    store = {"path": str(root.resolve() / "jobs" / LATE / "store")}
    return job_of({**raw, "store": store}, data_of(root))


def late_command(root: Path) -> list[str]:
    """The program that writes its events."""
    program, num = str(LATER / "events.py"), str(LATE_IMPRESSIONS)
    return [sys.executable, program, "--impressions", num, "--out", str(data_of(root))]


def service_of(root: Path, listen: str, job: LoadedJob) -> ServiceConfig:
    """The demo's own service: for this machine only, where every client may operate these jobs."""
    pipes = (job.spec.pipe.command,) if isinstance(job.spec.pipe, PipeSection) else ()
    commands = tuple(each.command for each in job.spec.exports.values() if each.command)
    return ServiceConfig(
        root=root,
        listen=listen,
        access=AccessSection(anonymous="operator"),
        allow=AllowSection(pipe_commands=pipes, export_commands=commands, roots=(str(job.folder), str(data_of(root)))),
        limits=LimitsSection(stop=STOP_S, max_jobs=8),
    )
