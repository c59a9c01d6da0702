"""What a Ray cluster lacks for a generation, in words; and the bundles that are asked for."""

from pathlib import Path

import pytest

from headrace.service.cluster.ray_launcher import GIB, Node, WorkerNeeds, missing
from headrace.service.cluster.runtime import Resources, WorkerRole, WorkerSpec

HERE, AT = "10.0.0.1", "10.0.0.1:6379"


def need(worker, cores=1.0, memory=0, gpus=0, here=False):
    return WorkerNeeds(worker=worker, agent="a", cores=cores, memory_bytes=memory, gpus=gpus, here=here)


def node(address, cores, gpus=0, memory=8 * GIB):
    return Node(address, {"CPU": cores, "GPU": gpus, "memory": memory, f"node:{address}": 1.0})


TWO = [node(HERE, 2.0), node("10.0.0.2", 2.0)]


@pytest.mark.parametrize(
    ("needs", "free", "words"),
    [
        (
            [need("trainer-0"), need("trainer-1"), need("shard-0")],
            {"CPU": 1.0, "memory": GIB},
            f"2 more cores on the Ray cluster at {AT}, which has 4 cores (1 free) on 2 nodes",
        ),
        (
            [need("trainer-0", gpus=1)],
            {"CPU": 4.0},
            f"1 more GPU on the Ray cluster at {AT}, which has no GPUs on 2 nodes",
        ),
        (
            [need("trainer-0", 4.5, memory=3 * GIB)],
            {"CPU": 4.0, "memory": 1.5 * GIB},
            f"0.5 more cores and 1.5 more GiB of memory on the Ray cluster at {AT}, which has 4 cores (4 free) and "
            "16.0 GiB of memory (1.5 free) on 2 nodes",
        ),
        (
            [need("trainer-0", 3.0)],
            {"CPU": 4.0},
            f"3 cores for trainer-0 on one node of the Ray cluster at {AT}, which has 10.0.0.1: 2 cores, no GPUs, "
            "8.0 GiB of memory; 10.0.0.2: 2 cores, no GPUs, 8.0 GiB of memory",
        ),
        (
            [need("trainer-0"), need("shard-0", 1.5), need("shard-1", 1.5)],
            {"CPU": 4.0},
            f"3 places on the Ray cluster at {AT}: enough is free, but not together on single nodes",
        ),
    ],
)
def test_what_is_missing_is_told_with_what_there_is(needs, free, words):
    assert missing(needs, TWO, free, HERE, AT) == words


def test_rank_0_needs_room_at_the_machine_of_the_launcher():
    nodes = [node(HERE, 1.0), node("10.0.0.2", 8.0)]
    told = missing([need("trainer-0", 2.0, here=True)], nodes, {"CPU": 9.0}, HERE, AT)
    assert told.startswith(f"2 cores for trainer-0 on this machine ({HERE}) of the Ray cluster at {AT}, which has ")


def test_a_bundle_has_what_the_worker_needs_and_rank_0_is_bound_to_this_node():
    spec = WorkerSpec(
        role=WorkerRole.TRAINER,
        number=0,
        command=(),
        config={},
        folder=Path("/"),
        run_folder=Path("/"),
        resources=Resources(cores=2.0, memory_bytes=GIB, gpus=1),
    )
    needs = WorkerNeeds.of(spec, "an agent", here=True)
    assert WorkerNeeds(**needs.as_json()) == needs
    assert needs.bundle(HERE) == {"CPU": 2.0, "GPU": 1.0, "memory": float(GIB), f"node:{HERE}": 0.001}
    assert need("shard-0").bundle(HERE) == {"CPU": 1.0}
