"""Jobs with rows on the devices of trainers whose launcher is killed: they go on, with other numbers of trainers, too.

Passes that were logged before a kill are trained again by as many trainers as then. A rerun of the whole log has the
digests of every close. Deaths of trainers are in tests/faults/test_kills.py; `campaign` here, with
`python -m tests.faults.test_device_rows_killed KILLS SEED`, is for as many kills as wanted.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.fakes.warm import warm_environment
from tests.integration.stream_job import headrace, write_living_job
from tests.integration.test_device_row_jobs import DEVICE, LITTLE, SPEC

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KEEP_ALL = 'commit={every="600s",every_passes=2,keep=1000}'
"""A rerun needs the whole log."""
LIMIT_S = 300.0


def on(world: int, *settings: str) -> tuple[str, ...]:
    """The settings of so many trainers: on the host with one shard, on devices with one in each."""
    inside = 0 if world == 1 else world
    shards = inside if DEVICE in settings else 1
    return (f"cluster={{trainers={world},shards={shards}}}", "train.threads=1", KEEP_ALL, *settings)


def num_closes(store: Path) -> int:
    return len(JobHistory.of(read(store / "log")).closes) if (store / "log").exists() else 0


def killed_launcher(job: Path, store: Path, settings: Sequence[str], closes: int, delay_s: float) -> bool:
    """Run a job, and kill -9 its launcher `delay_s` after so many new closes; False if it ended before."""
    words = [word for each in (*settings, f"store.path={store}") for word in ("--set", each)]
    command = [sys.executable, "-m", "headrace.service", "run", str(job), *words]
    before, until_s = num_closes(store), time.monotonic() + LIMIT_S
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=warm_environment()
    ) as process:
        try:
            while process.poll() is None and num_closes(store) < before + closes:
                assert time.monotonic() < until_s, "no pass is closed"
                time.sleep(0.02)
            time.sleep(delay_s)
            ended = process.poll() is not None
        finally:
            process.kill()
    return not ended


def check_killed(
    job: Path, store: Path, ways: Sequence[tuple[str, ...]], draw: random.Random, events: int, most_s: float = 0.0
) -> int:
    """Run a job each way in turn, with a kill in all but the last, up to `most_s` after a close; how many kills came
    before its end."""
    kills = sum(killed_launcher(job, store, way, draw.randint(1, 2), draw.uniform(0, most_s)) for way in ways[:-1])
    ended = headrace(job, *ways[-1], store=str(store), timeout_s=LIMIT_S)
    assert ended.code == 0, ended.output
    assert (ended.report["events"], ended.report["samples"]) == (events, events)
    again = headrace(job, *ways[-1], store=str(store), command="rerun", options=("--from", "0"), timeout_s=LIMIT_S)
    assert again.code == 0, again.output
    return kills


def test_a_killed_job_goes_on_with_another_number_of_trainers_and_without_devices(tmp_path):
    """The stream has twice as many passes as are awaited, so that a slow look at the log finds it before its end."""
    job = write_living_job(tmp_path, num_parts=1, num_lines=960, spec=SPEC)
    ways = [on(2, DEVICE, LITTLE), on(3, DEVICE), on(2), on(1, DEVICE)]
    assert check_killed(job, tmp_path / "store", ways, random.Random(1), 960) == 3


def campaign(kills: int, seed: int) -> None:
    """Kill launchers, of jobs with one to three trainers, so many times in each number; print the counts."""
    draw, found = random.Random(seed), Counter[str]()
    folder = Path(tempfile.mkdtemp())
    job = write_living_job(folder, num_parts=2, num_lines=480, spec=SPEC)
    for number in range(1000):
        if min(found[f"killed with {world} trainers on devices"] for world in (1, 2, 3)) >= kills:
            break
        worlds = draw.sample((1, 2, 3), 3)
        ways = [on(world, DEVICE, *draw.choice([(), (LITTLE,)])) for world in worlds]
        ways.append(on(draw.choice((1, 2, 3)), *draw.choice([(), (DEVICE,)])))
        num = check_killed(job, folder / f"store-{number}", ways, draw, 960, 0.4)
        found.update(f"killed with {world} trainers on devices" for world in worlds[:num])
        found["jobs with every close as in a rerun"] += 1
        print(f"seed {seed}", dict(found), flush=True)


if __name__ == "__main__":
    campaign(int(sys.argv[1]), int(sys.argv[2]))
