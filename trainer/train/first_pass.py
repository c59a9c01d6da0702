"""Reads the first pass of a generation while its shards are restored, if that pass is in the log already.

It is read, parsed and cut into batches. The shards look up its rows once they have them (BatchMaker.begin).
"""

from headrace.dataset.loader.batch_loader import Loader
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.recovery import RestartPoint


def read_first(
    ranks: Ranks,
    beginning: RestartPoint | None,
    maker: BatchMaker,
    loader: Loader[TrainingBatch],
    *,
    one_reader: bool = False,
) -> int | None:
    """Begin to read the first logged pass after the state of `beginning`, known on rank 0; returns its number.

    Every rank calls it. None: no such pass is logged. `one_reader`: see DenseStrategy.
    """
    known = {} if beginning is None or not beginning.replay else {"plan": beginning.replay[0].plan.message()}
    message = ranks.broadcast(known if ranks.rank == 0 else None)
    if "plan" not in message:
        return None
    plan = PassPlan.of_message(message["plan"])
    read_ahead(plan, ranks, maker, loader, one_reader=one_reader)
    return plan.number


def read_ahead(
    plan: PassPlan, ranks: Ranks, maker: BatchMaker, loader: Loader[TrainingBatch], *, one_reader: bool = False
) -> None:
    """Begin to read a pass on this rank. `one_reader`: see DenseStrategy; rank 0 reads the parts of all ranks."""
    maker.expect(plan.number, plan.learn)
    segments = [each for rank in plan.segments for each in rank]
    if one_reader and ranks.rank:
        segments = []
    elif not one_reader and not loader.reads_all:
        segments = list(plan.segments[ranks.rank])
    loader.submit(plan.number, segments)
