"""Workers killed ten times at seeded places change nothing, whatever the dense strategy."""

import tomllib
from itertools import islice

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import AtFailpoint, AtInstant, JobFeatures, deaths
from headrace.service.faults.injection import Deaths, run
from headrace.service.faults.rounds import FALLBACK
from headrace.trainer.dense_config import HierarchySection
from tests.faults.test_kills import assert_nothing_left, job_at, report, said_by
from tests.integration.stream_job import write_job
from tests.integration.test_model_zoo_jobs import write_next

pytestmark = pytest.mark.usefixtures("warm")

NUM_DEATHS, SEED = 10, 17
STRATEGIES = {
    "local_sgd": "dense={strategy='local_sgd', k_steps=3, begin=20, adaptive=true}",
    "sharded": "dense={strategy='sharded', clip_norm=0.5}",
    "sharded_gradients": "dense={strategy='sharded', stage=2, bucket_bytes=256, clip_norm=0.5}",
    "sharded_weights": "dense={strategy='sharded', stage=3, bucket_bytes=256, clip_norm=0.5}",
    "dgc": "dense={compression='dgc', dgc={sparsity=0.95, warmup_steps=20}, optimizer={kind='sgd', momentum=0.9}}",
    "powersgd": "dense={compression='powersgd', powersgd={rank=1}}",
    "hierarchy": "dense={compression='powersgd', powersgd={rank=1}, hierarchy={group=2}}",
    "pipeline": "dense={strategy='pipeline', clip_norm=0.5}",
    "pipelines": "dense={strategy='pipeline', accumulate=2, pipeline={stages=2}, clip_norm=0.5}",
    "groups": "dense={hierarchy={group=2}, compression='fp16'}",
    "recompute": "dense={recompute={blocks='all'}, optimizer={kind='adagrad'}}",
    "bfloat16": "train.amp='bfloat16'",
}
"""An average, or its flush at a close, is in the middle of each pass of five steps."""
TRAINERS = {"hierarchy": 4, "groups": 4, "pipelines": 4}
"""Where it is not 2: two groups of two, so that there are sums within a group and sums between groups."""


def test_the_case_with_a_hierarchy_has_sums_within_groups_and_between_them():
    hierarchy = tomllib.loads(STRATEGIES["hierarchy"])["dense"]["hierarchy"]
    assert 1 < HierarchySection(**hierarchy).size(TRAINERS["hierarchy"]) < TRAINERS["hierarchy"]


def ten_deaths(trainers):
    return list(islice(deaths(SEED, trainers, 1, JobFeatures(mirrored=True)), NUM_DEATHS))


def assert_deaths_change_nothing(folder, settings, trainers, planned):
    """The deaths that are `planned` all happen to the job in `folder`, and nothing else does."""
    said, settings = [], (*settings, "passes.max_events=80")
    undisturbed, disturbed = (job_at(folder, store, trainers, 1, *settings) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said[-20:]
    killed = Deaths(disturbed.store, iter(planned), FALLBACK)
    outcome = run(disturbed, killed, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert len(killed.died) == len(planned) and not killed.unasked
    assert killed.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)
    assert_nothing_left(disturbed.store, generation=len(planned) + 1)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_three_deaths_between_averages_change_nothing(tmp_path):
    """In the first passes, between two averages; trainers average from the beginning."""
    planned = [
        AtFailpoint("shard-0", Failpoint.PARTLY_PUSHED, 7),
        AtInstant("trainer-1", closes=1, delay_s=0.02),
        AtFailpoint("trainer-1", Failpoint.BEFORE_CLOSE, 2),
    ]
    write_job(tmp_path, num_lines=500)
    averages = ("dense={strategy='local_sgd', k_steps=3, adaptive=true}",)
    assert_deaths_change_nothing(tmp_path, averages, 2, planned)


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "strategy", ["sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "sharded")]
)
def test_ten_deaths_change_nothing(tmp_path, strategy):
    trainers = TRAINERS.get(strategy, 2)
    write_job(tmp_path, num_lines=500)
    assert_deaths_change_nothing(tmp_path, (STRATEGIES[strategy],), trainers, ten_deaths(trainers))


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ten_deaths_change_nothing_where_items_are_divided_over_three_trainers(tmp_path):
    write_next(tmp_path, num_lines=800)
    merged = "pipe.max_bad_fraction=0.05", "dense.accumulate=2", "train.batch_size=8"
    assert_deaths_change_nothing(tmp_path, merged, 3, ten_deaths(3))
