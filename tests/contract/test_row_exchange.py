"""Rows on the devices of several trainers against rows on a shard: equal bits at each step, whatever the batches are.

Trainers are threads here, with the CPU as the device of each; and two processes, which also share a GPU where there is
one. tests/integration/test_device_row_jobs.py has whole jobs.
"""

import json
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.config import TableSection
from headrace.pserver.errors import StepTimedOut
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.protocol.table_operations import ForgetRow, FreezeSlot, UnfreezeSlot
from headrace.pserver.rows.digest import add
from headrace.pserver.rows.placed_rows import PlacedGradients
from headrace.pserver.server import step_calls
from headrace.pserver.server.commands import CountRows, DigestRows, Operate
from headrace.pserver.server.step_floats import StepFloats
from headrace.trainer.train.device_rows import placed_tables
from headrace.trainer.train.row_exchange import Devices, PeerShards, served_shard
from tests.contract import shards_world as w
from tests.contract.test_shards import batch
from tests.fakes.devices import DEVICES, environment_of
from tests.fakes.rendezvous import RendezvousHere
from tests.fakes.thread_ranks import Meeting, ThreadRanks
from tests.unit.test_device_rows import TABLES as SETTINGS

CPU = torch.device("cpu")
GROUPS = {"a": 1, "b": 2}
NUM_PASSES, STEPS = 3, 4
OF_PROCESSES = "as by default"
FEW = 200
"""Bytes of the device of each trainer for the rows of all tables: most have no room."""
OTHER = TableSection(dim=3, first_order=False, grad_scale="show", clip_norm=1.5)


def tables_of(name: str) -> dict[str, TableSection]:
    settings = {"dim": 4, "optimizer": {"kind": "adagrad", "initial": 0.1}} | SETTINGS[name] | {"slots": {}}
    return {"default": TableSection.model_validate(settings), "other": OTHER}


@contextmanager
def on_devices(world: int, tables, most: int | None, folder: Path):
    """A job whose trainers hold the rows: each rank's Shards, and its collectives."""
    meeting = Meeting(world)
    ranks = [ThreadRanks(rank, world, meeting) for rank in range(world)]
    with ExitStack() as held:
        floats = [held.enter_context(served(rank, world, tables, CPU, most, folder)) for rank in range(world)]
        shards = [
            held.enter_context(closing(peers(folder, tables, Devices(ranks[rank], CPU, floats[rank]))))
            for rank in range(world)
        ]
        yield w.World(shards)


def served(rank: int, world: int, tables, device: torch.device, most: int | None, folder: Path):
    """The shard of a trainer, and what they leave each other."""
    process = w.process(rank, world, world, tables, groups=GROUPS, socket=str(socket_of(folder, rank)))
    return served_shard(process, placed_tables(tables, device, most))


def peers(folder: Path, tables, devices: Devices) -> PeerShards:
    """The shards of all trainers, once they are served."""
    rank, world = devices.ranks.rank, devices.ranks.world
    addresses = [f"unix:{socket_of(folder, number)}" for number in range(world)]
    caller = ShardCaller(rank=rank, world=world, generation=1, secret=w.SECRET)
    return PeerShards(addresses, tables, caller, w.soon(), tables.keys(), devices)


def socket_of(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank}"


def batches_of(world: int, number: int):
    """By rank: one rank runs out of batches, and in the second pass one has none."""
    draw = np.random.default_rng(number)
    most = [0 if number == 2 and rank == 1 else STEPS - rank for rank in range(world)]
    signs = [[draw.choice(60, draw.integers(1, 25), replace=False).tolist() for _ in range(count)] for count in most]
    return [[batch(*each) for each in mine] for mine in signs]


def train(world, number: int, tables, place: torch.device | None):
    """A pass of all ranks: all that each rank read, and the digest of the close."""
    begun, batches = threading.Barrier(len(world.ranks)), batches_of(len(world.ranks), number)
    found = world.each(
        lambda rank, shards: pass_of(rank, shards, number, batches[rank], tables, lambda: begun.wait(60), place)
    )
    return [read for read, _ in found], add(int(digest, 16) for digest in found[0][1].values())


def pass_of(rank: int, shards, number: int, batches, tables, begun, place: torch.device | None):
    """A pass of one rank, whose second step is skipped. `begun`: ranks agree on each step before it begins. `place`:
    the device of gradients, if they are on one."""
    shards.open_pass(number, w.soon(), samples=100 * number)
    prepared = [shards.prepare(each, learn=True) for each in batches]
    rows = shards.pull(prepared[0], w.soon()) if prepared else {}
    begun()
    read = []
    for step in range(STEPS):
        mine, following = (prepared[at] if at < len(prepared) else None for at in (step, step + 1))
        read.append({name: bits(each) for name, each in rows.items()})
        gradients = None
        if mine is not None and step != 1:
            made = {
                name: w.push_of(keys, tables[name].num_weights, 1000 * number + 10 * rank + step)
                for name, keys in batches[step].items()
            }
            gradients = made if place is None else {name: there(push, place) for name, push in made.items()}
        rows = shards.exchange(step, mine, gradients, following, StepScale(64), w.soon()) or {}
    return read, shards.close_pass(number // 2, w.soon())


def bits(rows) -> list:
    return (rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows).view(np.uint32).tolist()


def there(push: Gradients, place: torch.device) -> PlacedGradients:
    none = np.empty((len(push.show_U), 0), np.float32)
    return PlacedGradients(none, push.show_U, push.click_U, torch.from_numpy(push.grads_UD).to(place))


def history(world, tables, place: torch.device | None):
    """All that ranks read in some passes, with operations between them, and how each pass ends."""
    found = []
    key = int(batch(1)["default"].keys_U[0])
    after = {1: [FreezeSlot(slot="a", table="default", group=1), ForgetRow(table="default", group=1, key=key)]}
    after[2] = [UnfreezeSlot(slot="a", table="default", group=1)]
    for number in range(1, 1 + NUM_PASSES):
        found.append(train(world, number, tables, place))
        world.one.call(Operate(number, after.get(number, [])), w.soon())
        seen = world.one.look({"default": w.keys(*range(60))}, w.soon())
        found.append((bits(seen["default"]), world.one.call(DigestRows(), w.soon())))
    return found


@pytest.mark.parametrize(("world", "memory"), [(2, None), (2, FEW), (3, FEW)])
@pytest.mark.parametrize("table", SETTINGS)
def test_rows_on_the_devices_of_trainers_have_the_bits_of_rows_on_a_shard(table, memory, world, tmp_path):
    tables = tables_of(table)
    with w.job(1, world, tables, groups=GROUPS) as on_shard:
        expected = history(on_shard, tables, None)
    with on_devices(world, tables, memory, tmp_path) as devices:
        assert history(devices, tables, CPU) == expected
        figures = devices.one.call(CountRows(), w.soon()).tables["default"].device
    assert figures is not None and (figures.num_apart > 0) == (memory is not None)


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_have_the_bits_of_rows_on_a_shard(device, tmp_path):
    """Their floats go by gloo, or by NCCL."""
    with w.job(1, 2, tables_of(OF_PROCESSES), groups=GROUPS) as on_shard:
        expected = [train(on_shard, number, tables_of(OF_PROCESSES), None)[0] for number in range(1, 1 + NUM_PASSES)]
        digests = on_shard.one.call(DigestRows(), w.soon())
    with RendezvousHere(tmp_path, "trainer-0", "trainer-1") as rendezvous:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.row_exchange_rank", str(rank), contact, device, str(tmp_path)],
                env=environment_of(rank),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
            for contact in [rendezvous.contact(f"trainer-{rank}").model_dump_json()]
        ]
        said = [process.communicate(timeout=200)[0] for process in processes]
    found = [json.loads(text.split("said ")[1]) for text in said]
    for rank, each in enumerate(found):
        assert each["read"] == json.loads(json.dumps([ranks[rank] for ranks in expected]))
        assert each["digests"] == digests


def test_a_shard_counts_the_steps_of_a_timeline_unless_it_is_in_a_trainer(tmp_path, monkeypatch):
    counted, tables = [], tables_of(OF_PROCESSES)
    monkeypatch.setattr(step_calls, "stepped", lambda: counted.append(1))
    with w.job(1, 2, tables, groups=GROUPS) as on_shard:
        train(on_shard, 1, tables, None)
    assert len(counted) == STEPS
    with on_devices(2, tables, None, tmp_path) as devices:
        train(devices, 1, tables, CPU)
    assert len(counted) == STEPS, "trainers count their own"


def test_a_trainer_waits_for_the_rows_of_all_ranks_and_no_longer_than_its_step():
    floats = StepFloats(2)
    floats.leave_rows(1, 0, 0, {})
    with pytest.raises(StepTimedOut, match=r"no answer for rank \[1\] in step 0"):
        floats.rows(1, 0, w.Deadline.after(0.01))
    floats.leave_rows(1, 0, 1, {"default": torch.zeros(3, 2)})
    assert [len(each) for each in floats.rows(1, 0, w.soon())] == [0, 1]
    assert floats.counts(1) == [{}, {"default": 3}] and floats.counts(2) == [{}, {}], "counts are of one pass"
