"""The number of a withdrawn pass is never reused, even if passes before it are replayed first."""

from types import SimpleNamespace

from headrace.trainer.checkpoint.rewind import skip
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.records import SpecOperation
from headrace.trainer.rank0.recovery import Recovery
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.commit_state import restore
from tests.fakes.past import SPEC, Past


def test_plans_after_a_replay_have_numbers_above_all_withdrawn_ones(tmp_path):
    """Otherwise its plan would count as withdrawn, and the next replay would leave out its events."""
    past = Past(tmp_path / "store").begin()
    past.log.append(SpecOperation(spec=SPEC))
    past.meet("a")
    for number in (1, 2):
        past.close(number, a=(100 * number - 100, 100 * number))
    past.plan(3, a=(200, 300))
    past.plan(4, a=(300, 400))
    past.end()
    assert skip(past.store, None, SkippedRange("a", 250, 300), "bad bytes") == [3, 4]

    found = Recovery(past.store, 3, SPEC).begin()
    found.joblog.close()
    progress = TrainerProgress("job")
    shards = SimpleNamespace(call=lambda *_: None)
    restore(SingleRank(), found, shards, SimpleNamespace(progress=progress), None)
    assert [each.plan.number for each in found.replay] == [1, 2]
    for each in found.replay:
        progress.planned(each.plan)
    assert progress.last_planned + 1 == 5
