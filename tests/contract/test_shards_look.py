"""Between passes rank 0 may read any rows, and batches prepared for the next pass stay prepared."""

import numpy as np
import pytest

from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import DigestRows
from tests.contract import shards_world as w


@pytest.fixture(params=[0, 1, 3], ids=["embedded", "1-shard", "3-shards"])
def world(request):
    with w.job(request.param) as made:
        yield made


def batch(*signs):
    return {"default": w.keys(*signs), "other": w.keys(*signs, group=2)}


def test_a_look_sees_rows_and_zeros_and_leaves_what_is_announced(world):
    shards = world.one
    w.train(shards, 1, [batch(*range(20))], seed=1, steps=1)
    ahead = [shards.prepare(batch(*range(10, 30)), learn=True), shards.prepare(batch(*range(5)), learn=True)]
    for _ in range(3):  # as often as there are streams of exports
        seen = shards.look(batch(*range(10, 30)), w.soon())
        assert seen["default"][:10].any(axis=1).all() and not seen["default"][10:].any()
        assert seen["other"].shape == (20, 3) and not seen["other"][10:].any()
    shards.open_pass(2, w.soon())
    rows = shards.pull(ahead[0], w.soon())
    assert np.array_equal(rows["default"][:10], seen["default"][:10])
    gradients = {name: w.push_of(k, rows[name].shape[1], 5) for name, k in batch(*range(10, 30)).items()}
    assert shards.exchange(0, ahead[0], gradients, ahead[1], StepScale(64), w.soon()) is not None
    shards.exchange(1, ahead[1], None, None, StepScale(64), w.soon())
    shards.close_pass(0, w.soon())
    after = shards.look(batch(*range(10, 30)), w.soon())
    assert after["default"].any(axis=1).all() and not np.array_equal(after["default"], seen["default"])


def test_a_look_makes_no_row(world):
    world.one.open_pass(1, w.soon())
    world.one.close_pass(0, w.soon())
    world.one.look(batch(*range(20)), w.soon())
    assert world.one.call(DigestRows(), w.soon()) == {"default": 0, "other": 0}
