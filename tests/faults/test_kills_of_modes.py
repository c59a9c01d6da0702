"""`headrace faults` in every mode, and with rows in half the bytes: ten deaths, drawn by a seed."""

import pytest

from headrace.service.faults.rounds import FaultRuns
from headrace.service.monitor.shows import PlainShow
from tests.faults.test_histories_killed import WITH_HISTORIES
from tests.faults.test_joins_killed import write_jobs
from tests.integration.stream_job import SPEC, write_job

pytestmark = pytest.mark.usefixtures("warm")

NUM_DEATHS, MAX_ROUNDS = 10, 10
PLACE = ("cluster.trainers=2", "cluster.shards=2", "train.threads=1", "train.batch_size=8", "passes.max_events=32")
NARROW = "cluster.wire=bfloat16"
ON_SHARDS = "dense.strategy=shards"
SGD = ("tables.default.optimizer={kind='sgd'}", "dense.optimizer={kind='sgd'}")
SETTINGS = {
    "half the bytes": (NARROW,),
    "stale rows": ("train.staleness=2",),
    "stale rows in half the bytes": ("train.staleness=1", NARROW),
    "async, half the bytes": ("train.mode=async", ON_SHARDS, NARROW),
    "bounded async, dense parameters clipped, with momentum and schedule": (
        *("train.mode=async", "train.max_ahead=1", "dense.clip_norm=0.1", ON_SHARDS),
        "dense.optimizer={kind='sgd', lr=0.1, momentum=0.9}",
        "dense.schedule={kind='exponential', factor=0.5, every=500}",
    ),
    "half-async": ("train.mode=async", ON_SHARDS, "train.merge={pushes=2, wait='50ms'}"),
    "geo": ("train.mode=geo", "train.k_steps=3", ON_SHARDS, *SGD),
    "geo beside training": ("train.mode=geo", "train.k_steps=3", "train.staleness=1", ON_SHARDS, *SGD),
    "dense parameters on shards": (ON_SHARDS, *SGD),
    "histories and counters in async": ("train.mode=async", ON_SHARDS),
    "histories and counters in geo": ("train.mode=geo", "train.k_steps=3", ON_SHARDS, *SGD),
    "late labels in async": ("train.mode=async", ON_SHARDS),
    "late labels in geo": ("train.mode=geo", "train.k_steps=3", ON_SHARDS, *SGD),
}
BOTH = "stale rows in half the bytes"
SEEDS = [pytest.param(name, seed, marks=pytest.mark.slow) for name in SETTINGS for seed in (1, 2, 3, 4, 5)]


def written(folder, name):
    """The job of some settings: with histories and counters, with a join, or with none."""
    if name.startswith("late"):
        write_jobs(folder)
        return folder / "job.toml"
    return write_job(folder, num_lines=600, spec=WITH_HISTORIES if name.startswith("histories") else SPEC)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "seed"), [pytest.param(BOTH, 0, marks=pytest.mark.long), *SEEDS])
def test_ten_deaths_change_nothing(tmp_path, name, seed):
    said: list[str] = []
    job = written(tmp_path, name)
    runs = FaultRuns(job, [*PLACE, *SETTINGS[name]], None, seed, lambda worker, text: said.append(f"{worker}: {text}"))
    runs.undisturbed()
    num_died = 0
    for number in range(1, MAX_ROUNDS + 1):
        found = runs.disturbed(number, PlainShow())
        assert found.identical, (found.wrong, found.unasked, said[-30:])
        num_died += len(found.died)
        if num_died >= NUM_DEATHS:
            return
    raise AssertionError(f"only {num_died} workers died in {MAX_ROUNDS} rounds")
