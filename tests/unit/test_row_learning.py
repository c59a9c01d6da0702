"""Rows on a device learn as rows on a shard: torch operations against the kernels, with equal bits on a CPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.config import TableSection
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.row_settings import RowSettings
from headrace.trainer.train import row_learning
from headrace.trainer.train.row_learning import LEARNERS, Numbers

OPTIMIZERS = (
    {"kind": "sgd", "lr": 0.3},
    {"kind": "momentum", "lr": 0.1, "momentum": 0.7},
    {"kind": "adagrad", "per": "row", "initial": 0.1},
    {"kind": "adagrad", "per": "element", "lr": 0.7},
    {"kind": "adam", "lr": 0.01},
)


def section_of(optimizer: dict[str, object], dim: int, first_order: bool) -> TableSection:
    slots = {"b": {"lr": 0.013}}
    more = {"bounds": {"low": -0.5, "high": 0.6}, "slots": slots}
    return TableSection.model_validate({"optimizer": optimizer, "dim": dim, "first_order": first_order, **more})


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: "-".join(str(v) for v in each.values()))
@settings(max_examples=10)
@given(dim=st.integers(0, 19), first_order=st.booleans(), seed=st.integers(0, 1 << 30), steps=st.integers(1, 4))
def test_an_optimizer_in_torch_has_the_bits_of_its_kernel(optimizer, dim, first_order, seed, steps):
    first_order = first_order or not dim
    groups = {"a": 0, "b": 1}
    rows = RowSettings.of(section_of(optimizer, dim, first_order), groups)
    draw, num_rows = np.random.default_rng(seed), 23
    slab_RW = np.empty((num_rows, len(rows.start_W)), np.float32)
    group_R = draw.integers(0, 2, num_rows).astype(np.uint16)
    rows.initialise(slab_RW, draw.integers(0, 1 << 60, num_rows).astype(np.uint64), group_R, 0, num_rows, np.uint64(7))
    on_device = torch.from_numpy(slab_RW.copy())
    numbers_C2R = torch.from_numpy(np.stack([each.settings for each in rows.optimizers]))
    name = rows.classes.sections[0].optimizer.on_device
    assert name is not None
    for _ in range(steps):
        rows_U = draw.permutation(num_rows)[:17].astype(np.int32)
        scale = np.float32(10.0) ** draw.integers(-3, 3)
        grads_UD = (draw.normal(size=(17, rows.num_weights)) * scale).astype(np.float32)
        rows.learn(slab_RW, frozen(rows_U), frozen(grads_UD), group_R, 0, 17)
        class_U = torch.from_numpy(rows.class_G[group_R[rows_U]].astype(np.int64))
        numbers = Numbers(numbers_C2R, class_U, rows.first_order, rows.num_weights)
        at = torch.from_numpy(rows_U.astype(np.int64))
        on_device[at] = LEARNERS[name](on_device[at], torch.from_numpy(grads_UD), numbers)
        np.testing.assert_array_equal(slab_RW.view(np.uint32), on_device.numpy().view(np.uint32))


@settings(max_examples=10)
@given(width=st.integers(1, 19), seed=st.integers(0, 1 << 30), most=st.floats(0.01, 10))
def test_scaled_and_clipped_gradients_have_the_bits_of_the_kernels(width, seed, most):
    draw = np.random.default_rng(seed)
    grads_UD, show_U = draw.normal(size=(31, width)).astype(np.float32), draw.integers(0, 4, 31).astype(np.float32)
    scaled_UD, clipped_UD = np.empty_like(grads_UD), np.empty_like(grads_UD)
    kernels.scale_by_show(frozen(grads_UD), frozen(show_U), np.float32(77), scaled_UD)
    kernels.clip_rows(frozen(grads_UD), 0, 31, most, clipped_UD)
    on_device = torch.from_numpy(grads_UD)
    np.testing.assert_array_equal(scaled_UD, row_learning.by_show(on_device, torch.from_numpy(show_U), 77).numpy())
    np.testing.assert_array_equal(clipped_UD, row_learning.clipped(on_device, most).numpy())
