"""Jobs of shards to put the contract suite on: embedded, and as servers in threads of this process."""

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.deadline import Deadline
from headrace.identity.authority import Authority, open_authority
from headrace.identity.credentials import Credentials
from headrace.identity.peers import PeerName, PeerRole
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import Initial, ShardProcess, TableSection, Wire
from headrace.pserver.protocol.shards import Gradients, Keys, ShardCommitPart, Shards, StepScale
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.server.commands import SettleSnapshot, TakeSnapshot, WriteSnapshot
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.server.shard_server import ShardServer

SECRET, SEED = "a secret", 7
TABLES = {
    "default": TableSection(dim=4, init_range=0.5, optimizer=Adagrad(per="element"), grad_scale="sum"),
    "other": TableSection(dim=3, first_order=False, grad_scale="show", init=Initial.NORMAL, clip_norm=1.5),
}


@cache
def authority() -> Authority:
    with tempfile.TemporaryDirectory() as folder:
        return open_authority(Path(folder), "shards")


def credentials(role: PeerRole, number: int, generation: int = 1) -> Credentials:
    return authority().credentials(PeerName("shards", generation, role, number))


def identity(rank: int) -> Credentials:
    return credentials(PeerRole.TRAINER, rank)


class OverTls(int):
    """A number of shards that listen as between machines: mutual TLS and CURVE, at loopback."""

    def __repr__(self) -> str:
        return f"{int(self)}-over-tls"


class Narrow(int):
    """A number of shards whose rows and gradients travel as bfloat16."""

    def __repr__(self) -> str:
        return f"{int(self)}-bfloat16"


def soon() -> Deadline:
    return Deadline.after(60)


@dataclass
class World:
    """The clients of every rank of one job."""

    ranks: Sequence[Shards]
    wire: Wire = Wire.FLOAT32

    @property
    def one(self) -> Shards:
        return self.ranks[0]

    def each(self, act: Callable[[int, Shards], Any]) -> list[Any]:
        """What `act` gives for each rank, all at the same time; the first error is raised."""
        results: list[Any] = [None] * len(self.ranks)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = act(rank, self.ranks[rank])
            except Exception as error:  # noqa: BLE001  # raised again below, in the test's thread
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def process(
    shard: int, num_shards: int, num_ranks: int, tables: Mapping[str, TableSection], **more: Any
) -> ShardProcess:
    return ShardProcess.model_validate(
        {
            "shard": shard,
            "num_shards": num_shards,
            "num_ranks": num_ranks,
            "tables": {name: section.model_dump(mode="json") for name, section in tables.items()},
            "seed": SEED,
            "secret": SECRET,
            **more,
        }
    )


def client(servers: Sequence[ShardServer], rank: int, num_ranks: int, tables=TABLES, **more: Any) -> RemoteShards:
    return remote([server.address for server in servers], tables, rank=rank, world=num_ranks, **more)


def remote(addresses: Sequence[str], tables=TABLES, *, deadline: Deadline | None = None, **caller: Any) -> RemoteShards:
    """The client of a rank: of the first of one, unless `caller` says otherwise."""
    me = ShardCaller(**{"rank": 0, "world": 1, "generation": 1, "secret": SECRET, **caller})
    return RemoteShards(addresses, tables, me, deadline or soon())


@contextmanager
def job(
    num_shards: int,
    num_ranks: int = 1,
    tables: Mapping[str, TableSection] = TABLES,
    live: Path | None = None,
    **more: Any,
):
    """A World of `num_shards` shards, 0: embedded; with `live`, they can commit.

    Every second shard listens at a port, the others at sockets; those of OverTls at a port, as between machines.
    """
    wire = more.pop("wire", Wire.BFLOAT16 if isinstance(num_shards, Narrow) else Wire.FLOAT32)
    with ExitStack() as stack:
        if num_shards == 0:
            assert num_ranks == 1
            ranks: list[Shards] = [EmbeddedShards(ShardProcess.alone(tables, SEED, live=live, wire=wire, **more), 2)]
        else:
            homes = [None if live is None else str(live / f"shard-{s}") for s in range(num_shards)]
            more |= {"wire": wire}
            configs = [process(s, num_shards, num_ranks, tables, live=homes[s], **more) for s in range(num_shards)]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sockets = [None if s % 2 else folder / f"shard-{s}.socket" for s in range(num_shards)]
            tls = isinstance(num_shards, OverTls)
            if tls:
                configs = [
                    config.model_copy(update={"credentials": credentials(PeerRole.SHARD, config.shard)})
                    for config in configs
                ]
            size = {"max_message_bytes": more["max_message"]} if "max_message" in more else {}
            servers = [stack.enter_context(ShardServer(*each)) for each in zip(configs, sockets, strict=True)]
            ranks = [
                client(servers, rank, num_ranks, tables, identity=identity(rank) if tls else None, wire=wire, **size)
                for rank in range(num_ranks)
            ]
        for shards in ranks:
            stack.callback(shards.close)
        yield World(ranks, wire)


def keys(*signs: int, group: int = 1) -> Keys:
    """Keys with bits in every place, as the mix of signs has."""
    mixed = np.array([(sign + 1) * 0x9E3779B97F4A7C15 % 2**64 for sign in signs], np.uint64)
    mixed ^= mixed >> np.uint64(29)
    return Keys(mixed, np.full(len(signs), group, np.uint16))


def push_of(batch_keys: Keys, dim: int, seed: int, clicks: bool = True) -> Gradients:
    """Gradients that differ by seed, and counts as a batch would have them."""
    draw = np.random.default_rng(seed)
    count = len(batch_keys.keys_U)
    show_U = draw.integers(1, 5, count).astype(np.float32)
    click_U = np.minimum(show_U, draw.integers(0, 3, count)).astype(np.float32) * clicks
    return Gradients(draw.normal(size=(count, dim)).astype(np.float32), show_U, click_U)


def train(
    shards: Shards, pass_number: int, batches: Sequence[Mapping[str, Keys]], *, seed: int, steps: int, day: int = 0
):
    """One pass as a trainer's rank runs it; returns the rows of every batch, and the digests of the close."""
    shards.open_pass(pass_number, soon())
    prepared = [shards.prepare(batch, learn=True) for batch in batches]
    rows = [shards.pull(prepared[0], soon())] if batches else []
    for step in range(steps):
        mine = prepared[step] if step < len(prepared) else None
        following = prepared[step + 1] if step + 1 < len(prepared) else None
        gradients = None
        if mine is not None:
            gradients = {
                name: push_of(k, rows[step][name].shape[1], seed * 1000 + step) for name, k in batches[step].items()
            }
        answer = shards.exchange(step, mine, gradients, following, StepScale(64), soon())
        assert (answer is None) == (following is None)
        if answer is not None:
            rows.append(answer)
    return rows, shards.close_pass(day, soon())


def commit(shards: Shards, folder: Path, version: int) -> list[ShardCommitPart]:
    """All that a rank 0 asks of the shards for a commit that succeeds."""
    shards.call(TakeSnapshot(version), soon())
    folder.mkdir(parents=True)
    parts = shards.call(WriteSnapshot(folder), soon())
    shards.call(SettleSnapshot(True), soon())
    return parts
