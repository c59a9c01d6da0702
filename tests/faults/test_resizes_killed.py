"""A job that is resized again and again, and killed on the way, ends like one that nobody touched.

Deaths at points of the hand-over, of the workers that train and of those that stand by; and random deaths.
"""

from itertools import cycle, islice, pairwise

import pytest

from millrace.failpoints import LAST_WORDS, ArmedFailpoint, Failpoint
from service.faults.deaths import CHIEF
from tests.faults.resized_job import NUM_LINES, RandomDeaths, job_at, report, run, sizes_until, written
from trainer.journal.job_history import JobHistory
from trainer.journal.log import RecordKind, read

POINTS = (
    ("shard-0", Failpoint.RESTORE_LINKED),  # the new shards restore a commit
    (CHIEF, Failpoint.OPERATION_LOGGED),  # rows are moved, the resize is decided, and nothing else
    (CHIEF, Failpoint.OPERATED),  # closed
    (CHIEF, Failpoint.DENSE_WRITTEN),  # a commit is not whole: perhaps the last one
    ("shard-0", Failpoint.CHECKPOINT_MADE),
    (CHIEF, Failpoint.COMMITTED),  # it is
    (CHIEF, Failpoint.CLAIMED),  # the next generation has the job
    (CHIEF, Failpoint.RESTORED),  # its rows are complete
    (CHIEF, Failpoint.CLOSED),  # it trains
)
NUM_RESIZES = 14
"""More than there are points: some resizes act before the death that is due."""


class DeathsInTurn:
    """Each generation dies at the first point at which none died yet; it may be discarded before."""

    def __init__(self, points=POINTS):
        self.said, self._points = [], points

    @property
    def died(self):
        return [line.rpartition(" ")[2] for line in self.said if LAST_WORDS in line]

    @property
    def done(self):
        return {point.value for _, point in self._points} <= set(self.died)

    def faults(self, generation, worker):
        died = set(self.died)
        due = next(((who, point) for who, point in self._points if point.value not in died), (None, None))
        return (ArmedFailpoint(point=due[1], hit=1 + (due[1] is Failpoint.CLOSED)),) if due[0] == worker else ()

    def sizes(self, role, *numbers):
        """Sizes to ask for, in turn, until all have died."""
        for number in islice(cycle(numbers), 3 * NUM_RESIZES):
            if self.done:
                return
            yield {role: number}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_death_at_every_point_of_a_resize_of_shards_changes_nothing(tmp_path):
    file = written(tmp_path)
    calm, killed = (job_at(file, store, "{trainers=1, shards=1}") for store in ("calm", "killed"))
    run(calm)
    deaths = DeathsInTurn()
    said, resizer = run(killed, deaths.sizes("shards", 2, 3, 1), deaths.faults, deaths.said)
    assert report(killed) == report(calm)
    assert deaths.done, (deaths.died, said[-30:])
    assert any("takes over" in line for line in said)
    assert any("the resize is given up" in line for line in said) and resizer.failures, "a death of those that stand by"
    assert len(resizer.acted) > 3
    kinds = [record for record in read(killed.store / "log") if record.kind is RecordKind.OPERATION]
    assert {record.body["id"] for record in kinds if record.body["op"] == "resize"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_death_at_every_point_of_a_resize_of_trainers_loses_no_event(tmp_path):
    """A closed pass is the same again in every replay, or the job would stop; its trainers are as many as logged."""
    job = job_at(written(tmp_path), "killed", "{trainers=1, shards=1}")
    deaths = DeathsInTurn([each for each in POINTS if each[1] is not Failpoint.OPERATED])
    said, resizer = run(job, deaths.sizes("trainers", 3, 2, 1), deaths.faults, deaths.said)
    assert deaths.done and len(resizer.acted) > 3, (deaths.died, said[-30:])
    history = JobHistory.of(read(job.store / "log"))
    plans = [plan.content for _, plan in sorted(history.plans.items())]
    assert len({len(plan.segments) for plan in plans}) > 1
    segments = sorted((s.partition, s.begin, s.end) for plan in plans for rank in plan.segments for s in rank)
    for (name, _, end), (other, begin, _) in pairwise(segments):
        assert name != other or begin == end, "every event once, and none left out"
    assert report(job)["events"] == 3 * NUM_LINES - 21


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_deaths_among_resizes_change_nothing(tmp_path, seed):
    """`python -m tests.faults.resized_job --kills 50 --seed 1` has more of them."""
    file = written(tmp_path)
    calm, killed = (job_at(file, store, "{trainers=1, shards=1}") for store in ("calm", "killed"))
    run(calm)
    deaths = RandomDeaths(seed, killed.store, most=8)
    with deaths.working():
        said, resizer = run(killed, sizes_until(lambda: deaths.done, seed, "shards", range(4), 4))
    assert report(killed) == report(calm), (seed, deaths.killed)
    assert deaths.num_kills == 8 and len(resizer.acted) > 3, (deaths.killed, resizer.failures, said[-30:])
