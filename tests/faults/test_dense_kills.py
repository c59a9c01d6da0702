"""Workers killed ten times at seeded places change nothing, whatever the dense strategy."""

import tomllib
from itertools import islice

import pytest

from service.faults.deaths import JobFeatures, deaths
from service.faults.injection import Deaths, run
from service.faults.rounds import FALLBACK
from tests.faults.test_kills import assert_nothing_left, job_at, report, said_by
from tests.integration.stream_job import write_job
from trainer.dense_config import HierarchySection

NUM_DEATHS = 10
STRATEGIES = {
    "local_sgd": "dense={strategy='local_sgd', k_steps=3, begin=20, adaptive=true}",
    "sharded": "dense={strategy='sharded', clip_norm=0.5}",
    "dgc": "dense={compression='dgc', dgc={sparsity=0.95, warmup_steps=20}, optimizer={kind='sgd', momentum=0.9}}",
    "powersgd": "dense={compression='powersgd', powersgd={rank=1}}",
    "hierarchy": "dense={compression='powersgd', powersgd={rank=1}, hierarchy={group=2}}",
    "pipeline": "dense={strategy='pipeline', clip_norm=0.5}",
}
"""An average, or its flush at a close, is in the middle of each pass of five steps."""
TRAINERS = {"hierarchy": 4}
"""Where it is not 2: two groups of two, so that there are sums within a group and sums between groups."""


def test_the_case_with_a_hierarchy_has_sums_within_groups_and_between_them():
    hierarchy = tomllib.loads(STRATEGIES["hierarchy"])["dense"]["hierarchy"]
    assert 1 < HierarchySection(**hierarchy).size(TRAINERS["hierarchy"]) < TRAINERS["hierarchy"]


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "strategy", ["sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "sharded")]
)
def test_ten_deaths_change_nothing(tmp_path, strategy):
    write_job(tmp_path, num_lines=500)
    said, settings, trainers = [], (STRATEGIES[strategy], "passes.max_events=80"), TRAINERS.get(strategy, 2)
    undisturbed, disturbed = (job_at(tmp_path, store, trainers, 1, *settings) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said[-20:]
    planned = deaths(17, trainers, 1, JobFeatures(mirrored=True))
    killed = Deaths(disturbed.store, islice(planned, NUM_DEATHS), FALLBACK)
    outcome = run(disturbed, killed, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert len(killed.died) == NUM_DEATHS and not killed.unasked
    assert killed.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)
    assert_nothing_left(disturbed.store, generation=NUM_DEATHS + 1)
