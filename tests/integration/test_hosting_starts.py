"""Launchers that never train: the status of a job that cannot start, or whose launcher dies at once."""

import time

import pytest

from headrace.service.auth.config import AllowSection
from headrace.service.jobs.config import LimitsSection, ServiceConfig
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import Action, NewJob, Phase
from headrace.service.jobs.local_host import host_jobs
from tests.integration.hosted_service import spec_of

WITHIN_S = 60


def config_of(folder, command="cat", **limits):
    allow = AllowSection(pipe_commands=[(command,)], roots=(str(folder / "data"),))
    return ServiceConfig(root=folder / "root", allow=allow, limits=LimitsSection(**limits))


def until(host, *phases):
    end_s = time.monotonic() + WITHIN_S
    while (job := host.job("one")).phase not in phases:
        assert time.monotonic() < end_s, job
        time.sleep(0.05)
    return job


def test_a_store_that_cannot_be_used_is_told_of_and_not_tried_again(tmp_path):
    store = tmp_path / "data" / "store"
    store.mkdir(parents=True)
    with host_jobs(config_of(tmp_path)) as host:
        host.create(NewJob(spec=spec_of(store={"path": str(store)}), name="one", start=False), "ann")
        (store / "mine").touch()
        host.act("one", Action.RESUME, "ann")
        job = until(host, Phase.FAILED)
        assert job.outcome.code == 2 and "is not empty and no store of Headrace" in job.outcome.reason
        assert host.status("one").state == "failed"
    assert [path.name for path in store.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_launcher_that_dies_too_often_is_given_up_until_somebody_asks_again(tmp_path):
    with host_jobs(config_of(tmp_path, max_restarts=0)) as host:
        host.create(NewJob(spec=spec_of(), name="one"), "ann")
        folder = JobFolder(host.job("one").folder)
        kill_it(folder)
        job = until(host, Phase.FAILED)
        assert job.outcome.code == 70 and "its launcher died 1 times within 600 s" in job.outcome.reason
        assert host.act("one", Action.RESUME, "ann").outcome is None
        kill_it(folder)
        until(host, Phase.FAILED)
        assert host.job("one").revision == job.revision + 1
    assert not folder.alive()


def kill_it(folder):
    """Once it has said who it is."""
    end_s = time.monotonic() + WITHIN_S
    while not folder.kill():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_what_is_allowed_no_more_is_not_started_again(tmp_path):
    with host_jobs(config_of(tmp_path)) as host:
        host.create(NewJob(spec=spec_of(), name="one", start=False), "ann")
    with host_jobs(config_of(tmp_path, command="tac")) as host:
        host.act("one", Action.RESUME, "ann")
        job = until(host, Phase.FAILED)
        assert job.outcome.code == 2 and "pipe.command" in job.outcome.reason
        assert not (job.folder / "launcher.json").exists(), "nothing was started"
