"""A commit's dense part and counters for other slots: weights, the optimizer's state, and exports afterwards."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.codec import plain, typed
from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.sharded import ShardedDense
from headrace.trainer.exports.stream_state import ExportStreamState, LoggedExport, ScheduleInput, delta_hindrance
from headrace.trainer.features.default_rows import DefaultRows, widths_of
from headrace.trainer.models.carried_weights import NotCarried
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.train.commit_state import CarriedState, weights_of
from headrace.trainer.train.model_building import build_model
from tests.fakes.cut import SHARED
from tests.integration.stream_job import SPEC

CPU = torch.device("cpu")
ADAGRAD = {"kind": "adagrad", "lr": 0.1, "initial": 0.25}
OLD = fill_defaults(tomllib.loads(SPEC) | {"dense": {"optimizer": ADAGRAD}})
EXTRA = {"name": "extra"}, {"name": "e", "kind": "dense", "size": 3}


def with_slots(slots, **more):
    return fill_defaults(OLD | {"slots": slots} | more)


NEW = with_slots([*EXTRA, *OLD["slots"]])


class Dense:
    """The dense part of a job, and how it takes another one's state."""

    def __init__(self, spec, strategy=AllReduceDense):
        self.job = validate(TrainerJob, spec, only_known=True)
        schema = Schema.of(self.job.slots)
        self.model = build_model(self.job, schema, Path(), CPU)
        rows = DefaultRows(widths_of(schema, self.job.tables), CPU).parameters
        self.part = strategy(self.model, self.job.dense, SingleRank(), rows)
        self.carried = CarriedState(self.job, schema, self.model, Path())

    def learnt(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            self.part.clear()
            for parameter in self.model.parameters():
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
            self.part.fills(1.0)
            self.part.after_backward(0, 1.0)
            self.part.wait()
            self.part.step()
        return self.consolidated()

    def consolidated(self):
        return {name: value.clone() for name, value in self.part.consolidate().items()}

    def take(self, saved, spec):
        self.part.load(self.carried.tensors(saved, spec, self.part.tensors()))
        return self.consolidated()


@pytest.mark.parametrize("optimizer", [ADAGRAD, {"kind": "adam"}, {"kind": "sgd", "momentum": 0.9, "lr": 0.1}])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("strategy", [AllReduceDense, ShardedDense])
def test_new_inputs_have_zeros_and_the_state_of_a_first_step_and_removed_again_all_is_as_before(
    optimizer, learns, strategy
):
    more = {"dense": {"optimizer": optimizer}, "tables": {"default": {"dim": 4, "default_row": "learnt"}}}
    more = more if learns else {"dense": more["dense"]}
    old, new = with_slots(OLD["slots"], **more), with_slots(NEW["slots"], **more)
    saved = Dense(old, strategy).learnt()
    wide = Dense(new, strategy)
    found = wide.take(saved, old)
    columns = 4 * 4 + 2 + 3
    first = found["model.deep.0.weight"]
    assert first.shape == (8, columns)
    assert torch.equal(first[:, 4:8], saved["model.deep.0.weight"][:, 0:4])  # of slot a, now behind "extra"
    assert not first[:, 0:4].any()
    assert not found["model.wide.dense_TC"][:, :3].any()
    start = 0.25 if optimizer is ADAGRAD else 0.0
    begins = weights_of(wide.job, Path()).begins
    for name in (name for name in found if name.startswith("optimizer.") and found[name].ndim):
        begin = begins["deep.0.weight"]
        of_first = found[name][begin : begin + 8 * columns].view(8, columns)
        assert (of_first[:, 0:4] == start).all()
        assert (of_first[:, 4:8] != start).any()
    back = Dense(old, strategy).take(found, new)
    assert back.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in back.items())


def test_a_commit_with_the_same_slots_is_taken_as_it_is_and_one_of_another_layout_is_refused():
    dense = Dense(OLD)
    saved = dense.learnt()
    assert dense.carried.tensors(saved, OLD, {}).keys() == saved.keys()
    short = saved | {"optimizer.sum": saved["optimizer.sum"][:-1]}
    with pytest.raises(BadInput, match="the commit's optimizer has"):
        Dense(NEW).take(short, OLD)


def test_building_the_old_model_leaves_the_state_of_random_numbers_as_it_was(tmp_path):
    job = validate(TrainerJob, OLD, only_known=True)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    weights_of(job, tmp_path)
    assert torch.equal(torch.rand(3), wanted)


def test_a_class_of_ones_own_without_axes_is_a_new_model(tmp_path):
    (tmp_path / "carried_mine.py").write_text(
        "from torch import nn\n\n\nclass Plain(nn.Module):\n    def __init__(self, shape, settings):\n"
        "        super().__init__()\n        self.first = nn.Linear(sum(s.dim for s in shape.pooled), 1)\n"
    )
    old, new = (with_slots(each["slots"], model={"class": "carried_mine:Plain"}) for each in (OLD, NEW))
    job = validate(TrainerJob, new, only_known=True)
    schema = Schema.of(job.slots)
    carried = CarriedState(job, schema, build_model(job, schema, tmp_path, CPU), tmp_path)
    with pytest.raises(NotCarried, match="slot_axes"):
        carried.tensors({}, old, {})


def test_counters_follow_their_slots():
    counters = {"sums": np.arange(12, dtype=np.int64).reshape(6, 2)}
    found = Dense(NEW).carried.counters(counters, OLD)["sums"]
    assert found[:2].tolist() == [[0, 0], [0, 0]]
    assert found[2:].tolist() == counters["sums"].tolist()


def test_the_export_after_a_change_of_the_slots_is_a_base():
    newest = LoggedExport("0000000001-base", 1, "base", "t1", SHARED, "x", None)
    state = ExportStreamState(newest=newest, tracked=True, other_slots=True)
    now = ScheduleInput(
        time_s=0.0, timeline="t1", arithmetic="x", shared=SHARED, ended=False, requested=None, sweeping=()
    )
    section = ExportSection(delta=3600.0)
    assert delta_hindrance(section, state, now) == "the slots changed"
    assert typed(ExportStreamState, plain(state), "it").other_slots
    state.other_slots = False
    assert delta_hindrance(section, state, now) != "the slots changed"
