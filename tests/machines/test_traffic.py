"""The counters of traffic agree with the link's: bytes of the veth device, less 66 a packet."""

import json
from contextlib import ExitStack

import pytest

from headrace.identity.authority import open_authority
from tests.machines.scenario import running, shard_of, trainer_of

pytestmark = pytest.mark.long

COLLECTIVES = """
import json, sys
import numpy as np, torch
import torch.distributed as dist
from datetime import timedelta
from headrace.trainer.collectives.ranks import TorchRanks

rank, world, master = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore(master, 29400, world, is_master=rank == 0, timeout=timedelta(seconds=60))
ranks = TorchRanks(rank, world, store, "eth0", torch.device("cpu"), 60.0)
acts = {
    "all_reduce": lambda: ranks.all_reduce(torch.ones(2_500_000))(),
    "sum_floats": lambda: ranks.sum_floats(np.ones(200_000)),
    "broadcast": lambda: ranks.copy_from_rank_0(torch.ones(1_500_000)),
    "gather": lambda: ranks.gather({"a": np.ones(500_000)}),
    "all_gather": lambda: ranks.all_gather_of_ranks(torch.ones(world * 500_000))(),
}
for size in (2, 3, 4):
    acts[f"sums of {size}"] = lambda size=size: ranks.reduce_scatter(torch.ones(600_000), size)()
    acts[f"slices of {size}"] = lambda size=size: ranks.all_gather(torch.ones(600_000), size)
ranks.sum(np.ones(1, np.int64))
print("ready", flush=True)
for line in sys.stdin:
    acts[line.strip()]()
    print(json.dumps(ranks.links()), flush=True)
"""


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


def total(links, way):
    return sum(link[way] for link in links.values())


def test_what_a_trainer_and_its_shards_count_is_on_the_link(machines, held, tmp_path):
    authority = open_authority(tmp_path / "identity", "shards")
    first, second, third = machines(3)
    shards = [held.enter_context(running(at, shard_of(authority, n, 2))) for n, at in enumerate((first, second))]
    trainer = held.enter_context(running(third, trainer_of(authority, [shard.first for shard in shards])))
    before = [machine.carried() for machine in (first, second, third)]
    counted = trainer.ask("push")
    after = [machine.carried() for machine in (first, second, third)]
    on_link = [(now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after, strict=True)]
    mine = counted["trainer"]
    assert on_link[2] == pytest.approx((total(mine, "sent_bytes"), total(mine, "received_bytes")), rel=0.05)
    assert total(mine, "shared_sent_bytes") == total(mine, "shared_received_bytes") == 0
    for number, links in enumerate(counted["shards"]):
        theirs, ours = links["trainer-0"], mine[f"shard-{number}"]
        assert on_link[number] == pytest.approx((theirs["sent_bytes"], theirs["received_bytes"]), rel=0.05)
        assert (theirs["sent_bytes"], theirs["sent_messages"]) == (ours["received_bytes"], ours["received_messages"])
        assert (theirs["received_bytes"], theirs["received_messages"]) == (ours["sent_bytes"], ours["sent_messages"])
        assert ours["wait_s"] > 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_computed_for_collectives_is_on_the_link(machines, held, world):
    hosts = machines(world)
    ranks = [host.python("-c", COLLECTIVES, str(rank), str(world), hosts[0].address) for rank, host in enumerate(hosts)]
    for process in ranks:
        held.callback(process.communicate)
        held.callback(process.kill)
        assert next(line for line in process.stdout if line == "ready\n")
    counted = [{way: 0 for way in ("sent_bytes", "received_bytes")} for _ in ranks]
    of_groups = [f"{what} of {size}" for size in (2, 3, 4) if world % size == 0 for what in ("sums", "slices")]
    for collective in ("all_reduce", "sum_floats", "broadcast", "gather", "all_gather", *of_groups):
        before, then, again = [host.carried() for host in hosts], counted, sum(host.sent_again() for host in hosts)
        for process in ranks:
            process.stdin.write(f"{collective}\n")
            process.stdin.flush()
        links = [json.loads(process.stdout.readline()) for process in ranks]
        counted = [{way: total(each, way) for way in ("sent_bytes", "received_bytes")} for each in links]
        carried = [host.carried() for host in hosts]
        again = sum(host.sent_again() for host in hosts) - again  # which is on the link, and no collective's
        for rank in range(world):
            on_link = [now - was for now, was in zip(carried[rank], before[rank], strict=True)]
            ours = [counted[rank][way] - then[rank][way] for way in counted[rank]]
            for link, computed in zip(on_link, ours, strict=True):
                most = 0.05 * computed + 20_000
                assert computed - most <= link <= computed + most + again, (collective, rank, again)
