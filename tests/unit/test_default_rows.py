"""A learnt default row equals its plain twin and is saved with the dense part; without one there is no cost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError
from headrace.keys import key_of_reference
from headrace.pserver.admission_entries import CountEntry, ProbabilityEntry
from headrace.pserver.config import Bounds, ShardProcess, SlotLife, TableSection
from headrace.pserver.protocol.shards import ABSENT_BITS, StepScale
from headrace.pserver.row_optimizers import Adagrad, Sgd
from headrace.pserver.server.commands import DigestRows, Explain
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseSgd
from headrace.trainer.device_copies import DeviceCopies
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.default_rows import (
    DefaultRows,
    default_rows_of,
    sum_chosen,
    sum_chosen_reference,
    widths_of,
)
from headrace.trainer.features.pooling import KernelPooling, TorchPooling
from headrace.trainer.features.training_batches import BatchMaker
from headrace.trainer.spec.section_rules import check_slot_rules
from headrace.trainer.train.step import RowSums, Stepper, StepSettings

CPU = torch.device("cpu")
SCHEMA = Schema.of([SparseSlot(name="a"), SparseSlot(name="b", pooling="mean"), MetaSlot(kind="meta", names=("y",))])
TASKS = (TaskSection(name="y", label="y", loss="mse"),)
ADMISSION = (CountEntry(kind="count", n=3, exact=True),)
TABLE = TableSection(
    dim=2,
    init_range=0.0,
    optimizer=Sgd(kind="sgd", lr=0.25),
    bounds=Bounds(low=-1e9, high=1e9),
    admission=ADMISSION,
    default_row="learnt",
)
DENSE = DenseSection(optimizer=DenseSgd(kind="sgd", lr=0.5))
DEADLINE = Deadline.after(60)


class Sums(nn.Module):
    """Predicts first-order weights, and 1 and 2 times the elements of vectors; learns nothing itself."""

    def forward(self, inputs):
        weights = torch.tensor([1.0, 2.0])
        return {"y": inputs.first_order_BF.sum(1) + (inputs.vectors_BFD * weights).sum((1, 2))}


FACTORS = np.array([1.0, 1.0, 2.0])


class Trainer:
    """One rank over an embedded shard, step by step."""

    def __init__(self, table=TABLE, pooling=None, train=None):
        tables = {"default": table}
        self.shards = EmbeddedShards(ShardProcess.alone(tables, 1))
        self.default_rows = DefaultRows(widths_of(SCHEMA, tables), CPU)
        self.model = Sums()
        self.dense = AllReduceDense(self.model, DENSE, SingleRank(), self.default_rows.parameters)
        pooling = pooling or KernelPooling(1)
        settings = StepSettings(schema=SCHEMA, tasks=TASKS, train=train or TrainSection())
        self.stepper = Stepper(self.model, settings, pooling, CPU, default_rows=self.default_rows)
        self.maker = BatchMaker(tables_of(SCHEMA, tables, None), TASKS, None, self.shards)
        self.passes = 0

    def run(self, batches, *, learn=True):
        """A pass; the predictions of every batch."""
        self.passes += 1
        self.maker.expect(self.passes, learn)
        self.shards.open_pass(self.passes, DEADLINE)
        said = []
        for step, samples in enumerate(batches):
            batch = self.maker.make(self.passes, samples)
            rows, weight = self.shards.pull(batch.prepared, DEADLINE), {"y": float(len(samples))}
            self.dense.clear()
            forward = (self.stepper.forward if learn else self.stepper.predict)(batch, rows, weight)
            said.append(forward.prediction_B["y"])
            if learn:
                sums = RowSums.of(batch)
                self.stepper.backward(batch, forward, sums)
                gradients = self.stepper.gradients(batch, sums)
                assert sums.finite
                self.dense.after_backward(0, self.stepper.scale.value)
                self.dense.wait()
                self.dense.step()
                self.shards.exchange(step, batch.prepared, gradients, None, StepScale(len(samples)), DEADLINE)
        self.shards.close_pass(0, DEADLINE)
        return said

    @property
    def row(self):
        return default_rows_of(self.dense.tensors(), {"default": 3})["default"]


def samples_of(batch):
    """[(signs of a, signs of b, label), ...]"""

    def ragged(column):
        values = np.array([sign for signs in column for sign in signs], np.uint64)
        return Ragged(values, np.cumsum([0, *map(len, column)]))

    a, b, y = zip(*batch, strict=True)
    return Samples(
        {"a": ragged(a), "b": ragged(b)}, {}, {"y": np.array(y, np.float32)}, np.arange(len(y)), np.full(len(y), np.nan)
    )


def plain(batches, learn_until=None):
    """The twin, with dictionaries, key by key. Returns the predictions of each batch, and the default row."""
    rows, seen, default, said = {}, {}, np.zeros(3), []
    for number, batch in enumerate(batches):
        predictions, default_grad, grads = [], np.zeros(3), {}
        for a, b, y in batch:
            read = [(("a", sign), 1.0) for sign in a] + [(("b", sign), 1 / len(b)) for sign in b]
            predictions.append(sum(share * (rows.get(key, default) * FACTORS).sum() for key, share in read))
            error = 2 * (predictions[-1] - y) / len(batch)
            for key, share in read:
                grads[key] = grads.get(key, 0) + error * share * FACTORS
        said.append(predictions)
        if learn_until is not None and number >= learn_until:
            continue
        for key, grad in grads.items():
            if key in rows:
                rows[key] = rows[key] - 0.25 * grad
            else:
                default_grad += grad
                seen[key] = seen.get(key, 0) + sum((key[1] in (a if key[0] == "a" else b)) for a, b, _ in batch)
                if seen[key] >= 3:
                    rows[key] = np.zeros(3)
        default = default - 0.5 * default_grad
    return said, default


SIGNS = st.lists(st.integers(0, 12), max_size=3, unique=True)
BATCHES = st.lists(
    st.lists(st.tuples(SIGNS, SIGNS, st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=6), min_size=1, max_size=7
)


@settings(max_examples=40)
@given(BATCHES, st.integers(0, 7))
def test_it_learns_and_is_read_as_by_the_plain_twin(batches, learn_until):
    trainer = Trainer()
    said = trainer.run([samples_of(batch) for batch in batches[:learn_until]])
    said += trainer.run([samples_of(batch) for batch in batches[learn_until:]], learn=False)
    expected, default = plain(batches, learn_until)
    for found, wanted in zip(said, expected, strict=True):
        assert np.allclose(found, wanted, rtol=1e-3, atol=1e-3)
    assert np.allclose(trainer.row, default, rtol=1e-3, atol=1e-3)


def batches_of(num_batches, seed=0):
    draw = np.random.default_rng(seed)

    def sample():
        return draw.integers(0, 60, 2).tolist(), draw.integers(0, 60, 3).tolist(), float(draw.integers(0, 2))

    return [samples_of([sample() for _ in range(16)]) for _ in range(num_batches)]


def test_both_kinds_of_pooling_give_the_same_default_row():
    one, other = (Trainer(pooling=pooling) for pooling in (KernelPooling(2), TorchPooling(DeviceCopies(CPU))))
    for trainer in (one, other):
        trainer.run(batches_of(6))
    assert one.row.all() and np.allclose(one.row, other.row, rtol=1e-4)


def test_the_loss_scale_is_taken_out_of_its_gradient_once():
    plainly, scaled = Trainer(), Trainer()
    scaled.stepper.scale.on, scaled.stepper.scale.value = True, 1024.0
    for trainer in (plainly, scaled):
        trainer.run(batches_of(3))
    assert plainly.row.tolist() == scaled.row.tolist()


def test_every_key_without_a_row_reads_it_once_nothing_is_learnt():
    trainer = Trainer()
    trainer.run(batches_of(6))
    before, digest = trainer.row.copy(), trainer.shards.call(DigestRows(), DEADLINE)
    (said,) = trainer.run([samples_of([([1000], [], 0.0), ([1001, 1002], [], 0.0)])], learn=False)
    assert np.allclose(said, [(before * FACTORS).sum(), 2 * (before * FACTORS).sum()], rtol=1e-5) and said.any()
    assert (trainer.row == before).all() and trainer.shards.call(DigestRows(), DEADLINE) == digest


def test_it_is_saved_digested_and_restored_with_the_dense_part():
    trainer, other = Trainer(), Trainer()
    assert trainer.dense.digest() == other.dense.digest()
    trainer.run(batches_of(2))
    assert trainer.dense.tensors().keys() == {"model.default_row.default"}
    assert trainer.dense.digest() != other.dense.digest()
    other.dense.load({name: value.clone() for name, value in trainer.dense.tensors().items()})
    assert (other.row == trainer.row).all() and other.dense.digest() == trainer.dense.digest()
    with pytest.raises(BadInput, match=r"of another model than the spec's: model\.default_row\.default"):
        AllReduceDense(Sums(), DENSE, SingleRank()).load(trainer.dense.tensors())


def test_default_rows_of_zeros_add_nothing():
    tables = {"default": TABLE.model_copy(update={"default_row": "zeros"})}
    nothing = DefaultRows(widths_of(SCHEMA, tables), CPU)
    rows = {"default": np.zeros((2, 3), np.float32)}
    assert not nothing.parameters and nothing.filled(rows) == (rows, {}) and nothing.filled(rows)[0] is rows
    model = nn.Linear(3, 2)
    with_none, without = (
        AllReduceDense(model, DENSE, SingleRank(), nothing.parameters),
        AllReduceDense(model, DENSE, SingleRank()),
    )
    assert with_none.digest() == without.digest() and with_none.tensors().keys() == without.tensors().keys()


def test_rows_as_pulled_are_left_as_they_are():
    default_rows = DefaultRows({"default": 3}, CPU)
    marks = np.full((1, 3), ABSENT_BITS.view(np.float32))
    rows = {"default": np.concatenate([marks, np.ones((1, 3), np.float32)]), "other": np.ones((4, 2), np.float32)}
    filled, readers = default_rows.filled(rows)
    assert filled["default"].tolist() == [[0] * 3, [1] * 3] and readers["default"].tolist() == [True, False]
    assert filled["other"] is rows["other"] and "other" not in readers
    assert (rows["default"].view(np.uint32)[0] == ABSENT_BITS).all()


def test_an_ordinary_nan_is_not_a_mark():
    with np.errstate(invalid="ignore"):
        computed = np.float32([np.inf, 0]) - np.float32([np.inf, 0]) * np.float32([1, np.inf])
    for value in (np.nan, -np.nan, np.inf, *computed):
        rows = {"default": np.full((1, 3), value, np.float32)}
        assert not DefaultRows({"default": 3}, CPU).filled(rows)[1]["default"].any()


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(-9, 9), min_size=3, max_size=3))))
def test_gradients_are_summed_as_by_the_twin(rows):
    grads_UD = np.array([grad for _, grad in rows], np.float32).reshape(-1, 3)
    chosen_U = np.array([chosen for chosen, _ in rows], np.bool_)
    found, expected = np.empty(3, np.float32), np.empty(3, np.float32)
    sum_chosen(grads_UD, chosen_U, found)
    sum_chosen_reference(grads_UD, chosen_U, expected)
    assert (found == expected).all()


def test_the_order_of_tables_in_the_spec_does_not_matter():
    schema = Schema.of([SparseSlot(name="a", table="x"), SparseSlot(name="b", table="y"), SparseSlot(name="c")])
    tables = {"y": TABLE, "x": TABLE, "unused": TABLE, "default": TableSection(admission=ADMISSION)}
    assert list(widths_of(schema, tables).items()) == [("x", 3), ("y", 3)]


def test_a_model_with_a_tensor_of_the_same_name_is_refused():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.default_row = nn.ParameterDict({"default": nn.Parameter(torch.zeros(3))})

    with pytest.raises(SpecError, match=r"named 'default_row\.default'"):
        AllReduceDense(Clash(), DENSE, SingleRank(), DefaultRows({"default": 3}, CPU).parameters)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (TABLE.model_copy(update={"admission": ()}), "this table admits all; give it admission"),
        (TABLE.model_copy(update={"dim": 0, "first_order": False}), "a row without weights"),
    ],
)
def test_a_default_row_that_could_not_learn_is_refused(table, says):
    with pytest.raises(SpecError, match=says) as refused:
        check_slot_rules({"default": table}, SCHEMA)
    assert "tables.default.default_row" in str(refused.value)


def test_a_slot_with_admission_is_enough_to_learn_from():
    life = SlotLife(admission=(ProbabilityEntry(kind="probability", p=0.5),))
    check_slot_rules({"default": TABLE.model_copy(update={"admission": (), "slots": {"b": life}})}, SCHEMA)


def test_a_key_admitted_at_once_is_read_with_its_own_weights_from_then_on():
    """With adagrad rows: a key's row begins at its initial value, whatever the default row has learnt."""
    trainer = Trainer(TABLE.model_copy(update={"init_range": 0.5, "optimizer": Adagrad()}))
    trainer.run(batches_of(6))
    often = samples_of([([7], [], 1.0)] * 3)
    trainer.run([often])
    (said,) = trainer.run([samples_of([([7], [], 0.0)])], learn=False)
    key = key_of_reference(7, SCHEMA.by_name["a"].group)
    weights = trainer.shards.call(Explain("default", key, SCHEMA.by_name["a"].group), DEADLINE)["weights"]
    assert said[0] == pytest.approx((np.array(weights) * FACTORS).sum(), rel=1e-5)
