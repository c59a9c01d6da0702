"""One rank of test_sums_of_processes: learns the same uneven batches under each setting, with 1 to 4 ranks.

Batches have other sizes and weights on each rank, and in the last steps some ranks have none. Shapes: B samples.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from headrace.launcher_contact import LauncherContact
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import SingleRank, TorchRanks
from headrace.trainer.dense.flat_parameters import digest_of
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseSgd

WORLDS = (1, 2, 3, 4)
BUCKETS = {"448B": 448, "2KiB": 2048, "one": 4 << 20}
"""Many buckets for each layer, one or two for each, and one for all. They are the parts of a ring of sums."""
SETTINGS = {
    **{name: {"bucket_bytes": size} for name, size in BUCKETS.items()},
    **{f"{name} beside": {"bucket_bytes": size, "overlap": True} for name, size in BUCKETS.items()},
}
LOCAL = {"strategy": "local_sgd", "k_steps": 1}
STEPS, INPUTS, HIDDEN = 5, 20, 24
"""In the first steps all ranks have a batch, in the last ones some."""


class Net(nn.Module):
    """Three layers. With `integers` they are beside each other, so that gradients are integers, too."""

    def __init__(self, integers):
        super().__init__()
        inner = INPUTS if integers else HIDDEN
        sizes = [(INPUTS, HIDDEN), (inner, HIDDEN), (inner, 1)]
        self.integers, self.layers = integers, nn.ModuleList(nn.Linear(*each) for each in sizes)
        draw = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.2
            if integers:
                parameter.data = (parameter * 50).round().detach()

    def forward(self, x):
        if self.integers:
            return torch.cat([layer(x) for layer in self.layers], 1).sum(1)
        first, second, last = self.layers
        return last(second(first(x).tanh()).tanh()).squeeze(1)


def batch(rank, step, integers):
    """Inputs and weights (B,) of a rank; None where it has run out."""
    if step > 2 + rank:
        return None
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = 2 + 3 * rank
    x, weight_B = torch.randn(size, INPUTS, generator=draw), torch.rand(size, generator=draw) + 0.5
    return ((x * 50).round(), torch.ones(size)) if integers else (x, weight_B)


def learnt(ranks, world, section, device, integers=False):
    """The weights after a pass of the batches of `world` ranks. One rank alone merges all of them in each step."""
    net = Net(integers).to(device)
    strategy = dense_strategy(net, section, ranks)
    for step in range(STEPS):
        of_ranks = [batch(rank, step, integers) for rank in range(world)]
        mine = [each for each in ([of_ranks[ranks.rank]] if ranks.world == world else of_ranks) if each is not None]
        total = sum(float(each[1].sum()) for each in of_ranks if each is not None) or 1.0
        share = loss = 0.0
        strategy.clear()
        for number, each in enumerate(mine):
            x, weight_B = (tensor.to(device) for tensor in each)
            if number == len(mine) - 1:
                strategy.fills(1.0)
            outputs_B = net(x)
            mean = outputs_B.sum() if integers else (outputs_B.square() * weight_B).sum() / total
            mean.backward()
            share, loss = share + float(weight_B.sum()) / total, loss + mean.item()
        strategy.note(share, loss)
        assert strategy.finite()
        if mine or strategy.communicates(step):
            strategy.after_backward(step, 1.0)
        strategy.wait()
        strategy.step()
    strategy.flush()
    return {name: each for name, each in strategy.tensors().items() if name.startswith("model.")}


def apart(found, wanted):
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def said_of(ranks, device):
    """Of each setting: hashes of its weights, and how far they are from those of one bucket for all."""
    floats = DenseSgd(kind="sgd", lr=0.1)
    said, one = {}, learnt(ranks, ranks.world, DenseSection(optimizer=floats), device)
    for name, more in SETTINGS.items():
        found = learnt(ranks, ranks.world, DenseSection(optimizer=floats, **more), device)
        whole = DenseSection(optimizer=DenseSgd(kind="sgd", lr=1.0), **more)
        exact = learnt(ranks, ranks.world, whole, device, integers=True)
        said[name] = {"bits": digest_of(found), "integers": digest_of(exact), "apart": apart(found, one)}
    together = DenseSection(optimizer=floats, accumulate=max(2, ranks.world))
    merged = learnt(SingleRank(), ranks.world, together, device)
    start = {f"model.{name}": each.to(device) for name, each in Net(False).state_dict().items()}
    said["merged"] = {"apart": apart(merged, one), "learnt": apart(one, start)}
    local = learnt(ranks, ranks.world, DenseSection(optimizer=floats, **LOCAL), device)
    said["local"] = {"bits": digest_of(local), "apart": apart(local, one)}
    return said


def main(rank, world, contact, device):
    torch.set_num_threads(1)
    store = meet_trainers(RendezvousClient(LauncherContact(**json.loads(contact))), rank, world, {}, "lo", 60.0)
    said = {}
    for size in WORLDS:
        if rank < size:
            own = dist.PrefixStore(f"of-{size}", store)
            ranks = SingleRank() if size == 1 else TorchRanks(rank, size, own, "lo", device, 60.0)
            said[size] = said_of(ranks, device)
            ranks.close()
    print("said " + json.dumps(said), flush=True)
    store.set(f"over-{rank}", "")
    store.wait([f"over-{other}" for other in range(world)])  # rank 0 holds it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], torch.device(sys.argv[4]))
