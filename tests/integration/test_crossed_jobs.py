"""A new job chooses crosses, and is from then on the job that has them in its file: the same bits after kills and in
reruns."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace.service.spec.job import load_job
from tests.fakes.warm import warm_environment
from tests.integration.stream_job import SPEC, headrace
from tests.jobs import changed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KILLS = 6
PLANTED = changed(SPEC, {"crosses.events": 3000, "passes.max_events": 1000, "train.matmul": "mkl"})


def write_planted(folder: Path) -> Path:
    """Clicks by what a and b say together."""
    random, taste = np.random.default_rng(2), np.random.default_rng(1).normal(size=(8, 8))
    with (folder / "part-0.txt").open("w") as text:
        for _ in range(3000):
            a, b = random.integers(8, size=2)
            click = int(random.random() < 1 / (1 + np.exp(-2 * taste[a, b])))
            text.write(f"2 0 0 1 {a} 1 {b} 1 {random.integers(50)} 1 {click} 1 {random.integers(40)}\n")
    job = folder / "job.toml"
    job.write_text(PLANTED)
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job that has chosen and trained without a death."""
    path = write_planted(tmp_path_factory.mktemp("whole"))
    run = headrace(path, timeout_s=400)
    assert run.code == 0, run.output
    return path, run


def test_the_choice_holds_for_the_life_of_the_job(whole):
    path, run = whole
    assert "crosses: a x b are chosen by 3,000 samples" in run.output
    chosen = json.loads((path.parent / "store" / "crosses.json").read_text())
    assert [each["of"] for each in chosen["pairs"]] == [["a", "b"]]
    rate = "{kind='adagrad', lr=0.24, initial=1.0}"
    table = f"tables.crosses={{dim=0, optimizer={rate}, first_order_optimizer={rate}, grad_scale='sum', in_batch=true}}"
    slots = [*load_job(path).raw["slots"], {"name": "crosses", "table": "crosses", "pairs": [["a", "b"]]}]
    by_hand = headrace(path, f"slots={toml(slots)}", table, store="by-hand", timeout_s=400)
    assert by_hand.report["digest"] == run.report["digest"]
    on_shards = headrace(path, "cluster={trainers=1, shards=2}", store="on-shards", timeout_s=400)
    assert on_shards.report["digest"] == run.report["digest"]
    plain = headrace(path, "crosses.choose=off", store="plain", timeout_s=400)
    assert plain.report["digest"] != run.report["digest"]
    assert not (path.parent / "plain" / "crosses.json").exists()
    (path.parent / "store" / "crosses.json").unlink()  # the log has it
    again = headrace(path, timeout_s=400)
    assert again.report["digest"] == run.report["digest"]
    assert "crosses:" not in again.output
    rerun = headrace(path, command="rerun", options=["--from", "0"], timeout_s=400)
    assert "3 of 3 passes are identical" in rerun.output


def toml(value) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}={toml(each)}' for key, each in value.items())}}}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def test_a_job_that_is_killed_again_and_again_has_the_same_bits(whole, tmp_path):
    path, draw = write_planted(tmp_path), Random(7)
    command = [sys.executable, "-m", "headrace.service", "run", str(path)]
    for _ in range(KILLS):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=warm_environment(),
        )  # fmt: skip
        time.sleep(draw.uniform(0.5, 12.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = headrace(path, timeout_s=400)
    assert run.code == 0, run.output
    assert run.report["digest"] == whole[1].report["digest"]
