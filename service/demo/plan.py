"""What the demo's two jobs are: the shipped example at a laptop's pace, and its frozen twin. Pure.

Both read the same simulated stream, which began at one instant for both: who comes later catches up, as on a topic.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import load_toml
from service.access.config import AccessSection, AllowSection
from service.hosting.config import LimitsSection, ServiceConfig
from service.spec import LoadedJob, job_of

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "clicks" / "job.toml"
"""The job that is shown; it is part of a checkout."""
NAME, TWIN = "demo", "demo-frozen"
RATE = 1500
"""Events a second, so that two trainers and a page leave a laptop of two cores some room."""
PASS_EVENTS = 2000
"""Events of a pass at most."""
FREEZE_AFTER = 5
"""Passes that the twin has learnt from: 10,000 events, a tenth of a simulated day."""
STOP_S = 20.0
"""How long a job may take to finish its pass and commit when the demo ends; then it is killed."""


def demo_job(
    root: Path, events: int | None, overrides: Sequence[str], since: float, example: Path = EXAMPLE
) -> LoadedJob:
    """The job that learns, its stream flowing since the unix time `since`; it ends after `events`. Raises SpecError."""
    ours = [f"name={json.dumps(NAME)}", f"passes.max_events={PASS_EVENTS}", f"commit.every_passes={FREEZE_AFTER}"]
    for name in load_toml(example).get("sources", {}):
        ours += [f"sources.{name}.rate={RATE}", f"sources.{name}.since={since}"]
        ours += [f"sources.{name}.events={events}"] if events else []
    raw = load_toml(example, [*ours, *overrides])
    store = {**raw.get("store", {}), "path": str(root / "jobs" / NAME / "store")}
    return job_of({**raw, "store": store}, example.resolve().parent)


def twin_of(job: LoadedJob) -> LoadedJob:
    """The same job, which only predicts; it begins at a commit of `job`."""
    left_out = ("exports", "commit", "predict")
    raw: dict[str, Any] = {key: value for key, value in job.whole().items() if key not in left_out}
    store = job.store.parents[1] / TWIN / "store"
    raw["train"] = {key: value for key, value in raw.get("train", {}).items() if key != "learn_until"}
    sections: Mapping[str, Mapping[str, Any]] = {
        "train": {"learn": False},
        "metrics": {"halves": False},  # it has seen one of them only
        "store": {"path": str(store)},
    }
    changed = {name: {**raw.get(name, {}), **section} for name, section in sections.items()}
    return job_of({**raw, **changed, "name": TWIN}, job.folder)


def service_of(root: Path, listen: str, job: LoadedJob) -> ServiceConfig:
    """The demo's own service: on this machine alone, where whoever asks may act on these two jobs."""
    commands = tuple(each.command for each in job.spec.exports.values() if each.command)
    return ServiceConfig(
        root=root,
        listen=listen,
        access=AccessSection(anonymous="operator"),
        allow=AllowSection(pipe_commands=(job.spec.pipe.command,), export_commands=commands, roots=(str(job.folder),)),
        limits=LimitsSection(stop=STOP_S, max_jobs=8),
    )
