"""A run on four test machines: two hold the trainers, two the shards, and each has a link of its own.

The object store for commits is on a fifth machine. Everything shares the cores of this one.
"""

import gzip
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.exact_auc import exact_auc
from headrace.trainer.metrics.halves import FILE_NAME
from headrace.trainer.metrics.samples import row_type
from tests.bench.living import DATA, EXAMPLES
from tests.machines import network
from tests.machines.external_job import USUAL_TIMEOUT_S, ExternalJob, Output, object_store
from tests.machines.network import Machine

EVENTS = DATA / "criteo" / "criteo_80k.txt.gz"
HERE = Path(__file__).parent
BATCH = 128
START_S, RUN_S = 120.0, 1800.0
DELAYED = 1
"""The machine whose link may have a delay."""
POINTS = 6
"""Of a curve."""
COMPUTE, WIRE = ("forward", "backward"), ("exchange",)
"""Parts of rank 0's time. A wait for other ranks is part of the exchange."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers, and the link of each machine."""

    trainers: int = 8
    shards: int = 2
    rate: str = "1gbit"
    """Both ways. Empty: as fast as can be."""
    delay_ms: float = 0.0
    """Of the link of the machine of the second half of the trainers, both ways."""
    alone: bool = False
    """The last trainer has that machine for itself; all others are on the first one."""

    def home(self, trainer: int) -> int:
        """The number of a trainer's machine."""
        return int(trainer == self.trainers - 1) if self.alone else 2 * trainer // self.trainers


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Times are rank 0's, of one step; traffic is that of all workers, sent and received.

    The whole of a step has its share of the first wait for data and of the close, too.
    """

    steps: int
    step_ms: float
    compute_ms: float
    wire_ms: float
    all_mb: float
    trainers_mb: float
    """Between trainers."""
    auc: float
    """Of the second half of the samples, each predicted before it is learnt."""
    curve: Sequence[tuple[int, float, float]] = ()
    """Samples, and loss and AUC of those since the point before, each predicted before it is learnt."""

    @property
    def both_ms(self) -> float:
        """A step without its share of start and close."""
        return self.compute_ms + self.wire_ms

    def __str__(self) -> str:
        return (
            f"{self.step_ms:.0f} ms a step, computing {self.compute_ms:.0f}, exchanging {self.wire_ms:.0f}; "
            f"{self.all_mb:.1f} MB; AUC {self.auc:.4f}"
        )


def measured(cluster: Cluster, steps: int, settings: Sequence[str]) -> Measured:
    """Train `steps` steps with all trainers."""
    samples = steps * BATCH * cluster.trainers
    with running(cluster, samples, (f"passes.max_events={samples}", *settings)) as (job, launcher):
        if launcher.end(RUN_S):
            raise RuntimeError(launcher.said)
        (predictions,) = (job.head.tmp / "store").rglob(FILE_NAME)
        return _measured(job.report, steps, cluster, curve_of(predictions))


@contextmanager
def running(cluster: Cluster, samples: int, settings: Sequence[str]) -> Iterator[tuple[ExternalJob, Output]]:
    """A job over so many samples, and its launcher; its workers are started."""
    with network.machines(5) as (*machines, disk), object_store(disk) as address:
        for machine in machines:
            fill(machine, samples)
        size = {"trainers": cluster.trainers, "shards": cluster.shards}
        with ExternalJob(machines[0], address("hybrid"), *settings, **size, node_timeout_s=USUAL_TIMEOUT_S) as job:
            token, launcher = job.token(), job.run()
            launcher.until("waits for", START_S)
            for number, machine in enumerate(machines):
                machine.shape(rate=cluster.rate, delay_ms=cluster.delay_ms if number == DELAYED else 0.0)
            for number in range(cluster.trainers):
                job.agent(machines[cluster.home(number)], "--role", "trainer", token=token)
            for number in range(cluster.shards):
                job.agent(machines[2 + number % 2], "--role", "shard", token=token)
            yield job, launcher


def fill(machine: Machine, samples: int) -> None:
    """Give a machine the job and its samples."""
    for file in (HERE / "job.toml", HERE / "models.py", EXAMPLES / "criteo" / "generator.py"):
        shutil.copy(file, machine.tmp)
    (machine.tmp / "data").mkdir()
    with gzip.open(EVENTS) as lines:
        content = b"".join(islice(cycle(lines), samples))
    (machine.tmp / "data" / EVENTS.name).write_bytes(gzip.compress(content, 1, mtime=0))


def curve_of(predictions: Path) -> list[tuple[int, float, float]]:
    """See Measured. The file has every sample in training order (trainer.metrics.halves)."""
    rows_N = np.fromfile(predictions, row_type(1, grouped=False))
    ends = np.linspace(0, len(rows_N), POINTS + 1).astype(int).tolist()
    return [(end, *_loss_and_auc(rows_N[begin:end])) for begin, end in pairwise(ends)]


def _loss_and_auc(rows_N: NDArray[Any]) -> tuple[float, float]:
    prediction_N, label_N = rows_N["prediction0"], rows_N["label0"]
    right_N = np.where(label_N > 0.5, prediction_N, 1 - prediction_N).astype(np.float64)
    auc = exact_auc(prediction_N, label_N, np.ones(len(rows_N), np.float32))
    return -float(np.log(np.maximum(right_N, 1e-7)).mean()), 0.5 if auc is None else auc


def _measured(report: dict[str, Any], steps: int, cluster: Cluster, curve: Sequence[Any]) -> Measured:
    found = report["events"]
    if found != steps * BATCH * cluster.trainers:
        raise RuntimeError(f"{found} events were trained, not {steps} steps of {cluster.trainers} trainers")
    spent = report["time_s"]
    whole = sum(seconds for part, seconds in spent.items() if part != "commit")
    each, compute, wire = (
        1000 * seconds / steps
        for seconds in (whole, *(sum(spent[part] for part in parts) for parts in (COMPUTE, WIRE)))
    )
    (task,) = report["halves"]["last"].values()
    links = [(a, b, link) for a, peers in report["links"].items() for b, link in peers.items()]
    between = [link for a, b, link in links if a.startswith("trainer") and b.startswith("trainer")]
    every, own = (_traffic_mb(some) / steps for some in ([link for _, _, link in links], between))
    return Measured(steps, each, compute, wire, every, own, float(task["auc"]), curve)


def _traffic_mb(links: Sequence[Mapping[str, Any]]) -> float:
    return sum(link.get(way, 0.0) for link in links for way in ("sent_bytes", "received_bytes")) / 1e6
