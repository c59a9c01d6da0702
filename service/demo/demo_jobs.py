"""The specs of the demo's two jobs: the shipped example at a laptop's pace, and its frozen twin. Pure.

Both read the same simulated stream, which began at the same time: the later job catches up, as on a topic.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset.spec.config import PipeSection
from millrace.config import load_toml
from service.auth.config import AccessSection, AllowSection
from service.jobs.config import LimitsSection, ServiceConfig
from service.spec.job import LoadedJob, job_of

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "clicks" / "job.toml"
"""The job of the demo; it is part of a checkout."""
NAME, TWIN = "demo", "demo-frozen"
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


def service_of(root: Path, listen: str, job: LoadedJob) -> ServiceConfig:
    """The demo's own service: for this machine only, where every client may operate these two jobs."""
    pipes = (job.spec.pipe.command,) if isinstance(job.spec.pipe, PipeSection) else ()
    commands = tuple(each.command for each in job.spec.exports.values() if each.command)
    return ServiceConfig(
        root=root,
        listen=listen,
        access=AccessSection(anonymous="operator"),
        allow=AllowSection(pipe_commands=pipes, export_commands=commands, roots=(str(job.folder),)),
        limits=LimitsSection(stop=STOP_S, max_jobs=8),
    )
