"""A job that does not learn: it reads and measures every sample once, whatever is killed, and its model stays."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from millrace.config import load_toml
from millrace.deadline import Deadline
from millrace.points import Fault, Point
from service.looking.importing import Asked, import_into
from service.looking.states import CommitState
from service.spec import load_job
from tests.fakes.exports import write_export
from tests.integration.stream_job import LIVING, millrace, write_living_job
from trainer.commits import Commits
from trainer.config import WorkerConfig
from trainer.job import open_trainer
from trainer.report import digest_of

PASS_EVENTS, NUM_LINES, NUM_LEARNT = 60, 480, 240
SPEC = (LIVING.partition("[exports.serving]")[0] + "[model]" + LIVING.partition("[model]")[2]).replace(
    "max_events = 400", f"max_events = {PASS_EVENTS}"
)
"""Admission, ageing and shrinking at each day tick: all that must not act. Eight days of events."""
FROZEN = "train.learn=false"


@dataclass(frozen=True)
class Ended:
    """How a run stands at its end."""

    digest: str
    """Of rows and dense part."""
    day: int
    metrics: dict
    events: int
    learning: bool


@pytest.fixture(scope="module", autouse=True)
def torch_as_before() -> Iterator[None]:
    """A trainer in this process sets torch up for itself."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = True


def config_of(job: Path, store: Path, *settings: str, generation: int = 1, **more) -> WorkerConfig:
    """One trainer, with the shard in its process."""
    raw = load_toml(job, [f"store.path={store}", "commit.every_passes=2", *settings])
    store.mkdir(exist_ok=True)
    where = {"folder": job.parent, "store": store, "live": store / f"live-{generation}", "address_file": store / "role"}
    return WorkerConfig(job=raw, rank=0, world=1, generation=generation, **where, **more)


def run(job: Path, store: Path, *settings: str, generation: int = 2, to_events: int = NUM_LINES) -> Ended:
    """The trainer in this process: to the end of the stream, or drained in the pass with `to_events` events in all."""
    with open_trainer(config_of(job, store, *settings, generation=generation)) as trainer:
        parts = trainer.parts
        if to_events < NUM_LINES:
            before = to_events - PASS_EVENTS
            parts.observer.watch(lambda _: trainer.loop.drain() if parts.progress.num_events == before else None)
        trainer.loop.run()
        parts.chief.beginning.joblog.close()
        digest, told = digest_of(parts.shards, parts.dense, Deadline.after(10)), parts.progress.status()
        return Ended(digest, parts.closer.day, told["metrics"], told["events"], told["learning"])


def killed(job: Path, store: Path, *settings: str, generation: int, point: Point, hit: int) -> None:
    """The trainer in a process of its own, which is ended by SIGKILL where `point` says."""
    config = config_of(job, store, *settings, generation=generation, faults=(Fault(point=point, hit=hit),))
    path = store / "config.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "trainer", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    """A job that has learnt from the first half of a stream, in store "learnt"; late-0.txt is the other half."""
    folder = tmp_path_factory.mktemp("frozen")
    job = write_living_job(folder, num_parts=1, num_lines=NUM_LINES, spec=SPEC)
    lines = (folder / "part-0.txt").read_text().splitlines(keepends=True)
    (folder / "late-0.txt").write_text("".join(lines[NUM_LEARNT:]))
    run(job, folder / "learnt", generation=1, to_events=NUM_LEARNT)
    return job


def copied(job: Path, name: str) -> Path:
    """A store that stands where the learnt one does."""
    shutil.copytree(job.parent / "learnt", job.parent / name)
    return job.parent / name


def test_its_model_stays_and_every_sample_is_measured_once_whatever_is_killed(stream):
    plain = run(stream, copied(stream, "plain"), FROZEN)
    at_once = run(stream, copied(stream, "one-pass"), FROZEN, "passes.max_events=1000")
    assert plain.metrics["life"]["ctr"]["count"] == NUM_LINES == plain.events and not plain.learning
    for name in ("auc", "logloss", "mean_prediction"):  # a model that stays says the same wherever passes are cut
        assert plain.metrics["life"]["ctr"][name] == pytest.approx(at_once.metrics["life"]["ctr"][name], abs=1e-5)
    assert (plain.digest, plain.day) == (at_once.digest, at_once.day)

    again = copied(stream, "again")
    killed(stream, again, FROZEN, generation=2, point=Point.CLOSED, hit=3)
    assert run(stream, again, FROZEN, generation=3) == plain


def test_learning_goes_on_after_it_and_catches_up_with_the_days(stream):
    store = copied(stream, "resumed")
    frozen = run(stream, store, FROZEN, to_events=360)
    learnt = run(stream, store, generation=3)
    assert frozen.events == 360 and frozen.day == 3
    assert learnt.learning and learnt.day == 7 and learnt.events == NUM_LINES
    assert learnt.digest != frozen.digest


TWIN = (FROZEN, 'sources.lines.paths=["late-0.txt"]')


@pytest.fixture(scope="module")
def imported(stream):
    """A store that begins with an export of what was learnt, as `millrace import` makes it, for the stream's rest."""
    folder, commits = stream.parent, Commits(stream.parent / "learnt")
    state = CommitState(commits.read(commits.names()[-1]), folder / "look")
    with state.rows("default") as chunks:
        rows = {
            (slot, sign): values
            for chunk in chunks
            for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values, strict=True)
        }
    export = write_export(folder / "export", "base", 3, rows, dense=state.dense())
    import_into(load_job(stream, [*TWIN, f"store.path={folder / 'imported'}"]), Asked(str(export)))
    return folder / "imported"


@pytest.fixture(scope="module")
def twin(stream, imported):
    """How a twin comes out that begins so."""
    shutil.copytree(imported, stream.parent / "twin")
    return run(stream, stream.parent / "twin", *TWIN)


def test_a_twin_begun_with_an_export_says_what_the_job_itself_would(stream, twin):
    frozen = run(stream, copied(stream, "frozen"), FROZEN)
    assert twin.metrics["pass"] == frozen.metrics["pass"], "of the last pass, which is of the same samples"
    assert twin.events == NUM_LINES - NUM_LEARNT


def test_ranks_and_shards_leave_its_model_as_it_is(stream, imported, twin):
    two = millrace(stream, *TWIN, "cluster.trainers=2", "cluster.shards=2", store="imported")
    assert two.code == 0, two.output
    assert two.report["digest"] == twin.digest and two.report["events"] == twin.events
    ours, theirs = (metrics["life"]["ctr"] for metrics in (twin.metrics, two.report["metrics"]))
    assert theirs["count"] == ours["count"] and theirs["logloss"] == pytest.approx(ours["logloss"], abs=1e-5)
