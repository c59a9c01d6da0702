"""A job whose certificates live for seconds goes on over many of their lives, with the bits of one machine."""

import pytest

from tests.integration.followed_job import FollowedJob, closes
from tests.machines.external_job import ExternalJob, object_store, setting

pytestmark = pytest.mark.long

LIFE_S = 24
"""A worker's first certificate is signed before its process starts, so a life must be longer than such a start, also
where other processes use the processors."""
SHORT_LIVES = f"""
from datetime import timedelta
from headrace.identity import certificates
certificates.LIFETIME = timedelta(seconds={LIFE_S})
from headrace.service.cli.main import main
main()
"""
"""A launcher, which signs all certificates, that lets them live for seconds."""
WORKERS = ("trainer-0", "shard-0", "shard-1")
NUM_PASSES = 4


def until_renewed(launcher, times):
    """Wait until the launcher has shown so many renewals of each worker; one comes after half of a life."""
    for name in WORKERS:
        launcher.until_often(f"the certificate of {name} of generation 1 of job 'small' is renewed", times)


def test_a_job_goes_on_over_several_lives_of_its_certificates(machines):
    head, other, disk = machines(3)
    followed = FollowedJob(head.tmp, NUM_PASSES)
    expected = followed.undisturbed()
    followed.follow()
    with (
        object_store(disk) as address,
        ExternalJob(head, address("long"), "commit.every_passes=1", trainers=1, shards=2) as job,
    ):
        token = job.token()
        launcher = job.start(head, "-c", SHORT_LIVES, "run", "job.toml", *setting(job.settings))
        launcher.until("waits for 3 of 3 workers")
        places = (head, "trainer"), (other, "shard"), (other, "shard")
        agents = [job.agent(machine, "--role", role, token=token) for machine, role in places]
        for number in range(1, NUM_PASSES + 1):
            until_renewed(launcher, number)
            followed.arrive(number)
        until_renewed(launcher, NUM_PASSES + 1)
        launcher.process.terminate()
        assert launcher.end() == 0, launcher.said
        assert [agent.end() for agent in agents] == [0] * 3
        assert closes(head.tmp / "store") == expected
        assert "was not renewed" not in job.said and "refused" not in job.said
