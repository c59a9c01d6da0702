"""Weight decay of rows: by the passes since a row's last push, exactly as a plain twin."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.pserver.config import Bounds, ShardProcess, TableSection
from headrace.pserver.consistency.asynchronous import Geo
from headrace.pserver.protocol.commit_parts import AgingState
from headrace.pserver.protocol.shards import Gradients
from headrace.pserver.row_optimizer_kernels import ftrl_adapt_reference
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.rows.weight_decay import add_weights_reference, decay_reference
from headrace.pserver.server.shard import Shard
from headrace.pserver.tables.table import ShardTable

KEYS = np.arange(1, 6, dtype=np.uint64) << np.uint64(60)
FTRL = {"kind": "ftrl", "l1": 0.125}
OPTIMIZERS = [{"kind": "sgd"}, {"kind": "adagrad"}, {"kind": "adam"}, {"kind": "paddle_adagrad"}, FTRL]
PASS = st.tuples(st.integers(1, 40), st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), max_size=3))
"""Versions since the pass before, and the rows that each of its steps pushes."""


class Twin:
    """A row at a time, on the floats that a new row has."""

    def __init__(self, table: ShardTable, rows_U) -> None:
        self._optimizer, self._section = optimizer_of(table.section), table.section
        self.rows = table.rows.floats.slab_RW[rows_U].copy()
        self._last = [0] * len(rows_U)

    def push(self, row, grad_D, version):
        section, num_weights = self._section, len(grad_D)
        if self._last[row]:
            kept = np.float32(1 - section.weight_decay)
            decay_reference(self.rows[row], version - self._last[row], num_weights, kept)
        grad_D = add_weights_reference(self.rows[row], grad_D, np.float32(section.l2))
        first_order = int(section.first_order)
        if section.optimizer.kind == "ftrl" and section.weight_decay:
            ftrl_adapt_reference(self.rows[row], num_weights, first_order, self._optimizer.settings)
        self._optimizer.kernels.reference(self.rows[row], grad_D, first_order, self._optimizer.settings)
        self._last[row] = version


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each["kind"])
@settings(max_examples=30)
@given(
    passes=st.lists(PASS, max_size=6),
    weight_decay=st.sampled_from([0.0, 0.5, 0.01]),
    l2=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 99),
)
def test_a_row_decays_as_its_plain_twin_bit_for_bit(optimizer, passes, weight_decay, l2, seed):
    section = TableSection(dim=3, optimizer=optimizer, weight_decay=weight_decay, l2=l2, init_range=0.5)
    table = ShardTable("t", section, seed)
    rows_U = frozen(table.rows.reserve(KEYS, np.zeros(len(KEYS), np.uint16)))
    twin, version, draw = Twin(table, rows_U), 0, np.random.default_rng(seed)
    for gap, steps in passes:
        version += gap
        table.open_pass()
        for chosen in steps:
            grads_UD = draw.normal(size=(len(chosen), 4)).astype(np.float32)
            ones_U = np.ones(len(chosen), np.float32)
            table.apply(frozen(rows_U[chosen]), Gradients(*map(frozen, (grads_UD, ones_U, ones_U))), 1, version)
            for row, grad_D in zip(chosen, grads_UD, strict=True):
                twin.push(row, grad_D, version)
        table.close_pass(0)
    found = table.rows.floats.slab_RW[rows_U]
    assert (found.view(np.uint32) == twin.rows.view(np.uint32)).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.999, 0.0]))
def test_a_long_absence_is_as_many_passes_one_by_one(passes, kept):
    row = np.array([2.0, -1.0, 5.0], np.float32)
    decay_reference(row, passes, 2, np.float32(kept))
    assert row[2] == 5.0 and row[0] == pytest.approx(2.0 * float(np.float32(kept)) ** passes, rel=1e-3, abs=1e-37)


def pushed(section, versions, grad=0.0):
    """The weights of one row that starts as its table says, after a push of `grad` in each of these passes."""
    table = ShardTable("t", section, 1)
    rows_U = frozen(table.rows.reserve(KEYS[:1], np.zeros(1, np.uint16)))
    found = [table.gather(rows_U)[0]]
    for version in versions:
        one = np.ones(1, np.float32)
        grads = np.full((1, table.rows.num_weights), grad, np.float32)
        table.open_pass()
        table.apply(rows_U, Gradients(*map(frozen, (grads, one, one))), 1, version)
        table.close_pass(0)
        found.append(table.gather(rows_U)[0])
    return found


def test_a_row_that_is_not_pushed_keeps_its_weights_and_makes_up_for_it_at_its_next_push():
    section = TableSection(dim=2, optimizer={"kind": "sgd"}, weight_decay=0.5, init_range=0.5)
    start, first, again, late = pushed(section, (3, 4, 7))
    assert start[1:].all() and (first == start).all(), "a new row has nothing to lose"
    assert (again == start / 2).all() and (late == start / 16).all()


def test_a_vector_that_joins_later_decays_too():
    section = TableSection(dim=2, optimizer={"kind": "sgd"}, weight_decay=0.5, init_range=0.5, extend_at=0.0)
    _, first, again = pushed(section, (1, 2))
    assert first[1:].all() and (again == first / 2).all()


@pytest.mark.long  # torch's optimizers load its compiler
@pytest.mark.parametrize(
    ("optimizer", "theirs"),
    [
        ({"kind": "sgd", "lr": 0.125}, lambda w: torch.optim.SGD([w], lr=0.125, weight_decay=0.25)),
        (
            {"kind": "adagrad", "lr": 0.125, "per": "element"},
            lambda w: torch.optim.Adagrad([w], lr=0.125, weight_decay=0.25),
        ),
        ({"kind": "adam", "lr": 0.03125}, lambda w: torch.optim.Adam([w], lr=0.03125, weight_decay=0.25)),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_l2_of_a_row_that_is_in_every_step_is_weight_decay_of_torch(optimizer, theirs):
    section = TableSection(dim=3, optimizer=optimizer, l2=0.25, init_range=0.5)
    start, *found = pushed(section, range(1, 9), grad=0.5)
    weights = torch.tensor(start, requires_grad=True)
    learner = theirs(weights)
    for each in found:
        weights.grad = torch.full_like(weights, 0.5)
        learner.step()
        np.testing.assert_allclose(each, weights.detach().numpy(), atol=1e-6)


def test_l2_joins_the_gradient_after_it_is_clipped():
    section = TableSection(dim=0, optimizer={"kind": "sgd", "lr": 1.0}, l2=0.5, clip_norm=1.0)
    assert [float(each[0]) for each in pushed(section, (1, 2), grad=9.0)] == [0.0, -1.0, -1.5]


def test_weights_stay_within_bounds():
    section = TableSection(dim=0, optimizer={"kind": "sgd", "lr": 1.0}, weight_decay=0.5, bounds=Bounds(low=-1, high=1))
    assert float(pushed(section, (1, 2), grad=-9.0)[-1][0]) == 1.0


def test_a_row_of_ftrl_decays_from_its_weights():
    section = TableSection(dim=2, optimizer={"kind": "ftrl"}, weight_decay=0.5, init_range=0.5)
    start, first, late = pushed(section, (1, 3))
    np.testing.assert_allclose(first, start, rtol=1e-5)
    np.testing.assert_allclose(late, start / 4, rtol=1e-5)


def test_a_restored_shard_decays_since_then_where_the_job_file_has_changed(tmp_path):
    for committed, since in ((0.25, 7), (0.5, 3), (None, 7)):
        shard = Shard(ShardProcess.alone({"t": TableSection(weight_decay=0.5)}, 1))
        life = shard.tables["t"].overview.life
        life.load([AgingState(0, (), (), (), weight_decay=committed and (committed, 3))])
        shard.restore(tmp_path, [], 7)
        assert life.state.weight_decay == (0.5, since)


def test_copies_of_rows_refuse_l2():
    tables = {"default": TableSection(optimizer={"kind": "sgd"}, l2=0.5)}
    with pytest.raises(SpecError, match=r"tables\.default\.l2: does not work with train\.mode = \"geo\""):
        Geo.check_optimizers(Sgd(kind="sgd"), tables)
    Geo.check_optimizers(Sgd(kind="sgd"), {"default": TableSection(optimizer={"kind": "sgd"}, weight_decay=0.5)})


def test_a_decay_that_float32_would_lose_is_refused():
    for share in (1e-8, 5.9e-8, 1e-300):
        with pytest.raises(
            ValueError, match=r"weight_decay\n.*is so small that weights.*the least is 5.960464477539063e-08, and 0"
        ):
            TableSection(weight_decay=share)
    assert np.float32(1 - TableSection(weight_decay=2.0**-24).weight_decay) < 1


def test_a_table_without_it_is_written_as_before_there_was_any():
    assert not {"schedule", "weight_decay", "l2"} & TableSection().model_dump(mode="json").keys()
