"""The Host of a foreground run: the phase of its job follows the run's state to the end."""

import tomllib

import pytest

from headrace.service.jobs.foreground_host import foreground_host
from headrace.service.jobs.host import Phase
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import Status
from tests.integration.stream_job import SPEC


@pytest.fixture
def told():
    return {"state": "starting"}


@pytest.fixture
def host(tmp_path, told):
    with foreground_host(job_of(tomllib.loads(SPEC), tmp_path), lambda: Status(**told)) as host:
        yield host


def test_its_phase_follows_and_its_end_is_one(host, told):
    (job,) = host.jobs()
    phases = {"training": Phase.TRAINING, "draining": Phase.DRAINING, "done": Phase.ENDED, "failed": Phase.FAILED}
    for told["state"], phase in phases.items():
        assert host.job(job.name).phase is phase
