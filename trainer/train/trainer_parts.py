"""The parts of one trainer, as trainer.train.assembly builds them and trainer.train.loop uses them."""

from dataclasses import dataclass

from headrace.dataset.loader.batch_loader import Loader
from headrace.pserver.consistency.policy import Consistency
from headrace.pserver.protocol.shards import Shards
from headrace.trainer.checkpoint.committer import Committer
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.exchanges import Exchanges
from headrace.trainer.train.infer_first import InferFirst
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.model_feed import ModelFeed
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.step import Stepper


@dataclass(frozen=True)
class TrainerParts:
    """Everything that a trainer consists of."""

    train: TrainSection
    tasks: tuple[TaskSection, ...]
    ranks: Ranks
    policy: Consistency
    shards: Shards
    loader: Loader[TrainingBatch]
    exchanges: Exchanges
    maker: BatchMaker
    stepper: Stepper
    dense: DenseStrategy
    observer: Observer
    closer: PassCloser
    progress: TrainerProgress
    rate: LearningRate
    rank0: RankZero | None
    """Only on rank 0, like the four below; None on the other ranks."""
    committer: Committer | None
    """None in a rerun too: a rerun writes nothing."""
    exporting: ExportCoordinator | None
    """None in a rerun."""
    feed: ModelFeed | None = None
    """None in a rerun."""
    infer_first: InferFirst | None = None
    """Only where each pass is predicted before it is learnt from."""
    average: bool = True
    """`dense.average`."""
    gated: GatedReader | None = None
    """Only where slots have histories, or samples wait for their labels."""
