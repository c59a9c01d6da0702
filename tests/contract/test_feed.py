"""Who applies the live feed holds a job's rows at each version it is told, bit for bit, on any number of shards."""

import numpy as np
import pytest

from pserver.operations import DayTick, Forget, SetTables, Shrink
from tests.contract import feed_world as f
from tests.contract import shards_world as w
from tests.contract.test_shards import some_batches
from tests.contract.test_shards_living import TABLES

KINDS = [0, 1, 2]
IDS = ["embedded", "1-shard", "2-shards"]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=IDS)
TABLES = {name: table.model_copy(update={"slots": {}}) for name, table in TABLES.items()}
BOUNDED = {name: table.model_copy(update={"memory": 8 << 20}) for name, table in TABLES.items()}


def some_operations(draw, version):
    """What may happen at a close."""
    key = int(w.keys(int(draw.choice(f.SIGNS))).keys_U[0])
    name, group = [("default", 1), ("other", 2)][draw.integers(2)]
    lr = {"tables": {"other": TABLES["other"].model_dump(mode="json")}}
    all_of_them = [
        Shrink(table="other", at_once=bool(draw.integers(2))),
        Shrink(table="default", delete_below=2.0, at_once=bool(draw.integers(2))),
        DayTick(to=version),
        Forget(table=name, group=group, key=key),
        SetTables(**lr),
    ]
    return [all_of_them[i] for i in draw.permutation(len(all_of_them))[: draw.integers(4)]]


def live(job, draw):
    version = job.version + 1
    seed = np.random.default_rng(version)  # alike at a replay, whatever was drawn before
    job.live(some_batches(0, int(seed.integers(1, 4)), seed=version), some_operations(seed, version), day=version // 3)
    return draw


@every_kind
def test_who_follows_holds_every_version(kind):
    with f.job(kind, tables=TABLES) as job, f.follower(job) as held:
        live(job, 0)
        held.until(1)
        for version in range(2, 12):
            live(job, 0)
            held.until(version)
    assert [update.whole for update in held.updates] == [True] + [False] * 10
    assert any(len(update.tables["other"].gone) for update in held.updates)
    assert held.updates[3].model is None and held.updates[3].onnx is None
