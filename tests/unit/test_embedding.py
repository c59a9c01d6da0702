"""The kernels on the CPU and torch's autograd give the same cells and gradients, for every kind of pooling."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.trainer.device_copies import DeviceCopies
from headrace.trainer.features.deduplication import Deduplicator, tables_of
from headrace.trainer.features.model_inputs import inputs_of
from headrace.trainer.features.pooling import KernelPooling, TorchPooling

TABLES = {"default": TableSection(dim=3), "other": TableSection(dim=2, first_order=False)}
SCHEMA = Schema.of(
    [
        SparseSlot(name="a", pooling="sum"),
        SparseSlot(name="b", pooling="mean", share="bs"),
        SparseSlot(name="c", pooling="sqrtn", share="bs"),
        SparseSlot(name="s", pooling="none", max_len=3),
        SparseSlot(name="o", table="other"),
        DenseSlot(kind="dense", name="d", size=2),
    ]
)


def samples_of(columns, num_samples, weights=None):
    def ragged(name):
        signs = columns[name]
        values_N = np.array([x for sample in signs for x in sample], np.uint64)
        offset_B1 = np.cumsum([0] + [len(sample) for sample in signs]).astype(np.int64)
        return Ragged(values_N, offset_B1, (weights or {}).get(name))

    dense = {"d": np.ones((num_samples, 2), np.float32)}
    sparse = {name: ragged(name) for name in columns}
    return Samples(sparse, dense, {}, np.arange(num_samples), np.full(num_samples, np.nan))


def sample_columns(draw, num_samples):
    def column(most):
        return draw(st.lists(st.lists(st.integers(0, 4), max_size=most), min_size=num_samples, max_size=num_samples))

    return {"a": column(2), "b": column(3), "c": column(3), "s": column(3), "o": column(1)}


def run(pooling, samples):
    looks = [Deduplicator(table).lookup(samples) for table in tables_of(SCHEMA, TABLES, None)]
    rng = np.random.default_rng(1)
    rows = {
        look.table.name: rng.integers(-8, 8, (len(look.keys.keys_U), look.table.width)).astype(np.float32)
        for look in looks
    }
    leaves = {look.table.name: pooling.cells(look, rows[look.table.name]) for look in looks}
    inputs = inputs_of(SCHEMA, samples, looks, leaves, torch.device("cpu"))
    total = sum((value * (i + 1)).sum() for i, value in enumerate(inputs.vectors.values()))
    total = total + (inputs.first_order_BF * 3).sum()
    for sequence in inputs.sequences.values():
        total = total + (sequence.vectors_BLD * 5).sum() + sequence.first_order_BL.sum()
    total.backward()
    grads = {look.table.name: pooling.gradients(look, leaves[look.table.name]) for look in looks}
    return looks, rows, inputs, grads


@settings(max_examples=40)
@given(st.integers(1, 4), st.data())
def test_kernels_and_torch_give_the_same_cells_and_gradients(num_samples, data):
    samples = samples_of(sample_columns(data.draw, num_samples), num_samples)
    _, _, by_kernel, kernel_grads = run(KernelPooling(2), samples)
    _, _, by_torch, torch_grads = run(TorchPooling(DeviceCopies(torch.device("cpu"))), samples)
    for name in by_kernel.vectors:
        assert torch.allclose(by_kernel.vectors[name], by_torch.vectors[name])
    for name in by_kernel.sequences:
        assert torch.equal(by_kernel.sequences[name].vectors_BLD, by_torch.sequences[name].vectors_BLD)
        assert torch.equal(by_kernel.sequences[name].mask_BL, by_torch.sequences[name].mask_BL)
    for name in kernel_grads:
        assert np.allclose(kernel_grads[name][0], torch_grads[name][0])
        assert kernel_grads[name][1] and torch_grads[name][1]


def test_each_kind_of_pooling_is_as_defined():
    columns = {"a": [[1, 2]], "b": [[1, 2, 3]], "c": [[1, 1, 2, 3]], "s": [[7, 8]], "o": [[]]}
    looks, rows, inputs, _ = run(KernelPooling(1), samples_of(columns, 1))
    row = {
        (int(group), int(key)): rows["default"][u, 1:]
        for u, (key, group) in enumerate(zip(looks[0].keys.keys_U, looks[0].keys.group_U, strict=True))
    }
    by_group = [[v for (g, _), v in row.items() if g == group] for group in range(3)]
    assert np.allclose(inputs.vectors["a"][0].detach(), by_group[0][0] + by_group[0][1])
    assert np.allclose(inputs.vectors["b"][0].detach(), sum(by_group[1]) / 3, atol=1e-5)
    assert np.allclose(inputs.vectors["c"][0].detach(), (2 * by_group[1][0] + by_group[1][1] + by_group[1][2]) / 2)
    assert inputs.vectors["o"].tolist() == [[0, 0]]
    assert inputs.sequences["s"].mask_BL.tolist() == [[True, True, False]]
    assert inputs.sequences["s"].vectors_BLD[0, 2].tolist() == [0, 0, 0]


def test_slots_of_a_share_group_have_one_row_for_an_id_and_other_slots_do_not():
    columns = {"a": [[5]], "b": [[5]], "c": [[5]], "s": [[5]], "o": [[5]]}
    looks, *_ = run(KernelPooling(1), samples_of(columns, 1))
    assert len(looks[0].keys.keys_U) == 3
    assert looks[0].keys.group_U.tolist() == [0, 1, 2]


def test_weights_of_ids_scale_their_rows():
    columns = {"a": [[1], [1]], "b": [[]] * 2, "c": [[]] * 2, "s": [[]] * 2, "o": [[]] * 2}
    weights = {"a": np.array([2, -3], np.float32)}
    looks, rows, inputs, grads = run(KernelPooling(1), samples_of(columns, 2, weights))
    assert np.allclose(inputs.vectors["a"].detach(), [rows["default"][0, 1:] * 2, rows["default"][0, 1:] * -3])
    assert grads["default"][0][0].tolist() == [-3, -1, -1, -1]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_fast_path_for_one_id_per_slot_gives_the_same_numbers(num_threads):
    schema = Schema.of([SparseSlot(names=("C{1..5}",))])
    rng = np.random.default_rng(2)
    num_samples = 3000  # above the size from which work is split
    sparse = {
        f"C{f + 1}": Ragged(rng.integers(0, 50, num_samples).astype(np.uint64), np.arange(num_samples + 1))
        for f in range(5)
    }
    label_B = (np.arange(num_samples) % 3 == 0).astype(np.float32)
    samples = Samples(sparse, {}, {"y": label_B}, np.arange(num_samples), np.full(num_samples, np.nan))
    (table,) = tables_of(schema, {"default": TableSection(dim=4)}, "y")
    look = Deduplicator(table).lookup(samples)
    assert look.cell_N is None
    rows_UD = rng.normal(size=(len(look.keys.keys_U), 5)).astype(np.float32)
    results = []
    for pooling in (KernelPooling(num_threads), TorchPooling(DeviceCopies(torch.device("cpu")))):
        leaf = pooling.cells(look, rows_UD)
        (leaf * torch.arange(leaf.numel()).view_as(leaf)).sum().backward()
        results.append((leaf.detach().numpy(), *pooling.gradients(look, leaf)))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.allclose(results[0][1], results[1][1])
    assert look.show_U.sum() == 5 * num_samples
    assert look.click_U.sum() == 5 * label_B.sum()
    ones = Samples(sparse, {}, {"y": np.ones_like(label_B)}, samples.event_B, samples.time_s_B)
    again = Deduplicator(table).lookup(ones)
    assert np.array_equal(again.click_U, again.show_U)
