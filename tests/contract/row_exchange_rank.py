"""One of two trainers that have rows on their devices, as a process of tests/contract/test_row_exchange.py."""

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from headrace.launcher_contact import LauncherContact
from headrace.pserver.server.commands import DigestRows
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import TorchRanks
from headrace.trainer.train.row_exchange import Devices
from tests.contract import shards_world as w
from tests.contract import test_row_exchange as suite


def main(rank: int, contact: str, device: torch.device, folder: Path) -> None:
    torch.set_num_threads(1)
    tables, world = suite.tables_of(suite.OF_PROCESSES), 2
    with suite.served(rank, world, tables, device, suite.FEW, folder) as floats:
        client = RendezvousClient(LauncherContact(**json.loads(contact)))
        store = meet_trainers(client, rank, world, {}, "lo", 60.0)
        with (
            closing(TorchRanks(rank, world, store, "lo", device, 60.0)) as ranks,
            closing(suite.peers(folder, tables, Devices(ranks, device, floats))) as shards,
        ):

            def meet() -> None:
                ranks.sum(np.zeros(1, np.int64))

            read = [
                suite.pass_of(rank, shards, number, suite.batches_of(world, number)[rank], tables, meet, device)[0]
                for number in range(1, 1 + suite.NUM_PASSES)
            ]
            print("said " + json.dumps({"read": read, "digests": shards.call(DigestRows(), w.soon())}), flush=True)
            meet()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3]), Path(sys.argv[4]))
