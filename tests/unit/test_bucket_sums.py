"""Sums of gradients in buckets: the same beside the backward pass as after it, and with 16 bits a number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseSgd
from tests.fakes.thread_ranks import on_ranks

STEPS = 4
BUCKETS = (64, 128, 256, 32 << 20)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
COMPRESSIONS = pytest.mark.parametrize("compression", ["fp16", "bf16"])


class Net(nn.Module):
    """Layers of which one is not used; integers at the start, times `scale`."""

    def __init__(self, scale):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.unused = nn.Linear(2, 3)
        draw = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=draw).float() * scale

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batch(rank, step, *, integers=False):
    """(samples, 7); None where the rank has none."""
    if step >= 3 - rank:
        return None
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-2, 3, (2, 7), generator=draw).float() if integers else torch.randn(2, 7, generator=draw)


def learn(part, net, more, ranks, steps, *, skipped=(), integers=False, fills=True):
    for step in steps:
        part.clear()
        x = batch(ranks.rank, step, integers=integers)
        if x is not None:
            if fills:
                part.fills(2.0)
            (net(x).sum() * 2.0).backward()
            for parameter in more.values():  # as a default row, after the backward pass
                parameter.grad.add_(torch.full_like(parameter, 2.0 * (ranks.rank + 1)))
        assert part.finite()
        if step in skipped:
            continue
        part.after_backward(step, 2.0)
        part.wait()
        part.step()
    part.flush()


def made(ranks, scale=0.2, **more):
    net, rows = Net(scale), {"default_row.t": nn.Parameter(torch.zeros(20))}
    config = DenseSection(optimizer=DenseSgd(kind="sgd", lr=0.125), **more)
    return AllReduceDense(net, config, ranks, rows), net, rows


def result(world, steps=range(STEPS), skipped=(), integers=False, **more):
    """Digest after a pass, and the collectives of each rank."""

    def act(ranks):
        part, net, rows = made(ranks, 1.0 if integers else 0.2, **more)
        learn(part, net, rows, ranks, steps, skipped=skipped, integers=integers)
        return part.digest()

    digests, ranks = on_ranks(world, act)
    assert len(set(digests)) == 1
    assert all(rank.made == ranks[0].made for rank in ranks)
    return digests[0], ranks[0].made


@WORLDS
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_sums_beside_the_backward_pass_have_the_same_bits_although_ranks_run_out_of_batches(world, bucket_bytes):
    after, collectives = result(world, bucket_bytes=bucket_bytes)
    beside, collectives_beside = result(world, bucket_bytes=bucket_bytes, overlap=True)
    assert beside == after and sorted(collectives) == sorted(collectives_beside)
    assert len(collectives) > STEPS or bucket_bytes == max(BUCKETS)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_integers_have_the_same_bits_in_buckets_of_any_size(size, world, overlap):
    wanted, _ = result(world, steps=range(2), integers=True)
    assert result(world, steps=range(2), integers=True, bucket_bytes=64 * size, overlap=overlap)[0] == wanted


@WORLDS
@pytest.mark.parametrize("more", [{}, {"overlap": True}, {"overlap": True, "compression": "bf16"}])
def test_a_skipped_step_leaves_nothing(world, more):
    without, _ = result(world, steps=[0, 2], bucket_bytes=128, **more)
    assert result(world, steps=[0, 1, 2, 3], skipped=[1, 3], bucket_bytes=128, **more)[0] == without


def test_buckets_are_begun_before_the_backward_pass_ends():
    begun = []

    class Watched(SingleRank):
        def all_reduce(self, flat):
            begun.append(len(flat))
            return lambda: None

    part, net, _ = made(Watched(), overlap=True, bucket_bytes=64)
    part.clear()
    net(torch.ones(2, 7)).sum().backward()
    assert not begun, "a micro-batch before the last one"
    part.clear()
    part.fills(1.0)
    net(torch.ones(2, 7)).sum().backward()
    before = len(begun)
    assert part.finite()
    assert len(begun) == -(-len(part.gradient) // 16)
    assert before == 0, "the last layer is not used, so its buckets wait for the end"
    part, net, _ = made(Watched(), overlap=True, bucket_bytes=64)
    begun.clear()
    part.clear()
    part.fills(1.0)
    (net(torch.ones(2, 7)).sum() + net.unused(torch.ones(1, 2)).sum()).backward()
    assert 0 < len(begun) < -(-len(part.gradient) // 16), "all but those of the default row"


@WORLDS
@COMPRESSIONS
@pytest.mark.parametrize("overlap", [False, True])
def test_what_rounding_leaves_is_not_lost(world, compression, overlap):
    """What was applied and what is left at the end, over all ranks, is the sum of all gradients."""

    def act(ranks):
        part, net, rows = made(ranks, compression=compression, overlap=overlap, bucket_bytes=128)
        applied, mine = torch.zeros_like(part.gradient), torch.zeros_like(part.gradient)
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(10 * step + ranks.rank)
            given = torch.randn(len(mine), generator=draw)
            part.clear()
            part.gradient.copy_(given)
            mine += given
            assert part.finite()
            part.after_backward(step, 1.0)
            part.wait()
            applied += part.gradient
            part.step()
        return applied, mine, part._sums.residuals.residual.clone()

    found, _ = on_ranks(world, act)
    given = sum(mine for _, mine, _ in found)
    left = sum(residual for *_, residual in found)
    assert 0 < float(left.abs().max()) < 0.1
    assert torch.allclose(found[0][0] + left, given, rtol=0, atol=0.2 if world > 1 else 1e-5), "sums are rounded, too"


@WORLDS
@COMPRESSIONS
def test_a_commit_holds_the_residuals_and_continues_to_the_bit(world, compression):
    more = {"compression": compression, "bucket_bytes": 128}

    def act(ranks):
        part, net, rows = made(ranks, **more)
        learn(part, net, rows, ranks, range(2))
        commit = {name: value.clone() for name, value in part.consolidate().items()}
        commit = on_all(ranks, commit)
        learn(part, net, rows, ranks, range(2, STEPS))
        again, net, rows = made(ranks, **more)
        again.load(commit)
        digest = again.digest()
        learn(again, net, rows, ranks, range(2, STEPS))
        return part.digest(), again.digest(), digest, commit

    found, _ = on_ranks(world, act)
    assert len({each[:2] for each in found}) == 1 and found[0][0] == found[0][1]
    commit = found[0][3]
    residuals = [commit[f"residual.{rank}"] for rank in range(world)]
    other = made(SingleRank(), **more)[0]
    other.load(commit)
    assert torch.allclose(other._sums.residuals.residual, torch.stack(residuals).mean(0), rtol=0, atol=1e-7)
    plain = made(SingleRank())[0]
    plain.load(commit)
    assert not any(name.startswith("residual") for name in plain.consolidate())


def on_all(ranks, commit):
    """The commit of rank 0, as every rank reads it from the disk."""
    return ranks._meet("commit", commit)[0]


def test_a_number_that_16_bits_cannot_hold_is_found_before_it_is_sent():
    part, net, _ = made(SingleRank(), compression="fp16")
    part.clear()
    part.gradient.fill_(70_000.0)
    assert not part.finite()
    part, net, _ = made(SingleRank(), compression="bf16")
    part.clear()
    part.gradient.fill_(70_000.0)
    assert part.finite()
