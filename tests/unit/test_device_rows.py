"""Rows on a device against rows on the shard: the same steps, with equal bits at every pull and every close.

The CPU is the device, and a GPU where there is one. tests/unit/test_row_learning.py compares the optimizers.
"""

import tomllib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.shards import Gradients, Keys, StepScale
from headrace.pserver.protocol.table_operations import ForgetRow, FreezeSlot, SetTables, ShrinkRows, UnfreezeSlot
from headrace.pserver.rows.placed_rows import PlacedGradients
from headrace.pserver.server.commands import CountRows, DigestRows, Operate
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.service.spec.job import job_of
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.requests import resize_requested
from headrace.trainer.spec.changes import SHARDS, TRAINERS
from headrace.trainer.train.device_rows import placed_tables
from tests.fakes.devices import DEVICES
from tests.integration.stream_job import SPEC
from tests.jobs import changed

NUM_KEYS, BATCH_KEYS, STEPS = 90, 30, 4
BYTES = {"enough": None, "for half of the rows": 1200, "for a few": 100}
COUNTED = [{"kind": "count", "n": 3, "exact": True}]
TABLES = {
    "as by default": {"grad_scale": "sum", "in_batch": True, "slots": {"b": {"first_order_lr": 0.3}}},
    "admitted": {"admission": COUNTED, "grad_scale": "show", "default_row": "learnt", "delete_below": 0.3},
    "adam": {"optimizer": {"kind": "adam"}, "weight_decay": 0.01, "l2": 0.02, "clip_norm": 0.5},
    "vectors": {"optimizer": {"kind": "sgd"}, "first_order": False, "schedule": {"kind": "inverse_sqrt", "warmup": 9}},
}
"""By name: settings of a table. Rows of them are deleted, forgotten, frozen and set on the way."""


class Twins:
    """One shard whose rows learn on the shard, and one whose rows learn on a device."""

    def __init__(self, settings: dict, most: int | None, place: str = "cpu") -> None:
        self.place = place
        self.section = TableSection.model_validate(
            {"dim": 5, "optimizer": {"kind": "adagrad", "initial": 0.1}} | settings
        )
        tables = {"default": self.section}
        process = ShardProcess.alone(tables, 3, groups={"a": 0, "b": 1})
        self.host = EmbeddedShards(process)
        self.device = EmbeddedShards(process, placed=placed_tables(tables, torch.device(place), most))

    def close(self) -> None:
        self.host.close()
        self.device.close()

    def train(self, number: int, batches: list[Keys], draw: np.random.Generator, day: int) -> None:
        """A pass, prepared ahead as a loader does."""
        both = (self.host, self.device)
        for shards in both:
            shards.open_pass(number, soon())
        prepared = [[shards.prepare({"default": keys}, learn=True) for keys in batches] for shards in both]
        rows = [shards.pull(mine[0], soon())["default"] for shards, mine in zip(both, prepared, strict=True)]
        for step, keys in enumerate(batches):
            equal(*rows)
            gradients = self.gradients(len(keys.keys_U), draw)
            rows = []
            for shards, mine in zip(both, prepared, strict=True):
                push = gradients if shards is self.host else on_device(gradients, self.place)
                following = mine[step + 1] if step + 1 < len(mine) else None
                found = shards.exchange(step, mine[step], {"default": push}, following, StepScale(17), soon())
                rows += [found["default"]] if found else []
        assert self.host.close_pass(day, soon()) == self.device.close_pass(day, soon())

    def gradients(self, num_keys: int, draw: np.random.Generator) -> Gradients:
        grads_UD = draw.normal(size=(num_keys, self.section.num_weights)).astype(np.float32)
        show_U = draw.integers(1, 4, num_keys).astype(np.float32)
        return Gradients(grads_UD, show_U, np.minimum(show_U, draw.integers(0, 2, num_keys)).astype(np.float32))

    def operate(self, version: int, *operations: object) -> None:
        for shards in (self.host, self.device):
            shards.call(Operate(version, operations), soon())

    def digests(self) -> list[dict[str, int]]:
        return [shards.call(DigestRows(), soon()) for shards in (self.host, self.device)]


def soon() -> Deadline:
    return Deadline.after(30)


def equal(host_UE: np.ndarray, device_UE: torch.Tensor) -> None:
    np.testing.assert_array_equal(host_UE.view(np.uint32), device_UE.cpu().numpy().view(np.uint32))


def on_device(push: Gradients, place: str) -> PlacedGradients:
    none = np.empty((len(push.show_U), 0), np.float32)
    return PlacedGradients(none, push.show_U, push.click_U, torch.from_numpy(push.grads_UD.copy()).to(place))


def batch(draw: np.random.Generator) -> Keys:
    """Some keys more often than others."""
    keys_U = np.unique(np.minimum(draw.geometric(0.03, BATCH_KEYS), NUM_KEYS)).astype(np.uint64)
    keys_U = draw.permutation(keys_U) * np.uint64(0x9E3779B97F4A7C15)
    return Keys(keys_U, (keys_U % np.uint64(2)).astype(np.uint16))


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("memory", BYTES)
@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 30))
def test_a_table_has_the_same_bits_on_a_device(table, memory, place, seed):
    draw, twins = np.random.default_rng(seed), Twins(TABLES[table], BYTES[memory], place)
    try:
        key = batch(draw).keys_U[0]
        after = {
            1: (
                FreezeSlot(slot="b", table="default", group=1),
                ForgetRow(table="default", group=int(key % 2), key=int(key)),
            ),
            2: (
                UnfreezeSlot(slot="b", table="default", group=1),
                ShrinkRows(table="default", delete_below=0.35, at_once=True),
            ),
            3: (
                SetTables(tables={"default": twins.section.model_copy(update={"decay": 0.5}).model_dump(mode="json")}),
            ),
        }
        for number in range(1, 6):
            twins.train(number, [batch(draw) for _ in range(STEPS)], draw, day=number // 2)
            twins.operate(number, *after.get(number, ()))
        on_host, on_device = twins.digests()
        assert on_host == on_device and on_host["default"]
        found = twins.device.call(CountRows(), soon()).tables["default"].device
        assert found is not None and found.num_read > 0
        assert (found.num_apart == 0) == (BYTES[memory] is None)
        assert BYTES[memory] is None or found.num_bytes <= BYTES[memory]
    finally:
        twins.close()


def test_rows_that_most_steps_read_get_the_room():
    twins, draw = Twins({}, 32 * 10), np.random.default_rng(1)
    try:
        often, rare = (np.arange(begin, begin + 5, dtype=np.uint64) << np.uint64(40) for begin in (1, 100))
        for number in (1, 2, 3):
            keys = (
                [often, rare + np.uint64(number), often]
                if number > 1
                else [rare, np.append(rare + np.uint64(50), often)]
            )
            twins.train(number, [Keys(each, np.zeros(len(each), np.uint16)) for each in keys], draw, day=0)
        found = twins.device.call(CountRows(), soon()).tables["default"].device
        assert found is not None and found.num_rows <= 10 and found.num_apart == 0
    finally:
        twins.close()


def test_a_job_with_rows_on_devices_is_not_resized_while_it_runs(tmp_path):
    workers = {"cluster": {"trainers": 2, "shards": 2}, "train.rows": "device"}
    job = JobInForce(job_of(tomllib.loads(changed(SPEC, workers)), tmp_path).spec, {TRAINERS: 2, SHARDS: 2})
    with pytest.raises(SpecError, match="stop it, and change the job file"):
        resize_requested({"id": "a", "trainers": 3}, job)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cluster": {"trainers": 2}}, "cluster.shards"),
        ({"cluster": {"trainers": 2, "shards": 3}}, "cluster.shards"),
        ({"cluster.shards": 1}, "cluster.shards"),
        ({"cluster": {"trainers": {"min": 2, "max": 3}, "shards": 3}}, "cluster.trainers"),
        ({"cluster": {"trainers": 2, "shards": 2, "launcher": "external"}}, "cluster.launcher"),
        ({"cluster.wire": "bfloat16"}, "cluster.wire"),
        ({"train.staleness": 1}, "train.staleness"),
        ({"dense.strategy": "shards"}, "dense.strategy"),
        ({"tables.default.extend_at": 0.5}, "tables.default.extend_at"),
        ({"tables.default.optimizer": {"kind": "ftrl"}}, "tables.default.optimizer.kind"),
        ({"train.rows": "host", "train.rows_memory": "1GiB"}, "train.rows_memory"),
    ],
)
def test_what_does_not_go_with_rows_on_a_device_is_refused_by_its_key(tmp_path, changes, key):
    with pytest.raises(SpecError, match="set ") as refused:
        job_of(tomllib.loads(changed(SPEC, {"train.rows": "device"} | changes)), tmp_path)
    assert refused.value.path == key
