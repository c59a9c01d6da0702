"""The parts of one trainer, as trainer.job builds them and trainer.loop uses them."""

from dataclasses import dataclass

from dataset.loader import Loader
from pserver.client import Shards
from pserver.consistency.policy import Consistency
from trainer.batches import Batch, BatchMaker
from trainer.close import PassCloser
from trainer.commit import Committer
from trainer.config import TaskSection, TrainSection
from trainer.dense_strategy import DenseStrategy
from trainer.exports.exporting import Exporting
from trainer.feed import ChiefFeed
from trainer.infer_first import InferFirst
from trainer.leading import Lead
from trainer.observe import Observer
from trainer.progress import Progress
from trainer.ranks import Ranks
from trainer.step import Stepper


@dataclass(frozen=True)
class TrainerParts:
    """Everything that a trainer consists of."""

    train: TrainSection
    tasks: tuple[TaskSection, ...]
    ranks: Ranks
    policy: Consistency
    shards: Shards
    loader: Loader[Batch]
    maker: BatchMaker
    stepper: Stepper
    dense: DenseStrategy
    observer: Observer
    closer: PassCloser
    progress: Progress
    rank0: Lead | None
    """Only on rank 0, like the four below; None on the other ranks."""
    committer: Committer | None
    """None in a rerun too: a rerun writes nothing."""
    exporting: Exporting | None
    """None in a rerun."""
    feed: ChiefFeed | None = None
    """None in a rerun."""
    infer_first: InferFirst | None = None
    """Only where each pass is predicted before it is learnt from."""
