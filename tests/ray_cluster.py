"""A Ray cluster for tests, started as a user starts it: `ray start`. On this machine, or on test machines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.agents import children_of
from tests.kafka.cluster import free_ports

LOOPBACK = "127.0.0.1"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Otherwise Ray takes 127.0.0.1 for the address at which other machines reach this one."""
SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""A dead node is known as such after two seconds instead of fifteen. A busy one has five to answer."""
START_S = 60.0
KILL_S = 10.0


def head_command(address: str, port: int, cores: int, folder: str) -> list[str]:
    """Starts the head of a cluster; it has started when the command ends."""
    told = [f"--port={port}", f"--ray-client-server-port={free_ports(1)[0]}", f"--system-config={json.dumps(SOON)}"]
    return _command(address, cores, folder, "--head", "--include-dashboard=false", "--disable-usage-stats", *told)


def node_command(address: str, head: str, cores: int, folder: str) -> list[str]:
    """Starts another node."""
    return _command(address, cores, folder, f"--address={head}")


def _command(address: str, cores: int, folder: str, *more: str) -> list[str]:
    given = [f"--num-cpus={cores}", "--num-gpus=0", f"--memory={1 << 30}", "--object-store-memory=80000000"]
    ports = ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    own = [*ports, f"--node-ip-address={address}", f"--temp-dir={folder}"]
    return [str(Path(sys.executable).with_name("ray")), "start", *more, *given, *own]


class HostCluster:
    """A cluster of one node on loopback."""

    def __init__(self, cores: int) -> None:
        self._cores, self._port = cores, free_ports(1)[0]
        self.address = f"{LOOPBACK}:{self._port}"
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the paths of its sockets must be short

    def start(self) -> None:
        """Start it; it takes drivers when this returns."""
        command = head_command(LOOPBACK, self._port, self._cores, str(self.folder))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=START_S)
        assert done.returncode == 0, done.stdout.decode()

    def pids(self, name: str = "") -> list[int]:
        """Its processes whose command holds `name`, and all below them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):
                text = path.read_bytes().decode(errors="replace")
                if str(self.folder) in text and name in text:
                    found.append(int(path.parent.name))
        return sorted({*found, *(child for pid in found for child in children_of(pid))} - {os.getpid()})

    def signal(self, number: signal.Signals, name: str = "") -> None:
        """Send a signal to the processes of `pids`."""
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all of its processes at once. It may start again."""
        until_s = time.monotonic() + KILL_S
        while self.pids():
            assert time.monotonic() < until_s, f"processes of Ray do not end: {self.pids()}"
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def remove(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running(cores: int) -> Iterator[HostCluster]:
    """A cluster of one node with so many cores, in Ray's books. Its drivers need the environment, too."""
    cluster = HostCluster(cores)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | ON_LOOPBACK).items():
            patch.setenv(name, value)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.remove()
