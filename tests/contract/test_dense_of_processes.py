"""Every dense strategy on processes joined by gloo or NCCL: the same bits at every run, and what unit tests promise.

One process a rank makes all strategies, one after another. Batches are uneven; in some steps a rank has none.
"""

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.fakes.devices import DEVICES, environment_of
from tests.fakes.rendezvous import RendezvousHere

pytestmark = pytest.mark.long

SETTINGS = {
    "all_reduce": {},
    "local_sgd": {"strategy": "local_sgd", "k_steps": 3},
    "post_local": {"strategy": "local_sgd", "k_steps": 3, "begin": 4},
    "adaptive": {"strategy": "local_sgd", "k_steps": 3, "adaptive": True},
    "every_step": {"strategy": "local_sgd", "k_steps": 1},
    "sharded": {"strategy": "sharded"},
    "hybrid": {"strategy": "sharded", "group": 2},
    "stage2": {"strategy": "sharded", "stage": 2},
    "stage3": {"strategy": "sharded", "stage": 3},
    "stage3_hybrid": {"strategy": "sharded", "stage": 3, "group": 2},
    "clipped": {"clip_norm": 0.1},
    "sharded_clipped": {"strategy": "sharded", "clip_norm": 0.1},
    "dgc": {"compression": "dgc", "dgc": {"sparsity": 0.99}},
    "dgc_of_all": {"compression": "dgc", "dgc": {"sparsity": 0}},
    "powersgd": {"compression": "powersgd", "powersgd": {"rank": 2}},
    "hierarchy": {"hierarchy": {"group": 2}},
    "hierarchy_bf16": {"hierarchy": {"group": 2}, "compression": "bf16"},
    "bf16": {"compression": "bf16"},
}
SCRIPT = """
import json, sys
import numpy as np, torch
from torch import nn
from headrace.launcher_contact import LauncherContact
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import TorchRanks
from headrace.trainer.dense.flat_parameters import digest_of
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection

rank, world, contact, settings = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
device = torch.device(sys.argv[5])
torch.set_num_threads(1)
store = meet_trainers(RendezvousClient(LauncherContact(**contact)), rank, world, {}, "lo", 60.0)
ranks = TorchRanks(rank, world, store, "lo", device, 60.0) if store else None
if ranks is None:
    from headrace.trainer.collectives.ranks import SingleRank
    ranks = SingleRank()

def batch(rank, step):
    if step > 6 + rank:
        return None
    return torch.randn(2 + rank, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)

def sent():
    return {name: link["sent_bytes"] for name, link in ranks.links().items()}

def learnt(section, saved=None):
    net = nn.Linear(64, 768, bias=False)  # 12 * 4,096 parameters: slices need no padding
    net.weight.data = torch.randn(net.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    net.parameters_in_calls = True
    net.to(device)
    strategy = dense_strategy(net, section, ranks)
    if saved is not None:
        strategy.load(saved)
    for step in range(9):
        num = sum(len(each) for r in range(world) if (each := batch(r, step)) is not None)
        mine, share, loss = batch(rank, step), 0.0, 0.0
        strategy.clear()
        if num == 0:
            break
        if mine is not None:
            mean = net(mine).tanh().square().sum() / num
            mean.backward()
            share, loss = len(mine) / num, mean.item()
        strategy.note(share, loss)
        assert strategy.finite()
        if mine is not None or strategy.communicates(step):
            strategy.after_backward(step, 1.0)
        strategy.wait()
        strategy.step()
    in_steps = sent()
    strategy.flush()
    whole = {name: value.clone() for name, value in strategy.consolidate().items()}
    state = sum(value.nbytes for name, value in strategy.tensors().items() if name.startswith("optimizer.exp"))
    return strategy.digest(), whole, state, in_steps

said = {}
for name, given in settings.items():
    section, before = DenseSection(**given), sent()
    digest, whole, state, in_steps = learnt(section)
    said[name] = {"digest": digest, "state_bytes": state, "sent_to": {}}
    said[name]["sent_to"] = {peer: num_bytes - before.get(peer, 0) for peer, num_bytes in in_steps.items()}
    said[name]["sent"] = sum(said[name]["sent_to"].values())
    if rank == 0:
        weights = whole["model.weight"]
        said[name]["weights"], said[name]["bits"] = weights.view(-1)[::7].tolist(), digest_of({"weights": weights})
        said[name]["commit"] = {key: list(value.shape) for key, value in whole.items()}
print("said " + json.dumps(said), flush=True)
ranks.close()
"""


def run(world, folder, device="cpu"):
    """What each rank says."""
    folder.mkdir()
    with RendezvousHere(folder, *(f"trainer-{rank}" for rank in range(world))) as rendezvous:
        given = json.dumps(SETTINGS)
        contacts = [rendezvous.contact(f"trainer-{rank}").model_dump_json() for rank in range(world)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), str(world), contact, given, device],
                env=environment_of(rank),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, contact in enumerate(contacts)
        ]
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    return [json.loads(next(line for line in text.splitlines() if line.startswith("said "))[5:]) for text in outputs]


@pytest.fixture(scope="module")
def said_by(tmp_path_factory):
    """`run`, once for all tests that read what the same ranks say."""
    return cache(lambda world, device: run(world, tmp_path_factory.mktemp("said") / "run", device))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_strategies_keep_their_promises_on_processes(device, world, said_by, tmp_path):
    first, again = said_by(world, device), run(world, tmp_path / "again", device)
    assert first == again, "the same bits, and as many bytes, at every run"
    for name in SETTINGS:
        assert len({said[name]["digest"] for said in first}) == 1, name
    rank0 = first[0]
    for name, oracle in (("sharded", "all_reduce"), ("hybrid", "all_reduce"), ("sharded_clipped", "clipped")):
        assert rank0[name]["weights"] == pytest.approx(rank0[oracle]["weights"], abs=1e-6)
        assert rank0[name]["commit"] == rank0[oracle]["commit"]
    for name, oracle in (("hierarchy", "all_reduce"), ("dgc_of_all", "all_reduce")):
        assert rank0[name]["weights"] == pytest.approx(rank0[oracle]["weights"], abs=1e-6), name
    assert rank0["dgc_of_all"]["bits"] == rank0["all_reduce"]["bits"]
    assert rank0["hierarchy_bf16"]["weights"] == pytest.approx(rank0["bf16"]["weights"], abs=0.01)
    for name, oracle in (("stage2", "sharded"), ("stage3", "sharded"), ("stage3_hybrid", "hybrid")):
        assert rank0[name]["bits"] == rank0[oracle]["bits"] and rank0[name]["commit"] == rank0[oracle]["commit"], name
    assert rank0["stage2"]["digest"] == rank0["stage3"]["digest"]
    if world <= 2:  # the sum of two numbers has one order
        assert rank0["sharded"]["bits"] == rank0["all_reduce"]["bits"]
    whole, part = (sum(said[name]["state_bytes"] for said in first) for name in ("all_reduce", "sharded"))
    assert whole == world * part


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_strategy_sends_in_steps_what_it_promises(world, said_by):
    said = said_by(world, "cpu")
    sent = {name: sum(each[name]["sent"] for each in said) for name in SETTINGS}
    num_steps = min(6 + world, 9)
    assert sent["sharded"] == pytest.approx(sent["all_reduce"], rel=0.01)
    assert sent["stage2"] == pytest.approx(sent["all_reduce"], rel=0.01)
    assert sent["stage3"] == pytest.approx(1.5 * sent["all_reduce"], rel=0.1), "weights once more, before backward"
    assert sent["every_step"] == pytest.approx(3 * sent["all_reduce"], rel=0.01), "weights and two moments"
    assert sent["local_sgd"] == pytest.approx(sent["every_step"] * (num_steps // 3) / num_steps, rel=0.01)
    assert sent["dgc"] == pytest.approx(sent["all_reduce"] * 0.01 * world, rel=0.02), "index and number"
    assert sent["powersgd"] == pytest.approx(sent["all_reduce"] * 2 * (64 + 768) / (64 * 768), rel=0.02)


def test_hierarchical_sums_send_less_between_machines(said_by):
    """Trainers 0 and 1 share a machine, and 2 and 3; in a ring of all one of each sends to the other machine."""
    said = said_by(4, "cpu")
    between = {
        name: sum(
            num_bytes
            for rank, each in enumerate(said)
            for to, num_bytes in each[name]["sent_to"].items()
            if rank // 2 != int(to.removeprefix("trainer-")) // 2
        )
        for name in ("all_reduce", "hierarchy")
    }
    assert between["hierarchy"] == pytest.approx(between["all_reduce"] * 2 / 3, rel=0.01)
