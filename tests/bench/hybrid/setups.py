"""The models and strategies of the PS-Hybrid paper, and the traffic that its formulas say."""

from dataclasses import dataclass

from headrace.dataset.spec.schema import Schema
from headrace.service.spec.job import load_job
from headrace.trainer.config import TrainerJob
from headrace.trainer.models.contract import Shape
from headrace.trainer.models.registry import load_model
from tests.bench.hybrid.cluster import BATCH, HERE, Cluster


def _deep_crossing(*inner: int) -> tuple[str, ...]:
    return (f'model={{name="deep_crossing", settings={{hidden={list(inner)}}}}}',)


MODELS = {
    "dcn": ('model={name="dcn", settings={cross_layers=5, hidden=[256, 256, 256]}}',),
    "wide_deep": ('model={class="models:WideDeep"}',),
    "deep_crossing": _deep_crossing(128, 128, 128),
    "deep_crossing_1024": _deep_crossing(1024, 1024, 1024),
    "deep_crossing_7": _deep_crossing(*[256] * 7),
    "small": ('model={name="wide_deep", settings={hidden=[128, 64]}}', "tables.default.dim=8"),
}
"""Settings by the name of a model. The last one is not of the paper: it shows modes where messages are small."""
ON_SERVERS = 'dense.strategy="shards"'
BF16 = 'dense.compression="bf16"'
RING = "all-reduce alone"
"""No shards: every trainer holds all rows, see tests.bench.hybrid.ring."""
STRATEGIES: dict[str, tuple[str, ...]] = {
    "hybrid": (),
    "servers": (ON_SERVERS,),
    "servers, async": (ON_SERVERS, 'train.mode="async"'),
    RING: (),
    "hybrid, 8 times the rate": ("dense.optimizer.lr=0.08", "tables.default.optimizer.lr=0.08"),
    "hybrid, early rows": ("train.early_rows=true",),
    "hybrid, early rows, bfloat16": ("train.early_rows=true", "cluster.wire=bfloat16"),
    "hybrid, staleness 1": ("train.staleness=1",),
    "hybrid, bfloat16": ("cluster.wire=bfloat16",),
    "hybrid, staleness 1, bfloat16": ("train.staleness=1", "cluster.wire=bfloat16"),
    "hybrid, sums in bf16": (BF16,),
    "hybrid, sums in bf16, staleness 1, bfloat16": (BF16, "train.staleness=1", "cluster.wire=bfloat16"),
    "hybrid, dgc": ('dense.compression="dgc"',),
    "servers, geo": (ON_SERVERS, 'train.mode="geo"', "train.k_steps=10"),
    **{f"servers, slices of 1e{n}": (ON_SERVERS, f"dense.slice_floats={10**n}") for n in range(3, 8)},
    "servers, slices of 1e5, fifo": (ON_SERVERS, "dense.slice_floats=100000", "dense.priority=fifo"),
    "servers, async, slices of 1e5": (ON_SERVERS, 'train.mode="async"', "dense.slice_floats=100000"),
}
"""Settings by strategy; the first one saves time against the others, or loses it."""


DIM = 128
"""Floats of a row, but in "small"."""
TOUCHED_ROWS = 1_460
"""Different rows in a batch of 128 samples: 1,447 in the first 30 batches of criteo, 1,465 in the first 120."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One line of a table."""

    model: str
    strategy: str
    trainers: int = 8
    shards: int = 2
    rate: str = "1gbit"
    delay_ms: float = 0.0
    steps: int = 15

    @property
    def cluster(self) -> Cluster:
        """Its machines."""
        return Cluster(self.trainers, self.shards, self.rate, self.delay_ms)

    @property
    def settings(self) -> tuple[str, ...]:
        """Of its job."""
        return ("train.matmul=mkl", *MODELS[self.model], *STRATEGIES[self.strategy])

    @property
    def num_samples(self) -> int:
        """Samples that all trainers learn."""
        return self.steps * BATCH * self.trainers


def job_of(model: str) -> TrainerJob:
    """The job with a model, as a trainer reads it."""
    return load_job(HERE / "job.toml", [*MODELS[model], "store.path=never-made"]).spec


def num_parameters(model: str) -> int:
    """Dense parameters of a model."""
    job = job_of(model)
    shape = Shape.of(Schema.of(job.slots), job.tables, [task.name for task in job.tasks])
    return sum(each.numel() for each in load_model(job.model, shape, HERE).parameters())


def rows_traffic_mb(strategy: str, trainers: int) -> float:
    """Traffic of the rows in a step by the paper's formula, sent and received by all nodes."""
    times = 2 * trainers * (trainers - 1) if strategy == RING else 4 * trainers
    return times * TOUCHED_ROWS * DIM * 4 / 1e6


def dense_traffic_mb(model: str, strategy: str, trainers: int) -> float:
    """Traffic of the dense part in a step by the paper's formula, sent and received by all nodes."""
    times = trainers if ON_SERVERS in STRATEGIES[strategy] else trainers - 1
    return 4 * num_parameters(model) * times * 4 / 1e6
