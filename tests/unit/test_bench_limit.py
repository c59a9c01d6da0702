"""The bench of the limit: every part of it tells a figure, and the kernels that it times do their work."""

import math

import numpy as np

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from tests.bench import limit

SIGNS_FN = np.random.default_rng(1).integers(1, 500, (3, 600)).astype(np.uint64)


def test_rows_are_timed_by_kernel_on_batches_of_the_given_ids():
    found = limit.rows(SIGNS_FN, rounds=1, samples=200)
    assert set(found) == {*limit.STEPS, "unique keys"}
    expected = [sum(len(np.unique(of_slot)) for of_slot in SIGNS_FN[:, n : n + 200]) for n in (0, 200, 400)]
    assert found["unique keys"] == np.mean(expected)
    assert all(math.isfinite(each) and each >= 0 for each in found.values())


def test_the_timed_kernels_find_and_update_the_rows_of_the_batch():
    batch = limit.Batch(SIGNS_FN[:, :200].copy(), np.arange(3))
    table = limit.Table(np.unique(batch.keys_U))
    before_RW = table.slab_RW.copy()
    for step in limit.STEPS.values():
        step(table, batch)
    assert (table.keys_R[batch.rows_U] == batch.keys_U).all()
    assert (batch.cell_CD == 0.5).all()
    assert (table.slab_RW[:, : limit.DIM] != before_RW[:, : limit.DIM]).all()


def test_the_best_library_is_named_for_each_product():
    found = limit.products(8, rounds=1, samples=64)
    named = [value for name, value in found.items() if " x " in name]
    assert len(named) == 9 and all(value.rsplit(" by ", 1)[1] in {"OpenBLAS", "mkl", "onednn"} for value in named)
    assert found["products, core-ms"] >= 0 and found["ReLU, core-ms"] >= 0


def test_text_is_timed_by_the_sample():
    schema = Schema.of([DenseSlot(name="d", kind="dense", size=1), SparseSlot(name="s")])
    found = limit.text(b"1 0.5 2 7 8\n" * 1000, schema, rounds=1)
    assert found["bytes a sample"] == 12
    assert found["parser"] >= 0 and found["through cat"] >= 0
