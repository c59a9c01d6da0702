"""A job whose processes listen for other machines: the bits of the job on loopback, and only strangers are refused."""

import json
import sys

import pytest

from tests.integration.stream_job import write_job

pytestmark = pytest.mark.long
CLUSTER = "{trainers=2,shards=2%s}"
OPEN = ',interface="eth0",trust_interface=true'


def run(machine, cluster):
    command = (sys.executable, "-m", "headrace.service", "run", "job.toml", "--fresh", "--set", f"cluster={cluster}")
    return machine.call(*command, timeout_s=110)


def report(machine):
    return json.loads((machine.tmp / "store" / "report.json").read_text())


def test_a_job_at_an_interface_has_the_digest_of_the_one_at_loopback(machines):
    (machine,) = machines(1)
    write_job(machine.tmp)
    run(machine, CLUSTER % "")
    expected = report(machine)
    assert not (machine.tmp / "store" / "identity").exists()
    output = run(machine, CLUSTER % OPEN)
    found = report(machine)
    assert found["digest"] == expected["digest"] and found["events"] == expected["events"] > 0
    assert "serves at 10.77.0.10:" in output
    assert (machine.tmp / "store" / "identity" / "authority.pem").stat().st_mode & 0o777 == 0o600
