"""Each dense strategy goes on with another number of trainers in the middle of a stream, and can be trained again."""

import pytest

from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.integration.stream_job import headrace
from tests.integration.test_resizing import SETTINGS, job, resized, worlds

__all__ = ["job"]  # a fixture

STRATEGIES = {
    "local_sgd": "dense={strategy='local_sgd', k_steps=3, begin=4}",
    "sharded": "dense={strategy='sharded', group=2}",
    "sharded_weights": "dense={strategy='sharded', stage=3, bucket_bytes=256}",
    "dgc": "dense={compression='dgc', dgc={sparsity=0.9}, optimizer={kind='sgd', momentum=0.5}}",
    "powersgd": "dense={compression='powersgd', powersgd={rank=1}}",
    "pipeline": "dense={strategy='pipeline', pipeline={micro_batches=2}}",
    "pipelines": "dense={strategy='pipeline', accumulate=2, pipeline={micro_batches=2, stages=2}}",
}
WIDER = {"pipelines": 4}
"""The number of trainers after a resize, where it is not 3."""
SHORT = 'sources.lines.paths=["part-0.txt"]', "passes.max_events=100", "train.batch_size=16"
"""A third of the stream in fewer steps, so that many processes come to its end on a busy machine."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("sharded", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "sharded"),
    ],
)
def test_what_is_learnt_after_a_resize_is_the_same_when_trained_again(job, strategy):  # noqa: F811
    settings = (STRATEGIES[strategy], *SHORT, "commit.keep=1000", "cluster.trainers=2")
    running = resized(job, strategy, settings, [("--trainers", str(WIDER.get(strategy, 3)))])
    assert [world for world, _ in worlds(running.store)] == [2, WIDER.get(strategy, 3)]
    history = JobHistory.of(read(running.store / "log"))
    before = max(number for number, plan in history.plans.items() if len(plan.content.segments) == 2)
    again = headrace(
        job,
        *SETTINGS,
        *settings,
        store=str(running.store),
        command="rerun",
        options=("--from", str(before)),
        timeout_s=200,
    )
    assert again.code == 0, again.output
