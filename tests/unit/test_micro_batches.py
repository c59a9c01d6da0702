"""A step of several micro-batches learns what one batch of all their samples learns; its rows are pushed once."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.dataset.samples.batch import Ragged, Samples, batch_ends, cut_batches, merge_batches
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.keys import key_of_reference
from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Keys, StepScale
from headrace.pserver.row_optimizers import Adagrad
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseAdam
from headrace.trainer.device_copies import DeviceCopies
from headrace.trainer.features import lookup_kernels
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.pooling import KernelPooling, RowSums, TorchPooling, pooling_for
from headrace.trainer.features.training_batches import BatchMaker, micro_batches, own_figures, step_weights
from headrace.trainer.train.step import Stepper, StepSettings
from tests.contract import shards_world as w
from tests.fakes.recording_device import DEVICE, recorded
from tests.fakes.thread_ranks import on_ranks

SCHEMA = Schema.of(
    [
        SparseSlot(name="a"),
        SparseSlot(name="b", pooling="mean"),
        SparseSlot(name="q", pooling="none", max_len=3),
        SparseSlot(name="r", pooling="none", max_len=3),
        DenseSlot(kind="dense", name="d", size=2),
        MetaSlot(kind="meta", names=("y", "weight")),
    ]
)
TABLE = TableSection(
    dim=2,
    init_range=0.5,
    optimizer=Adagrad(kind="adagrad", lr=0.1, initial=0.1, per="element"),
    admission=(CountEntry(kind="count", n=2, exact=True),),
)
TASKS = [TaskSection(name="y", label="y")]
TOLERANCE = 1e-6
CPU = torch.device("cpu")
POOLINGS = pytest.mark.parametrize(
    "pooling", [KernelPooling(1), TorchPooling(DeviceCopies(CPU))], ids=["kernels", "torch"]
)


class Net(nn.Module):
    """Reads every input; the same weights everywhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2 + 2 + 2, 1)
        draw = torch.Generator().manual_seed(3)
        for parameter in self.layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw)

    def forward(self, inputs):
        vectors_BD = torch.stack([inputs.vectors["a"], inputs.vectors["b"]]).sum(0)
        for sequence in inputs.sequences.values():
            vectors_BD = vectors_BD + sequence.vectors_BLD.sum(1)
        first_BD = inputs.first_order_BF.sum(1, keepdim=True).repeat(1, 2)
        return {"y": self.layer(torch.cat([vectors_BD, inputs.dense_BC, first_BD], 1)).squeeze(1)}


def samples(num, seed):
    draw = np.random.default_rng(seed)

    def ragged(most, least=0):
        length_B = draw.integers(least, most + 1, num)
        return Ragged(
            draw.integers(0, 6, int(length_B.sum())).astype(np.uint64), np.cumsum([0, *length_B]).astype(np.int64)
        )

    return Samples(
        {"a": ragged(1, 1), "b": ragged(3), "q": ragged(3), "r": ragged(2)},
        {"d": draw.normal(size=(num, 2)).astype(np.float32)},
        {"y": draw.integers(0, 2, num).astype(np.float32), "weight": draw.integers(1, 4, num).astype(np.float32)},
        np.arange(num),
        np.full(num, np.nan),
    )


class Rank:
    """One rank of a job, step by step as the loop makes them."""

    def __init__(self, ranks, shards, micro_batch=None, average=True, pooling=None):
        self.ranks, self.shards, self.average, self.net = ranks, shards, average, Net()
        self.dense = AllReduceDense(self.net, DenseSection(optimizer=DenseAdam(lr=0.1)), ranks)
        settings = StepSettings(schema=SCHEMA, tasks=TASKS, train=TrainSection())
        self.stepper = Stepper(self.net, settings, pooling or KernelPooling(1), CPU)
        tables = tables_of(SCHEMA, {"default": TABLE}, "y")
        self.maker = BatchMaker(tables, TASKS, "weight", shards, micro_batch=micro_batch)
        self.maker.expect(1, True)

    def learn(self, batches):
        """A pass of these samples, None for a step without; its sums of row gradients by step."""
        self.shards.open_pass(1, w.soon())
        made = [None if each is None else self.maker.make(1, each) for each in batches] + [None]
        rows, pushed = self.shards.pull(made[0].prepared, w.soon()) if made[0] else {}, []
        for step, batch in enumerate(made[:-1]):
            mine = own_figures(batch, TASKS, average=self.average)
            array = np.array([*mine.weights, mine.num_samples, mine.num_batches], np.float64)
            *total, num_samples, num_batches = self.ranks.sum_floats(array)
            figures = type(mine)(total, int(num_samples), int(num_batches))
            weight, gradients = step_weights(figures, TASKS, average=self.average), None
            self.dense.clear()
            if batch is not None:
                sums = RowSums.of(batch)
                for each in micro_batches(batch):
                    self.stepper.backward(each, self.stepper.forward(each, rows, weight), sums)
                assert sums.finite
                gradients = self.stepper.gradients(batch, sums)
                pushed.append({name: each.grads_UD.copy() for name, each in gradients.items()})
            self.dense.after_backward(step, 1.0)
            self.dense.wait()
            self.dense.step()
            prepared = None if batch is None else batch.prepared
            following = None if made[step + 1] is None else made[step + 1].prepared
            scale = StepScale(figures.num_samples)
            rows = self.shards.exchange(step, prepared, gradients, following, scale, w.soon()) or {}
        self.dense.flush()
        self.shards.close_pass(0, w.soon())
        return pushed


def rows_of(shards):
    """The rows of every key that can occur, as inference reads them."""
    found = {}
    for slot in SCHEMA.sparse:
        keys_U = np.array([key_of_reference(sign, slot.group) for sign in range(6)], np.uint64)
        keys = Keys(keys_U, np.full(6, slot.group, np.uint16))
        found[slot.name] = shards.look({"default": keys}, w.soon())["default"]
    return found


def result(world, batches, **more):
    """Dense weights and rows after a pass; `batches` by rank: samples by step."""
    with w.job(2, world, {"default": TABLE}) as made:

        def act(ranks):
            rank = Rank(ranks, made.ranks[ranks.rank], **more)
            rank.learn(batches[ranks.rank])
            return {name: value.clone() for name, value in rank.dense.tensors().items() if name.startswith("model.")}

        dense, _ = on_ranks(world, act)
        assert all(torch.equal(dense[0][name], other[name]) for other in dense for name in dense[0])
        return dense[0], rows_of(made.one)


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert np.allclose(np.asarray(ours[name]), np.asarray(theirs[name]), rtol=0, atol=TOLERANCE), name
    assert max(float(np.abs(rows_UD).max()) for rows_UD in wanted[1].values()) > 0, "keys were admitted"


class WatchedPooling(KernelPooling):
    """Knows its cells, and does not hold them."""

    def __init__(self):
        super().__init__(1)
        self.made = []

    def cells(self, look, rows_UD):
        leaf = super().cells(look, rows_UD)
        self.made.append(weakref.ref(leaf))
        return leaf


class WithOwnLoss(Net):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs | {"inner": outputs["y"] * 2}

    def losses(self, outputs, inputs):
        return {"size": outputs["inner"].square()}


@pytest.mark.parametrize("apart", [False, True], ids=["measured", "measured apart"])
@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("net", [Net, WithOwnLoss])
def test_a_step_holds_the_cells_of_one_micro_batch_at_a_time(net, weight, apart):
    settings = StepSettings(schema=SCHEMA, tasks=TASKS, train=TrainSection(), measures_apart=apart)
    pooling = WatchedPooling()
    stepper = Stepper(net(), settings, pooling, CPU)
    with w.job(0, 1, {"default": TABLE}) as made:
        made.one.open_pass(1, w.soon())
        batch = Rank(SingleRank(), made.one, micro_batch=3).maker.make(1, samples(12, 1))
        rows, kept, sums = made.one.pull(batch.prepared, w.soon()), [], RowSums.of(batch)
        for each in micro_batches(batch):
            measured = stepper.measured(each, rows, {"y": weight})
            forward = stepper.forward(each, rows, {"y": weight})
            stepper.backward(each, forward, sums)
            kept.append((each, measured or forward))
            assert all(leaf() is None for leaf in pooling.made)
    assert len(pooling.made) == (8 if apart else 4)
    assert [len(each.prediction_B["y"]) for _, each in kept] == [3] * 4, "what the host reads is there"


class CountedCopies(DeviceCopies):
    """Knows what was sent ahead, and what was read."""

    def __init__(self):
        super().__init__(DEVICE)
        self.early, self.read = [], []

    def send(self, array):
        self.early.append(array)
        return super().send(array)

    def there(self, array):
        self.read.append(array)
        return super().there(array)


@pytest.mark.parametrize("rows_on_device", [False, True], ids=["rows on the host", "rows on the device"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_what_is_sent_ahead_is_what_the_step_reads(rows_on_device, micro_batch):
    """Micro-batches have arrays of their own, so nothing goes ahead of them."""
    copies, settings = CountedCopies(), StepSettings(schema=SCHEMA, tasks=TASKS, train=TrainSection())
    with recorded(), w.job(0, 1, {"default": TABLE}) as made:
        pooling = pooling_for(DEVICE, 1, copies, rows_on_device=rows_on_device)
        stepper = Stepper(Net().to(DEVICE), settings, pooling, DEVICE, copies=copies)
        made.one.open_pass(1, w.soon())
        batch = Rank(SingleRank(), made.one, micro_batch=micro_batch).maker.make(1, samples(12, 1))
        rows, sums = made.one.pull(batch.prepared, w.soon()), RowSums.of(batch)
        stepper.send_ahead(lambda: batch)
        for each in micro_batches(batch):
            stepper.backward(each, stepper.forward(each, rows, {"y": 1.0}), sums)
    read = {id(each) for each in copies.read} - {id(each) for each in rows.values()}
    assert {id(each) for each in copies.early} == (read if micro_batch is None else set())
    assert len({id(each) for each in copies.early}) == len(copies.early), "each once"


LAWS = settings(max_examples=8, deadline=None)


@LAWS
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 99))
def test_k_batches_learn_what_one_batch_of_all_their_samples_learns(sizes, seed):
    steps = [samples(sum(sizes), seed), samples(sum(sizes) + 1, seed + 1)]
    wanted = result(1, [steps])
    for micro_batch in {1, min(sizes), max(sizes)}:
        assert_same(result(1, [steps], micro_batch=micro_batch), wanted)


@LAWS
@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(0, 99))
def test_trainers_learn_what_one_learns_that_merges_as_many_batches(sizes, seed):
    """Uneven batches, of uneven weights; the last ranks have no batch in the second step."""
    world = len(sizes)
    first = [samples(size, seed + number) for number, size in enumerate(sizes)]
    second = [samples(sizes[0], seed + 50), *[None] * (world - 1)]
    found = result(world, [[one, other] for one, other in zip(first, second, strict=True)])
    merged = [Samples.concat(first), second[0]]
    assert_same(found, result(1, [merged], micro_batch=min(sizes)))


@POOLINGS
@pytest.mark.parametrize("micro_batch", [1, 3, 7, 20])
def test_the_gradients_of_rows_are_those_of_the_whole_batch(pooling, micro_batch):
    steps = [samples(20, 1), samples(20, 2)]

    def pushed(micro):
        with w.job(0, 1, {"default": TABLE}) as made:
            return on_ranks(1, lambda ranks: Rank(ranks, made.one, micro, pooling=pooling).learn(steps))[0][0]

    for ours, theirs in zip(pushed(micro_batch), pushed(None), strict=True):
        assert np.allclose(ours["default"], theirs["default"], rtol=0, atol=TOLERANCE)


def test_without_average_a_step_learns_from_the_sum_of_the_means():
    steps = [samples(12, 5)]

    def pushed(**more):
        with w.job(0, 1, {"default": TABLE}) as made:
            return on_ranks(1, lambda ranks: Rank(ranks, made.one, **more).learn(steps))[0][0][0]["default"]

    assert np.allclose(pushed(micro_batch=3, average=False), 4 * pushed(micro_batch=3), rtol=1e-5, atol=TOLERANCE)
    assert np.array_equal(pushed(micro_batch=12, average=False), pushed())


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(1, 7), st.integers(1, 4))
def test_merged_batches_end_where_the_batches_did(events, batch_size, num_merged):
    event_B = np.repeat(np.arange(len(events)), events)
    empty = Samples({}, {}, {}, event_B, np.full(len(event_B), np.nan))
    cut = [len(each) for each in cut_batches(iter([empty]), batch_size)]
    merged = list(merge_batches(cut_batches(iter([empty]), batch_size), num_merged))
    assert [np.diff([0, *batch_ends(each.event_B, batch_size)]).tolist() for each in merged] == [
        cut[at : at + num_merged] for at in range(0, len(cut), num_merged)
    ]


@given(st.data())
def test_cells_are_added_to_their_keys_in_order(data):
    inverse = data.draw(st.lists(st.integers(0, 3), max_size=12))
    single = data.draw(st.booleans())
    cells = list(range(len(inverse))) if single else [data.draw(st.integers(0, 2)) for _ in inverse]
    scale = [1] * len(inverse) if single else [data.draw(st.integers(-3, 3)) for _ in inverse]
    grad_CD = np.array(data.draw(st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=2), min_size=12, max_size=12)), np.float32)  # noqa: E501  # fmt: skip
    sums_UD = np.ones((4, 2), np.float32)
    wanted = lookup_kernels.sum_pooled_reference(
        grad_CD, [[n for n, u in enumerate(inverse) if u == key] for key in range(4)],
        np.array(cells, np.int32), np.array(scale, np.float32),
    )  # fmt: skip
    none = single or not inverse
    cell_N, scale_N = np.array([] if none else cells, np.int32), np.array([] if none else scale, np.float32)
    assert lookup_kernels.add_cells(grad_CD, np.array(inverse, np.int32), cell_N, scale_N, sums_UD)
    assert np.array_equal(sums_UD, wanted + 1)
    grad_CD[:] = np.inf
    assert (
        lookup_kernels.add_cells(grad_CD, np.array(inverse, np.int32), cell_N, scale_N, sums_UD) == (not any(scale))
        or not np.isfinite(sums_UD).all()
    )
