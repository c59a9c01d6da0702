"""Workers that were taken for dead and continue beside their successors are refused everywhere and change nothing.

They are stopped, their launcher is told that they died, and they go on once the next generation has trained a pass.
"""

import pytest

from headrace.service.faults.deaths import EVERYBODY, AtInstant
from headrace.service.faults.injection import Deaths, run
from tests.faults.test_kills import assert_nothing_left, job_at, report, said_by
from tests.integration.stream_job import write_job

REPLACED = 75
NOT_ASKED = None
"""A shard serves callers of its generation, and ends with its launcher."""


def undisturbed(folder, trainers, shards):
    job = job_at(folder, "calm", trainers, shards)
    deaths = Deaths(job.store, iter([]))
    assert run(job, deaths, said_by([])).code == 0
    return deaths.closes, report(job.store)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.02, marks=pytest.mark.slow)])
def test_an_old_rank0_with_an_embedded_shard_is_superseded(tmp_path, delay_s):
    write_job(tmp_path, num_lines=300)
    closes, told = undisturbed(tmp_path, 1, 0)
    deaths, job = stopping(tmp_path, 1, 0, AtInstant("trainer-0", 4, delay_s, stopped=True))
    assert deaths.closes == closes
    assert report(job.store) == told
    [died] = deaths.died
    assert died.old_codes == {"trainer-0": REPLACED}, last_words(deaths)
    assert "generation 2 of the workers has claimed this job" in "\n".join(died.old["trainer-0"].lines)
    assert_nothing_left(job.store, generation=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_old_workers_change_nothing_one_by_one_and_all_together(tmp_path):
    write_job(tmp_path, num_lines=300)
    closes, told = undisturbed(tmp_path, 2, 2)
    who = ["trainer-0", "trainer-1", "shard-1", EVERYBODY]
    deaths, job = stopping(tmp_path, 2, 2, *(AtInstant(worker, 3, 0.0, stopped=True) for worker in who))
    assert deaths.closes == closes
    assert report(job.store) == told
    alone, together = [died.old_codes for died in deaths.died[:3]], deaths.died[3].old_codes
    assert alone == [{"trainer-0": REPLACED}, {"trainer-1": REPLACED}, {"shard-1": NOT_ASKED}], last_words(deaths)
    everybody = {"trainer-0": REPLACED, "trainer-1": REPLACED, "shard-0": NOT_ASKED, "shard-1": NOT_ASKED}
    assert together == everybody, last_words(deaths)
    assert "generation 5 of the workers has claimed this job" in "\n".join(deaths.died[3].old["trainer-0"].lines)
    assert_nothing_left(job.store, generation=5)


def stopping(folder, trainers, shards, *planned):
    job, said = job_at(folder, "stopped", trainers, shards), []
    deaths = Deaths(job.store, iter(planned))
    outcome = run(job, deaths, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert [died.death for died in deaths.died] == list(planned)
    assert not deaths.unasked
    return deaths, job


def last_words(deaths):
    return [(died.death, name, list(child.lines)) for died in deaths.died for name, child in died.old.items()]
