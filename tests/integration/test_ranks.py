"""Collectives of trainers: messages arrive, and sums have one order, in real processes over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.lifecycle import ExitCode
from headrace.trainer.collectives.ranks import SingleRank, gather_messages
from tests.fakes.rendezvous import RendezvousHere

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np, torch
from headrace.launcher_contact import LauncherContact
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import TorchRanks, gather_messages

rank, world, folder, contact = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
store = meet_trainers(RendezvousClient(LauncherContact(**contact)), rank, world, {}, "lo", 60.0)
ranks = TorchRanks(rank, world, store, "lo", torch.device("cpu"), 60.0)
rng = np.random.default_rng(rank)
flat = torch.from_numpy(rng.normal(size=2_500_000).astype(np.float32))
ranks.all_reduce(flat)()
heard = gather_messages(ranks, {"rank": rank, "text": "x" * rank})
chiefs = torch.from_numpy(rng.integers(0, 256, 1_500_000).astype(np.uint8))
ranks.copy_from_rank_0(chiefs)
columns = ranks.gather({"a": np.arange(rank, dtype=np.float32), "b": np.full(2, rank, np.uint64)})

def meet():
    # as at the end of passes: nobody goes on before all are there
    for number in range(3):
        (folder / f"met-{number}-{rank}").touch()
        ranks.meet()
        if not all((folder / f"met-{number}-{other}").exists() for other in range(world)):
            return False
    return True

said = {
    "sum": ranks.sum(np.array([rank, 1])).tolist(),
    "floats": ranks.sum_floats(np.array([0.1 * (rank + 1)])).tolist(),
    "flat": float(flat.double().sum()), "bits": flat.numpy().tobytes().hex()[:64],
    "chiefs": int(chiefs.long().mul(torch.arange(len(chiefs))).sum()),
    "heard": heard,
    "columns": None if columns is None else [{k: v.tolist() for k, v in c.items()} for c in columns],
    "word": ranks.broadcast({"go": 3} if rank == 0 else None),
    "lengths": [
        len(ranks.broadcast({"text": "x" * length} if rank == 0 else None)["text"]) for length in (1004, 1005, 9999)
    ],
    "empty": (lambda found: None if found is None else [len(each["a"]) for each in found])(
        ranks.gather({"a": np.zeros(0, np.int64)})
    ),
    "met": meet(),
}
(folder / f"{rank}.json").write_text(json.dumps(said))
ranks.close()
"""


def contact_of(rendezvous: RendezvousHere, rank: int) -> str:
    return rendezvous.contact(f"trainer-{rank}").model_dump_json()


def meet(world: int, folder: Path) -> list[dict]:
    folder.mkdir()
    with RendezvousHere(folder, *(f"trainer-{rank}" for rank in range(world))) as rendezvous:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), str(world), str(folder), contact_of(rendezvous, rank)]
            )
            for rank in range(world)
        ]
        assert [process.wait(timeout=90) for process in processes] == [0] * world
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.long
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trainers_receive_the_same_and_sum_in_one_order_at_every_run(world, tmp_path):
    first, again = meet(world, tmp_path / "first"), meet(world, tmp_path / "again")
    assert first == again
    for said in first:
        assert said["sum"] == [sum(range(world)), world]
        assert said["bits"] == first[0]["bits"] and said["flat"] == first[0]["flat"]
        assert said["floats"] == first[0]["floats"]
        assert said["chiefs"] == first[0]["chiefs"]
        assert said["word"] == {"go": 3} and said["met"]
        assert said["lengths"] == [1004, 1005, 9999], "one that just fits, one that is a byte longer, a long one"
    assert first[0]["heard"] == [{"rank": rank, "text": "x" * rank} for rank in range(world)]
    assert first[0]["columns"] == [{"a": list(map(float, range(r))), "b": [r, r]} for r in range(world)]
    assert first[0]["empty"] == [0] * world
    assert first[1]["heard"] is None and first[1]["columns"] is None


LEFT = """
import json, sys
from contextlib import closing
import numpy as np, torch
from headrace.launcher_contact import LauncherContact
from headrace.lifecycle import exit_code_of
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import TorchRanks

rank, contact = int(sys.argv[1]), LauncherContact(**json.loads(sys.argv[2]))

def main():
    store = meet_trainers(RendezvousClient(contact), rank, 2, {}, "lo", 60.0)
    ranks = TorchRanks(rank, 2, store, "lo", torch.device("cpu"), 60.0)
    with closing(ranks):
        ranks.sum(np.array([rank]))
        if rank == 1:
            print("up", flush=True)
            sys.stdin.read()
        ranks.%s

sys.exit(exit_code_of(main))
"""


@pytest.fixture
def rendezvous(tmp_path):
    with RendezvousHere(tmp_path, "trainer-0", "trainer-1") as rendezvous:
        yield rendezvous


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        "sum(np.array([1]))",
        "all_reduce(torch.ones(5))()",
        "broadcast({})",
        "copy_from_rank_0(torch.ones(5))",
        "gather({})",
    ],
)
def test_a_trainer_whose_peer_is_killed_reports_it_in_one_line_and_may_be_restarted(call, rendezvous):
    left, killed = (
        subprocess.Popen(
            [sys.executable, "-c", LEFT % call, str(rank), contact_of(rendezvous, rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    )  # fmt: skip
    with left, killed:
        assert killed.stdout.readline() == "up\n"
        killed.kill()
        _, said = left.communicate(timeout=60)
    assert left.returncode == ExitCode.RETRY, said
    assert "error: trainer 0 lost touch with the other trainers: one is gone, or too slow" in said
    assert "Traceback" not in said


def test_one_trainer_alone_behaves_the_same():
    alone = SingleRank()
    assert alone.sum(np.array([3])).tolist() == [3]
    assert gather_messages(alone, {"a": 1}) == [{"a": 1}]
    assert alone.broadcast({"go": 1}) == {"go": 1}
