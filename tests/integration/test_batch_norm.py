"""A user's model with BatchNorm trains on several trainers, skips a bad step, and replays to the bit after a kill."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from tests.integration.stream_job import SPEC, write_job
from tests.jobs import changed

pytestmark = pytest.mark.usefixtures("warm")

MODEL = """
import torch
from torch import nn


class Normal(nn.Module):
    def __init__(self, shape, settings):
        super().__init__()
        width = sum(slot.dim for slot in shape.pooled) + shape.dense_size
        self.net = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, inputs):
        return {"ctr": self.net(torch.cat([*inputs.vectors.values(), inputs.dense_BC], 1)).squeeze(1)}
"""
PASS_EVENTS, NUM_PASSES = 65, 7
DIES = [AtFailpoint(RANK_0, Failpoint.CLOSED, 4), AtFailpoint("trainer-1", Failpoint.BEFORE_CLOSE, 2)]
"""Deaths that leave passes closed after the last commit."""


def write_normal_job(folder):
    """The last pass holds one event: a batch of one sample on one trainer, and no batch on the others.

    The second pass begins with numbers whose sum float32 does not hold: the mean of their batch is infinite.
    """
    spec = changed(SPEC, {"model": {"class": "normal:Normal"}, "train.on_nonfinite": "skip_batch"})
    job = write_job(folder, num_parts=1, num_lines=(NUM_PASSES - 1) * PASS_EVENTS + 1, spec=spec)
    (folder / "normal.py").write_text(MODEL)
    lines = (folder / "part-0.txt").read_text().splitlines(keepends=True)
    for line in (PASS_EVENTS, PASS_EVENTS + 1):
        lines[line] = " ".join(["2 3e38 3e38", *lines[line].split(" ")[3:]])
    (folder / "part-0.txt").write_text("".join(lines))
    return job


def trained(job, store, trainers, deaths, *settings):
    """How it ended: every close by version, and the dense part of the last commit."""
    loaded = load_job(
        job,
        [
            f"store.path={store}",
            "commit={every='600s', every_passes=3}",
            f"cluster={{trainers={trainers}, shards={int(trainers > 1)}}}",
            f"passes.max_events={PASS_EVENTS}",
            "train.threads=1",
            "train.batch_size=8",
            *settings,
        ],
    )
    planned, said = Deaths(loaded.store, iter(deaths)), []
    outcome = run(loaded, planned, lambda worker, text: said.append(f"{worker}: {text}"))
    assert outcome.code == 0, said[-20:]
    assert len(planned.died) == len(deaths) and not planned.unasked, said[-20:]
    last = Commits(loaded.store).whole()[-1]
    assert last.version == NUM_PASSES and last.state["progress"]["skipped_steps"] == 1
    return planned.closes, load_file(last.folder / "dense.safetensors")


@pytest.mark.parametrize(
    ("trainers", "buffers"),
    [
        pytest.param(2, "rank0", marks=pytest.mark.long),
        pytest.param(3, "sync_bn", marks=pytest.mark.long),
        pytest.param(3, "rank0", marks=pytest.mark.slow),
        pytest.param(2, "sync_bn", marks=pytest.mark.slow),
    ],
)
def test_trainers_share_running_statistics_and_replay_to_the_bit(tmp_path, trainers, buffers):
    job, how = write_normal_job(tmp_path), f"dense.buffers={buffers}"
    closes, dense = trained(job, "calm", trainers, [], how)
    assert len(closes) == NUM_PASSES
    assert all(np.isfinite(array).all() for array in dense.values())
    assert dense["model.net.0.num_batches_tracked"] > NUM_PASSES
    again, same = trained(job, "killed", trainers, DIES, how)
    assert again == closes
    assert dense.keys() == same.keys() and all(np.array_equal(dense[name], same[name]) for name in dense)


@pytest.mark.long
def test_a_skipped_step_is_replayed_to_the_bit_where_rows_lag_behind(tmp_path):
    job, late = write_normal_job(tmp_path), "train.staleness=2"
    closes, dense = trained(job, "calm", 2, [], late)
    again, same = trained(job, "killed", 2, DIES, late)
    assert again == closes
    assert dense.keys() == same.keys() and all(np.array_equal(dense[name], same[name]) for name in dense)


SGD = ('dense.optimizer={kind="sgd"}', 'tables.default.optimizer={kind="sgd"}')


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [('train.mode="async"',), ('train.mode="geo"', "train.k_steps=2", *SGD)], ids=["async", "geo"]
)
def test_a_bad_step_is_skipped_where_nobody_waits(tmp_path, mode):
    closes, dense = trained(write_normal_job(tmp_path), "alone", 2, [], 'dense.strategy="shards"', *mode)
    assert len(closes) == NUM_PASSES and all(np.isfinite(array).all() for array in dense.values())
