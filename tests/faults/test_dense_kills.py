"""Workers killed ten times at seeded places change nothing, whatever the dense strategy."""

from itertools import islice

import pytest

from service.faults.deaths import JobFeatures, deaths
from service.faults.injection import Deaths, run
from service.faults.rounds import FALLBACK
from tests.faults.test_kills import assert_nothing_left, job_at, report, said_by
from tests.integration.stream_job import write_job

NUM_DEATHS = 10
STRATEGIES = {
    "local_sgd": "dense={strategy='local_sgd', k_steps=3, begin=20, adaptive=true}",
    "sharded": "dense={strategy='sharded', clip_norm=0.5}",
    "dgc": "dense={compression='dgc', dgc={sparsity=0.95, warmup_steps=20}, optimizer={kind='sgd', momentum=0.9}}",
    "powersgd": "dense={compression='powersgd', powersgd={rank=1}, hierarchy={group=2}}",
    "pipeline": "dense={strategy='pipeline', clip_norm=0.5}",
}
"""An average, or its flush at a close, is in the middle of each pass of five steps."""


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "strategy", ["sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "sharded")]
)
def test_ten_deaths_change_nothing(tmp_path, strategy):
    write_job(tmp_path, num_lines=500)
    said, settings = [], (STRATEGIES[strategy], "passes.max_events=80")
    undisturbed, disturbed = (job_at(tmp_path, store, 2, 1, *settings) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said[-20:]
    planned = deaths(17, 2, 1, JobFeatures(mirrored=True))
    killed = Deaths(disturbed.store, islice(planned, NUM_DEATHS), FALLBACK)
    outcome = run(disturbed, killed, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert len(killed.died) == NUM_DEATHS and not killed.unasked
    assert killed.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)
    assert_nothing_left(disturbed.store, generation=NUM_DEATHS + 1)
