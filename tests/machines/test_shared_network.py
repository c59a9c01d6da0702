"""The replica's container of docker-compose.yml shares the service's network: its script ends with that network."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.machines.external_job import Output
from tests.machines.network import ip

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[2] / "deploy" / "compose" / "replica.sh"


@pytest.fixture
def run(machines):
    """Run a command under the script on a machine; the machine, and the output."""
    (machine,) = machines(1)

    def started(*command):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return Output(machine.start(("sh", str(SCRIPT), *command), environment={"PAUSE_S": "0"}, **pipes))

    yield machine, started


def test_it_ends_as_its_command_does(run):
    _, started = run
    assert started("sh", "-c", "exit 7").end() == 7
    output = started("sh", "-c", "trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    output.until("up")
    output.process.send_signal(signal.SIGTERM)
    output.end()
    assert "asked" in output.said


def test_it_ends_when_the_network_is_gone(run):
    machine, started = run
    output = started("sh", "-c", "echo up; exec sleep 60")
    output.until("up")
    ip("-n", machine._space, "link", "del", "eth0")
    assert output.end(30) == 75 and "to be started again" in output.said
