"""One trainer, with the shard in its process, run in this one; or in one of its own that is killed on the way."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.codec import plain
from headrace.config import load_toml
from headrace.deadline import Deadline
from headrace.failpoints import ArmedFailpoint, Failpoint
from headrace.trainer.config import WorkerConfig
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.train.assembly import open_trainer
from headrace.trainer.train.report import digest_of


@contextmanager
def torch_as_before() -> Iterator[None]:
    """A trainer sets torch up for itself; what comes after it finds it as it was."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = True


@dataclass(frozen=True)
class Ended:
    """How a run stands at its end."""

    digest: str
    """Of rows and dense part."""
    day: int
    metrics: dict
    events: int
    learning: bool
    span_s: dict | None
    """How far apart event times lay in a pass."""
    guards: dict


def config_of(job: Path, store: Path, *settings: str, generation: int = 1, **more) -> WorkerConfig:
    """One trainer, with the shard in its process."""
    raw = load_toml(job, [f"store.path={store}", "commit.every_passes=2", *settings])
    store.mkdir(exist_ok=True)
    where = {"folder": job.parent, "store": store, "live": store / f"live-{generation}", "socket": store / "role"}
    return WorkerConfig(job=raw, rank=0, world=1, generation=generation, **where, **more)


def run(job: Path, store: Path, *settings: str, generation: int = 1, drain_after: int | None = None) -> Ended:
    """The trainer in this process: to the end of the stream, or drained in the pass after `drain_after` events."""
    with torch_as_before(), open_trainer(config_of(job, store, *settings, generation=generation)) as trainer:
        parts = trainer.parts
        if drain_after is not None:
            parts.observer.watch(lambda _: trainer.loop.drain() if parts.progress.num_events == drain_after else None)
        trainer.loop.run()
        trainer.rank0.beginning.joblog.close()
        digest, told = digest_of(parts.shards, parts.dense, Deadline.after(10)), parts.progress.status()
        metrics, guards = plain(told.metrics), plain(told.operations.guards)
        life = told.events, told.learning, told.event_span_s or None
        return Ended(digest, parts.closer.day, metrics, *life, guards)


def killed(job: Path, store: Path, *settings: str, generation: int, point: Failpoint, hit: int) -> None:
    """The trainer in a process of its own, which is ended by SIGKILL where `point` says."""
    config = config_of(job, store, *settings, generation=generation, faults=(ArmedFailpoint(point=point, hit=hit),))
    path = store / "config.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "headrace.trainer.train", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def closes(store: Path) -> dict[int, dict]:
    """What the log says of each pass."""
    return {number: record.body for number, record in JobHistory.of(read(store / "log")).closes.items()}
