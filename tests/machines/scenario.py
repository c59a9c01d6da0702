"""Processes of a test machine: a shard, or a trainer that calls shards, told by a line of JSON what to be.

They do what they are asked on standard input, one word a line, answer each with one line of JSON, and end with it.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from subprocess import Popen
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.identity.authority import Authority
from headrace.identity.credentials import Credentials
from headrace.identity.peers import PeerName, PeerRole
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.rows.digest import add
from headrace.pserver.server import shard_server
from headrace.pserver.server.commands import CountRows, DigestRows
from headrace.pserver.server.shard_server import ShardServer
from headrace.rpc import refusals
from tests.contract import shards_world as w
from tests.machines.network import Machine

ANSWER = "answer "
"""Before each answer; other lines are the log."""
JOB = "shards"
NUM_KEYS = 40_000
"""Of each step of `pushed`: messages of more than 64 KiB."""


class Process:
    """One process of this module, on a machine."""

    def __init__(self, process: Popen[str], what: dict[str, Any]) -> None:
        self._process, self.log = process, list[str]()
        self.first = self.ask(json.dumps(what))
        """Its first answer: where it listens, or whether it is connected."""

    def ask(self, word: str) -> Any:
        """The answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
            self.log.append(line)
        raise AssertionError(f"it has ended: {''.join(self.log)}")


@contextmanager
def running(machine: Machine, what: dict[str, Any]) -> Iterator[Process]:
    """A process of this module on `machine`; `what` is for `shard` or `trainer` below."""
    child = machine.python("-m", "tests.machines.scenario")
    try:
        yield Process(child, what)
    finally:
        child.kill()
        child.communicate()


def shard_of(authority: Authority, number: int, num_shards: int, generation: int = 1, port: int = 0) -> dict[str, Any]:
    """Tells a process to be a shard."""
    name = PeerName(JOB, generation, PeerRole.SHARD, number)
    more = {"interface": "eth0", "credentials": authority.credentials(name).model_dump(), "generation": generation}
    return {"be": "shard", "where": [number, num_shards, 1], "port": port, "more": more}


def trainer_of(authority: Authority, addresses: list[str], generation: int = 1, rank: int = 0) -> dict[str, Any]:
    """Tells a process to be a trainer."""
    name = PeerName(JOB, generation, PeerRole.TRAINER, rank)
    return {
        "be": "trainer",
        "addresses": addresses,
        "generation": generation,
        "credentials": authority.credentials(name).model_dump(),
    }


def trained(shards: Shards) -> dict[str, Any]:
    """Train two passes of the contract suite; digests of rows and of closes."""
    closes = []
    for number, day in ((1, 0), (2, 3)):
        draw = np.random.default_rng(number)
        signs = [draw.choice(60, 25, replace=False).tolist() for _ in range(4)]
        batches = [{"default": w.keys(*each), "other": w.keys(*each, group=2)} for each in signs]
        _, close = w.train(shards, number, batches, seed=number, steps=4, day=day)
        closes.append(str(add(int(digest, 16) for digest in close.values())))
    return {
        "rows": {name: str(digest) for name, digest in shards.call(DigestRows(), w.soon()).items()},
        "closes": closes,
    }


def pushed(shards: Shards) -> dict[str, Any]:
    """Train a pass of large steps; the traffic with each shard, as both ends count it."""
    batches = [{"default": w.keys(*range(step, step + NUM_KEYS))} for step in range(6)]
    w.train(shards, 1, batches, seed=1, steps=len(batches))
    figures = shards.call(CountRows(), w.soon()).figures
    return {"trainer": shards.links(), "shards": [each.links for each in figures]}


def _shard(what: dict[str, Any]) -> None:
    more = {**what["more"], "credentials": Credentials(**what["more"]["credentials"])}
    endpoint = shard_server._endpoint
    shard_server._endpoint = lambda config, identity: replace(endpoint(config, identity), port=what["port"])
    with ShardServer(w.process(*what["where"], w.TABLES, **more)) as server:
        data = server._servicer._listener.address
        _serve(server.address, {"refused": refusals.PROCESS.counts, "data": lambda: [data.address, data.key]})


def _trainer(what: dict[str, Any]) -> None:
    identity = Credentials(**what["credentials"])
    client = w.remote(what["addresses"], generation=what["generation"], identity=identity)

    def refused() -> dict[str, int]:
        return dict(client.call(CountRows(), w.soon()).refused)

    _serve("connected", {"train": lambda: trained(client), "refused": refused, "push": lambda: pushed(client)})
    client.close()


def _serve(first: Any, words: dict[str, Callable[[], Any]]) -> None:
    _say(first)
    for line in sys.stdin:
        try:
            _say(words[line.strip()]())
        except HeadraceError as error:
            _say(f"{type(error).__name__}: {error}")


def _say(answer: Any) -> None:
    print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    what = json.loads(sys.stdin.readline())
    try:
        {"shard": _shard, "trainer": _trainer}[what["be"]](what)
    except HeadraceError as error:
        _say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
