"""Sums of dense gradients on processes joined by gloo or NCCL: buckets decide the order of a sum, and little else.

On threads (test_bucket_sums) sums are in rank order whatever the bucket. One process a rank makes all worlds.
"""

import json
import subprocess
import sys

import pytest

from tests.contract.sums_rank import BUCKETS, SETTINGS, WORLDS
from tests.fakes.devices import DEVICES, environment_of
from tests.fakes.rendezvous import RendezvousHere

pytestmark = pytest.mark.long

TOLERANCE = 1e-6
OF_WORLDS = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture(scope="module", params=DEVICES)
def said(request, tmp_path_factory):
    """By world: of each rank by setting."""
    most = max(WORLDS)
    with RendezvousHere(tmp_path_factory.mktemp("sums"), *(f"trainer-{rank}" for rank in range(most))) as rendezvous:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.sums_rank", str(rank), str(most), contact, request.param],
                env=environment_of(rank),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(most)
            for contact in [rendezvous.contact(f"trainer-{rank}").model_dump_json()]
        ]
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * most
    lines = [next(line for line in text.splitlines() if line.startswith("said ")) for text in outputs]
    by_rank = [json.loads(line.removeprefix("said ")) for line in lines]
    return {world: [each[str(world)] for each in by_rank[:world]] for world in WORLDS}


@OF_WORLDS
@pytest.mark.parametrize("bucket", BUCKETS)
def test_sums_beside_the_backward_pass_have_the_same_bits(said, world, bucket):
    assert len({each[name]["bits"] for each in said[world] for name in (bucket, f"{bucket} beside")}) == 1


@OF_WORLDS
def test_buckets_of_any_size_agree_within_rounding(said, world):
    assert all(each[name]["apart"] <= TOLERANCE for each in said[world] for name in SETTINGS)
    assert all(each["merged"]["learnt"] > 1000 * TOLERANCE for each in said[world])
    orders = {said[world][0][name]["bits"] for name in BUCKETS}
    assert (len(orders) == 1) == (world <= 2), "from three ranks on a bucket decides in which order it is summed"


@OF_WORLDS
def test_integers_have_the_same_bits_in_buckets_of_any_size_and_beside_the_backward_pass(said, world):
    assert len({each[name]["integers"] for each in said[world] for name in SETTINGS}) == 1


@OF_WORLDS
def test_ranks_learn_what_one_learns_that_merges_as_many_batches(said, world):
    """Batches are uneven, and so are the weights of their samples."""
    assert all(each["merged"]["apart"] <= TOLERANCE for each in said[world])


@OF_WORLDS
def test_an_average_after_every_step_of_sgd_is_a_sum_of_gradients(said, world):
    assert all(each["local"]["apart"] <= TOLERANCE for each in said[world])
    assert len({each["local"]["bits"] for each in said[world]}) == 1
