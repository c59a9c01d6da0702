"""Buffers of a model: restored after a skipped step, broadcast by rank 0, unchanged by a batch of one sample."""

import pytest
import torch
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.batch_norms import Buffers, BuffersDiffer, OwnBatchNorms
from tests.unit.test_dense import Centred


class TwoRanks(SingleRank):
    """Two ranks on two threads; messages of rank 0 reach rank 1."""

    world = 2

    def __init__(self, rank, said):
        self.rank, self._said = rank, said

    def broadcast(self, message):
        if self.rank == 0:
            self._said["message"] = message
        return self._said["message"]

    def copy_from_rank_0(self, flat):
        if self.rank == 0:
            self._said["flat"] = flat.clone()
        flat.copy_(self._said["flat"])


def normal():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def stepped(model, seed):
    model(torch.randn(7, 3, generator=torch.Generator().manual_seed(seed)))
    return model


def test_a_skipped_step_does_not_change_buffers():
    model = stepped(normal(), 1)
    buffers, before = Buffers(model, SingleRank()), {name: value.clone() for name, value in model.state_dict().items()}
    buffers.save()
    model(torch.full((2, 3), 3e38))
    assert not torch.isfinite(model[1].running_mean).all()
    buffers.restore()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_buffer_that_the_model_replaced_is_restored_too():
    model = Centred()
    buffers = Buffers(model, SingleRank())
    buffers.save()
    model(torch.tensor([4.0]))
    assert model.mean.item() == 2.0
    buffers.restore()
    assert model.mean.item() == 0.0


class Mixed(nn.Module):
    """Buffers of several types and shapes, one of them empty; and one that no commit holds."""

    def __init__(self, filled, size=2):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(filled)))
        self.register_buffer("flag", torch.tensor([bool(filled)] * 3))
        self.register_buffer("count", torch.tensor(filled * 2**40 + 1))
        self.register_buffer("part", torch.full((size, 2), filled, dtype=torch.bfloat16).t())
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("own", torch.tensor(float(filled)), persistent=False)


def test_all_ranks_get_the_buffers_of_rank_0_and_keep_their_parameters():
    said, rank0, other = {}, Mixed(1), Mixed(0)
    for rank, model in enumerate((rank0, other)):
        Buffers(model, TwoRanks(rank, said)).broadcast()
    assert all(torch.equal(rank0.state_dict()[name], other.state_dict()[name]) for name in ("flag", "count", "part"))
    assert other.count.item() == 2**40 + 1 and other.flag.all()
    assert other.weight.eq(0).all() and other.own.item() == 0


def test_a_buffer_of_another_shape_is_named():
    said = {}
    Buffers(Mixed(1), TwoRanks(0, said)).broadcast()
    with pytest.raises(BuffersDiffer, match="trainer 1 and trainer 0 have buffers of different shapes or types: part"):
        Buffers(Mixed(1, size=4), TwoRanks(1, said)).broadcast()


def test_a_model_without_buffers_sends_nothing():
    class Silent(TwoRanks):
        def broadcast(self, message):
            raise AssertionError("no message is needed")

    buffers = Buffers(nn.Linear(2, 2), Silent(1, {}))
    buffers.save()
    buffers.restore()
    buffers.broadcast()


def test_a_batch_of_one_sample_uses_the_running_statistics_and_does_not_change_them():
    model = stepped(normal(), 1)
    before = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.ones(1, 3))
    with OwnBatchNorms(model).forward(1):
        said = model(torch.ones(1, 3))
    assert model.training and all(module.training for module in model.modules())
    assert torch.equal(model[1].running_mean, before)
    assert torch.equal(said, model.eval()(torch.ones(1, 3)))


def test_two_samples_are_normalised_by_their_own_statistics():
    model, same = stepped(normal(), 1), stepped(normal(), 1)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    with OwnBatchNorms(model).forward(2):
        said = model(x)
    assert torch.equal(said, same(x)) and torch.equal(model[1].running_var, same[1].running_var)
