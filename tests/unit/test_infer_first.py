"""A pass is predicted before it is learnt from: all its batches, by the state at its beginning, in bounded memory."""

from types import SimpleNamespace

import numpy as np
import torch

from headrace.deadline import Deadline
from headrace.pserver.config import ShardProcess
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.server.commands import CountRows
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.config import MetricsSection, TrainSection
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.pooling import KernelPooling
from headrace.trainer.features.training_batches import BatchMaker
from headrace.trainer.status.time_spent import StepClock
from headrace.trainer.train.infer_first import InferFirst, announced_ahead, num_bytes
from headrace.trainer.train.step import Stepper, StepSettings
from tests.unit.test_step import CTR, SCHEMA, TABLES, Sums, samples

SOON = Deadline.after(60)


class Noted:
    """The calls to shards and observer, in order."""

    def __init__(self, other_ranks=0):
        self.heard, self.other_ranks = [], other_ranks

    def agree(self, batch):
        """`other_ranks`: steps in which another rank has a batch."""
        steps = sum(what == "agree" for what, *_ in self.heard)
        self.heard.append(("agree", batch is not None))
        return SimpleNamespace(weight={"ctr": 1.0}, more=batch is not None or steps < self.other_ranks)

    def infer(self, batch, forward, step):
        self.heard.append(("infer", step, forward.prediction_B["ctr"].tolist()))


class World:
    def __init__(self, memory=1 << 30, other_ranks=0):
        self.shards = EmbeddedShards(ShardProcess.alone(TABLES, 1))
        self.maker = BatchMaker(tables_of(SCHEMA, TABLES, "click"), [CTR], None, self.shards, prepares=False)
        self.maker.expect(1, True)
        self.shards.open_pass(1, SOON)
        model = Sums()
        settings = StepSettings(schema=SCHEMA, tasks=[CTR], train=TrainSection())
        self.stepper = Stepper(model, settings, KernelPooling(1), torch.device("cpu"))
        self.noted = Noted(other_ranks)
        metrics = MetricsSection(infer_first=True, infer_first_memory=memory)
        self.infer_first = InferFirst(self.shards, self.stepper, self.noted, metrics, 60.0, StepClock(60.0))

    def batches(self, count):
        return [self.maker.make(1, samples(click=(number % 2, 0, 1))) for number in range(count)]

    def first(self, batches):
        return self.infer_first.first(iter(batches), self.noted.agree)

    def learn(self, batch, step):
        """Pull and push a batch; its rows as they were."""
        rows = self.shards.pull(batch.prepared, SOON)["default"]
        ones_U = np.ones(len(rows), np.float32)
        gradients = {"default": Gradients(np.ones_like(rows), ones_U, ones_U)}
        self.shards.exchange(step, batch.prepared, gradients, None, StepScale(3), SOON)
        return rows


def test_every_batch_is_predicted_before_the_first_is_learnt_from_and_then_handed_on():
    world = World()
    batches = world.batches(3)
    learnt = list(world.first(batches))
    assert [what for what, *_ in world.noted.heard] == ["agree", "infer"] * 3 + ["agree"]
    assert [each.samples for each in learnt] == [each.samples for each in batches]
    assert all(each.prepared.learn for each in learnt)


def test_keys_without_a_row_read_as_in_inference_and_create_no_row():
    world = World()
    learnt = list(world.first(world.batches(1)))
    (said,) = (each for each in world.noted.heard if each[0] == "infer")
    assert said[2] == [1 / (1 + np.exp(np.float32(-0.5)))] * 3, "zeros for the rows, and two dense values of 0.25"
    assert world.shards.call(CountRows(), SOON).tables["default"].num_rows == 0
    assert world.learn(learnt[0], 0).any(), "to learn, a key begins at its initial value"
    assert world.shards.call(CountRows(), SOON).tables["default"].num_rows == 3


def test_the_next_batch_sees_what_was_learnt_but_its_prediction_did_not():
    world = World()
    for step, batch in enumerate(world.first(world.batches(3))):
        world.learn(batch, step)
    told = [said for what, *said in world.noted.heard if what == "infer"]
    assert told[0][1] == told[1][1] == told[2][1], "the same samples, and the same state"
    again = announced_ahead(world.shards, iter(world.batches(1)), learn=False)
    assert world.shards.pull(next(again).prepared, SOON)["default"].any()


def test_a_rank_without_batches_agrees_until_the_others_have_none():
    world = World(other_ranks=2)
    assert list(world.first([])) == []
    assert world.noted.heard == [("agree", False)] * 3


def test_batches_beyond_the_memory_are_learnt_from_without_being_predicted(caplog):
    probe = World()
    size = num_bytes(probe.batches(1)[0])
    assert size > 3 * (8 + 8 + 4 + 4 + 4 + 4 + 4)
    world = World(memory=size + 1, other_ranks=4)
    learnt = list(world.first(world.batches(4)))
    assert len(learnt) == 4 and all(each.prepared.learn for each in learnt)
    assert [each[1] for each in world.noted.heard if each[0] == "infer"] == [0, 1]
    assert "6 samples of the pass were not predicted before" in caplog.text


def test_keys_are_announced_one_batch_ahead():
    world = World()
    taken = []

    def coming():
        for number, batch in enumerate(world.batches(3)):
            taken.append(number)
            yield batch

    turns = announced_ahead(world.shards, coming(), learn=True)
    next(turns)
    assert taken == [0, 1]
    next(turns)
    assert taken == [0, 1, 2] and len(list(turns)) == 1
    assert list(announced_ahead(world.shards, iter(()), learn=True)) == []
