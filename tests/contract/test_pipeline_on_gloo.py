"""A model divided into stages equals the whole model, and itself on any number of ranks: processes joined by gloo."""

import json
import subprocess
import sys

import pytest

from tests.contract.stages_rank import SETTINGS
from tests.fakes.rendezvous import RendezvousHere

pytestmark = pytest.mark.long

TOLERANCE = 1e-6
TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-10, "off": TOLERANCE}
"""By types of operations: the whole model sums its first layer over parts of its input, each rounded for itself."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By rank, number of ranks and setting."""
    folder = tmp_path_factory.mktemp("stages")
    with RendezvousHere(folder, *(f"trainer-{rank}" for rank in range(4))) as rendezvous:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.stages_rank", str(rank), "4", contact, str(folder)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
            for contact in [rendezvous.contact(f"trainer-{rank}").model_dump_json()]
        ]
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    return [json.loads(next(line for line in text.splitlines() if line.startswith("said "))[5:]) for text in outputs]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_stages_compute_what_the_whole_model_computes(said, world, name):
    ranks = [said[rank][str(world)][name] for rank in range(world)]
    most = TOLERANCES[SETTINGS[name].amp]
    assert all(worst <= most for each in ranks for worst in each["worst"].values()), ranks
    assert ranks[0]["names"] and ranks[0]["commit"] <= (TOLERANCE if most == TOLERANCE else 0.02)  # four steps of Adam
    assert len({each["digest"] for each in ranks}) == 1


def test_no_bit_depends_on_ranks_or_schedule(said):
    by_setting = {name: {said[0][str(world)][name]["digest"] for world in (1, 2, 3, 4)} for name in SETTINGS}
    assert all(len(digests) == 1 for digests in by_setting.values())
    assert by_setting["gpipe"] == by_setting["1f1b"] == by_setting["recompute"] == by_setting["one block"]
    assert by_setting["amp"] == by_setting["amp, recompute"]
    assert len({digest for digests in by_setting.values() for digest in digests}) == 4
    assert len({each[str(world)]["one"]["fresh"] for world in (2, 3, 4) for each in said[:world]}) == 1


def test_every_rank_but_the_first_holds_its_own_weights_alone(said):
    for world in (2, 3, 4):
        whole = said[0][str(world)]["one"]["model_bytes"]
        first, *others = (said[rank][str(world)]["one"]["weight_bytes"] for rank in range(world))
        assert first >= whole
        assert all(0 < part < whole / 2 for part in others) or world == 2 and 0 < others[0] < whole


def test_more_ranks_send_more(said):
    assert 0 < said[0]["2"]["sent"]
    assert sum(each["2"]["sent"] for each in said[:2]) < sum(each["4"]["sent"] for each in said)
