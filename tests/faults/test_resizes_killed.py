"""A job that is resized again and again, and killed on the way, ends like one that nobody touched.

Deaths at points of the hand-over, of the workers that train and of those that stand by; and random deaths.
"""

import json
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import pytest

from headrace.failpoints import LAST_WORDS, ArmedFailpoint, Failpoint
from headrace.service.faults.deaths import RANK_0
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import RecordKind, read
from tests.faults.resized_job import NUM_LINES, RandomDeaths, job_at, report, run, sizes_until, written
from tests.s3_server import s3  # noqa: F401

pytestmark = pytest.mark.usefixtures("warm")


@dataclass(frozen=True)
class Death:
    """The death of a worker."""

    worker: str
    point: Failpoint
    hit: int = 1
    stands_by: bool = False
    """Only of a generation that stands by, or that stood by before it had the job."""


DEATHS = (
    Death("shard-0", Failpoint.RESTORE_LINKED, 2, stands_by=True),  # the new shards go on to a commit
    Death(RANK_0, Failpoint.OPERATION_LOGGED),  # rows are moved, the resize is decided, and nothing else
    Death(RANK_0, Failpoint.OPERATED),  # closed
    Death(RANK_0, Failpoint.DENSE_WRITTEN),  # a commit is not whole: a round's, or that of what was handed over
    Death("shard-0", Failpoint.CHECKPOINT_MADE),
    Death(RANK_0, Failpoint.COMMITTED),  # it is
    Death("shard-0", Failpoint.ROWS_HANDED),  # the last rows are half handed over
    Death(RANK_0, Failpoint.HANDED_OVER),  # they are, and nothing of it is committed
    Death(RANK_0, Failpoint.CLAIMED, stands_by=True),  # the next generation has the job
    Death(RANK_0, Failpoint.RESTORED, stands_by=True),  # its rows are complete
    Death(RANK_0, Failpoint.CLOSED, 2, stands_by=True),  # it trains
)
MAX_RESIZES = 42
"""Far more than there are deaths: some resizes act before the one that is due."""


class DeathsInTurn:
    """Each generation dies at the first point where none died yet; it may be discarded before."""

    def __init__(self, deaths=DEATHS):
        self.said, self._deaths = [], deaths

    @property
    def died(self):
        return [line.rpartition(" ")[2] for line in self.said if LAST_WORDS in line]

    @property
    def done(self):
        return {death.point.value for death in self._deaths} <= set(self.died)

    def faults(self, generation, worker):
        died = set(self.died)
        stands_by = any(line.endswith(f"generation {generation} stands by") for line in self.said)
        due = next((death for death in self._deaths if death.point.value not in died), None)
        if due is None or due.worker != worker or (due.stands_by and not stands_by):
            return ()
        return (ArmedFailpoint(point=due.point, hit=due.hit),)

    def sizes(self, role, *numbers):
        """Sizes to ask for, in turn, until all have died."""
        for number in islice(cycle(numbers), MAX_RESIZES):
            if self.done:
                return
            yield {role: number}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_death_at_every_point_of_a_resize_of_shards_changes_nothing(tmp_path):
    file = written(tmp_path)
    calm, killed = job_at(file, "calm", "{trainers=1, shards=0}"), job_at(file, "killed", "{trainers=1, shards=1}")
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
    deaths = DeathsInTurn([each for each in DEATHS if each.point is not Failpoint.OPERATED])
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
    calm, killed = job_at(file, "calm", "{trainers=1, shards=0}"), job_at(file, "killed", "{trainers=1, shards=1}")
    run(calm)
    deaths = RandomDeaths(seed, killed.store, most=8)
    with deaths.working():
        said, resizer = run(killed, sizes_until(lambda: deaths.done, seed, "shards", range(4), 4))
    assert report(killed) == report(calm), (seed, deaths.killed)
    assert deaths.num_kills == 8 and len(resizer.acted) > 3, (deaths.killed, resizer.failures, said[-30:])


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [({"shards": 3}, {"shards": 1}), ({"trainers": 2}, {"trainers": 1, "shards": 2})])
def test_dense_parameters_on_shards_go_with_a_resize(tmp_path, sizes):
    file = written(tmp_path, 500)
    calm, resized = (
        job_at(file, name, "{trainers=1, shards=2}", "dense.strategy='shards'") for name in ("calm", "resized")
    )
    said, resizer = run(resized, sizes)
    assert resizer.acted == list(sizes) and not resizer.failures, said[-30:]
    assert sum("takes over" in line for line in said) == len(sizes)
    assert report(resized)["events"] == 3 * 500 - 21
    if all("trainers" not in size for size in sizes):
        run(calm)
        assert report(resized) == report(calm)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_resize_of_shards_that_upload_their_parts_changes_nothing(tmp_path, s3):  # noqa: F811
    """The new shards fetch what they take over, each into its own folder, and go on to upload."""
    file = written(tmp_path, 500)
    calm = job_at(file, "calm", "{trainers=1, shards=0}")
    uri = json.dumps(s3.uri("bucket", "resized"))
    job = job_at(file, "resized", "{trainers=1, shards=2}", "store.parts='object'", f"store.mirror={uri}")
    run(calm)
    said, resizer = run(job, [{"shards": 3}])
    assert report(job) == report(calm)
    assert resizer.acted == [{"shards": 3}] and not resizer.failures
    assert any("takes over" in line for line in said)
    newest = Commits(job.store).whole()[-1]
    assert len(newest.shards) == 3 and newest.objects
