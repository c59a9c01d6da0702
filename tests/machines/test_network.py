"""Test machines are apart: no folder, no process and no port in common; their ends and their links can be taken."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.machines import network
from tests.machines.network import Network

LISTEN = """
import socket, threading
def answer(connection):
    while data := connection.recv(1 << 20):
        connection.sendall(b"%d " % len(data))
server = socket.create_server(("", 5000))
print("up", flush=True)
while True:
    threading.Thread(target=answer, args=server.accept()[:1]).start()
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=2) as connection:
    connection.sendall(b"hello")
    print(connection.recv(10).decode())
"""
FLOOD = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    begin_s, left = time.monotonic(), 4 << 20
    connection.sendall(bytes(left))
    while left:
        left -= sum(map(int, connection.recv(1 << 16).split()))
    print(time.monotonic() - begin_s)
"""


@pytest.fixture
def two(machines):
    """Two machines, of which the second one listens."""
    first, second = machines(2)
    process = second.python("-c", LISTEN)
    assert process.stdout.readline() == "up\n"
    yield first, second
    process.kill()
    process.communicate()


def sent(first, second):
    return first.call(sys.executable, "-c", SEND, second.address)


def test_machines_reach_each_other_and_share_no_folder(two):
    first, second = two
    assert sent(first, second) == "5 \n"
    first.call("sh", "-c", "echo secret > /tmp/file; echo secret > /dev/shm/file")
    assert (first.tmp / "file").read_text() == "secret\n"
    own = [path.relative_to("/tmp").parts[0] for path in network.folders_of_tests() if path.is_relative_to("/tmp")]
    assert second.call("sh", "-c", "ls /tmp; hostname").split() == [*own, "m1"]
    assert "file" not in second.call("ls", "/dev/shm")
    assert not Path("/dev/shm/file").exists()


def test_processes_of_a_machine_share_its_namespaces_and_those_of_others_do_not(two):
    found = [m.call("sh", "-c", "readlink /proc/self/ns/mnt /proc/self/ns/uts /proc/self/ns/net") for m in (*two, *two)]
    assert found[:2] == found[2:] and not set(found[0].split()) & set(found[1].split())


def test_a_cut_link_is_a_partition_until_it_is_healed(two):
    first, second = two
    second.cut()
    with pytest.raises(network.CommandFailed, match="timed out|No route|unreachable"):
        sent(first, second)
    second.heal()
    assert sent(first, second) == "5 \n"


def test_a_frozen_machine_does_nothing_until_it_is_thawed(two):
    first, second = two
    second.freeze()
    states = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in second.pids()}
    assert states == {"T"}
    with pytest.raises(network.CommandFailed, match="timed out"):
        sent(first, second)  # the kernel takes the connection, and nobody answers
    second.thaw()
    assert sent(first, second) == "5 \n"


def test_a_dead_machine_has_no_process_and_no_file(two):
    first, second = two
    second.call("sh", "-c", "mkdir -p /tmp/store/log; echo x > /tmp/store/log/1; ln -s /etc /tmp/etc")
    second.die()
    assert second.pids() == [] and list(second.tmp.iterdir()) == [] and Path("/etc/passwd").exists()
    with pytest.raises(network.CommandFailed, match="refused"):
        sent(first, second)


def test_a_rate_bounds_the_link(two):
    first, second = two
    quick_s = float(first.call(sys.executable, "-c", FLOOD, second.address))
    first.shape(rate="100mbit")
    slow_s = float(first.call(sys.executable, "-c", FLOOD, second.address))
    assert slow_s > 4 * 8 / 100 > quick_s  # 4 MiB less the burst at 12.5 MB/s
    first.shape()
    assert float(first.call(sys.executable, "-c", FLOOD, second.address)) < slow_s


def test_a_delay_delays_and_a_loss_loses(two):
    first, second = two
    first.shape(rate="1gbit", delay_ms=100)
    begin_s = time.monotonic()
    sent(first, second)
    assert time.monotonic() - begin_s > 0.4  # a connection takes the way there and back, and the words again
    first.shape(loss=1.0)
    with pytest.raises(network.CommandFailed, match="timed out|No route"):
        sent(first, second)
    first.shape()
    assert sent(first, second) == "5 \n"


def test_what_a_link_loses_is_sent_again(two):
    first, second = two
    first.shape(loss=0.05)
    first.call(sys.executable, "-c", FLOOD, second.address)
    names, values = (line.split() for line in first.call("grep", "Tcp:", "/proc/net/snmp").splitlines())
    assert int(dict(zip(names, values, strict=True))["RetransSegs"]) > 0


def test_two_networks_at_a_time_have_the_same_addresses_and_do_not_meet(two, machines):
    first, _ = two
    (other,) = machines(1)
    assert other.address == first.address
    with pytest.raises(network.CommandFailed, match="No route|timed out"):
        sent(other, two[1])


def test_the_hosts_own_network_is_not_touched(machines):
    before = socket.if_nameindex()
    machines(2)
    assert socket.if_nameindex() == before


def test_nothing_is_left_of_a_network(_possible):
    with Network(2) as made:
        process = made.machines[0].python("-c", LISTEN)
        process.stdout.readline()
        folder, name = made.folder, made.space
        assert folder.exists() and name in network.ip("netns", "list")
    assert process.returncode == -signal.SIGKILL and process.stdin.closed and process.stdout.closed
    assert not folder.exists() and name.rpartition("-")[0] not in network.ip("netns", "list")


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_the_folder_of_the_tests_is_seen_where_it_lies_and_stays_when_a_machine_dies(machines, monkeypatch, place):
    with tempfile.TemporaryDirectory(dir=place) as folder:
        clone, beside = Path(folder) / "a clone" / "of it", Path(folder) / "beside"
        (clone / ".venv").mkdir(parents=True)
        beside.write_text("not the clone's")
        (clone / "word").write_text("here")
        found = network.folders_of_tests([clone, clone / ".venv", Path("/usr")])
        assert found == [clone]
        monkeypatch.setattr(network, "folders_of_tests", lambda: found)
        (machine,) = machines(1)
        for _ in range(2):
            assert machine.call("cat", str(clone / "word")) == "here"
            assert machine.call("ls", folder).strip() == "a clone"
            machine.die()  # and starts again
            assert (clone / "word").read_text() == "here"


def test_what_a_killed_run_left_is_removed_at_the_next_start(_possible):
    script = (
        "import sys, time; from tests.machines.network import Network; made = Network(1);"
        "made.machines[0].python('-c', 'import time; time.sleep(100)');"
        "print(made.space, made.folder, flush=True); time.sleep(100)"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=network.ROOT)
    name, folder = run.stdout.readline().split()
    try:
        with Network(1):
            assert name in network.ip("netns", "list") and os.path.exists(folder)  # it is alive
    finally:
        run.kill()
        run.communicate()
    with Network(1):
        assert name not in network.ip("netns", "list") and not os.path.exists(folder)


def test_where_there_are_no_machines_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert network.why_not() == "tc not found (Debian's packages iproute2 and util-linux have them)"
    monkeypatch.undo()
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    assert network.why_not() == "network namespaces need root"
    monkeypatch.setenv(network.REQUIRED, "1")
    assert network.required()
