"""Test machines: network namespaces on a bridge, each with its own address, /tmp, /dev/shm and host name.

The bridge has a namespace of its own, so machines of two test runs never meet and nothing of the host's network is
touched. Names hold the process that made them: what a killed run left is removed at the next start. Needs root and
iproute2; `why_not` says what is missing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
REQUIRED = "HEADRACE_REQUIRE_MACHINES"
KILL_S = 10.0
"""Longest time for the processes of a machine to end, and for its link to come up."""
HEADER_BYTES = 66
SEGMENT_BYTES = 1_448
"""Of TCP, without headers."""
_NAME = re.compile(r"headrace-(\d+)-(\d+)-\w+")
_SETUP = """
set -e
mount --make-rprivate /
mkdir -p "$MACHINE_TMP.shm"
mount -t tmpfs none "$MACHINE_TMP.shm"
for folder; do  # each is below /tmp or /dev/shm, and seen there by the machine, too
    case "$folder" in
        /tmp/*) place="$MACHINE_TMP/${folder#/tmp/}" ;;
        *) place="$MACHINE_TMP.shm/${folder#/dev/shm/}" ;;
    esac
    mkdir -p "$place"
    mount --bind "$folder" "$place"
done
mount --rbind "$MACHINE_TMP.shm" /dev/shm
mount --rbind "$MACHINE_TMP" /tmp
hostname "$MACHINE_NAME"
echo up
exec sleep infinity
"""
_ENTER = 'cd /tmp && exec "$@"'


def folders_of_tests(needed: Sequence[Path] = (ROOT, Path(sys.prefix), Path(sys.base_prefix))) -> list[Path]:
    """The folders of the clone and of its interpreter that a machine would not find, as it has its own /tmp and
    /dev/shm. None lies in another one."""
    hidden = {each for path in needed for each in (path, path.resolve()) if each.is_relative_to("/tmp")}
    hidden |= {each for path in needed for each in (path, path.resolve()) if each.is_relative_to("/dev/shm")}
    return sorted(each for each in hidden if not hidden.intersection(each.parents))


def why_not() -> str:
    """The reason why this system has no test machines; empty where it has."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian's packages iproute2 and util-linux have them)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = _run_name("probe")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def required() -> bool:
    """Whether a test that needs machines must not be skipped."""
    return os.environ.get(REQUIRED) == "1"


class Machine:
    """One machine. A process that it runs sees only its own /tmp."""

    def __init__(self, network: "Network", number: int) -> None:
        self.name = f"m{number}"
        self.address = f"10.77.0.{10 + number}"
        self.tmp = network.folder / self.name
        """Its /tmp, as the tests see it."""
        self._network, self._space = network, _run_name(self.name, network.number)
        self._slow_link: subprocess.Popen[str] | None = None
        self._system: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[str]] = []
        self.tmp.mkdir()
        ip("netns", "add", self._space)
        ip("-n", network.space, "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("-n", network.space, "link", "set", self.name, "master", "bridge", "up")
        ip("-n", self._space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self._space, "link", "set", device, "up")

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **more: object
    ) -> subprocess.Popen[str]:
        """Start a process in /tmp of the machine; `more` goes to Popen."""
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
        private = {"HOME": "/tmp", "PYTHONPATH": str(ROOT)}
        enter = ("nsenter", "--target", str(self._booted()), "--net", "--mount", "--uts", "sh", "-c", _ENTER, "sh")
        process: subprocess.Popen[str] = subprocess.Popen(
            [*enter, *command],
            env={**kept, **private, **(environment or {})},
            text=True,
            **more,  # type: ignore[call-overload]
        )
        self._started.append(process)
        return process

    def _booted(self) -> int:
        """The process that holds its namespaces; a machine that was killed starts again."""
        if self._system is None or self._system.poll() is not None:
            words = ["ip", "netns", "exec", self._space, "unshare", "--mount", "--uts", "sh", "-c", _SETUP, "sh"]
            words += map(str, folders_of_tests())
            names = {"MACHINE_TMP": str(self.tmp), "MACHINE_NAME": self.name}
            self._system = subprocess.Popen(words, env={**os.environ, **names}, stdout=subprocess.PIPE, text=True)
            assert self._system.stdout is not None
            with self._system.stdout as output:
                assert output.readline() == "up\n", f"{self.name} does not start"
        return self._system.pid

    def python(self, *words: str, **more: object) -> subprocess.Popen[str]:
        """Start the interpreter of the tests, with all of its output in a pipe."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.start((sys.executable, "-u", *words), **{**pipes, **more})

    def call(self, *command: str, timeout_s: float = 60.0) -> str:
        """The output of a command. Raises CommandFailed."""
        with self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(timeout=timeout_s)
        if process.returncode:
            raise CommandFailed(f"{' '.join(command)}: exit code {process.returncode}: {output}")
        return output

    def use_ipv6(self) -> None:
        """Have an IPv6 address from now on, and no other one. Before its first process."""
        ip("-n", self._space, "addr", "flush", "dev", "eth0")
        self.address = f"fd77::{self.address.rpartition('.')[2]}"
        ip("-n", self._space, "addr", "add", f"{self.address}/64", "dev", "eth0", "nodad")

    def carried(self) -> tuple[int, int]:
        """Bytes that its link sent and received, less 66 of headers a packet (Ethernet, IP, TCP with time stamps)."""
        counts = json.loads(ip("-n", self._space, "-s", "-j", "link", "show", "dev", "eth0"))[0]["stats64"]
        sent, received = ((counts[way]["bytes"], counts[way]["packets"]) for way in ("tx", "rx"))
        return sent[0] - HEADER_BYTES * sent[1], received[0] - HEADER_BYTES * received[1]

    def sent_again(self) -> int:
        """Bytes that TCP sent again, at most: a process that gets no core for a while acknowledges too late."""
        names, values = (
            line.split() for line in ip("netns", "exec", self._space, "cat", "/proc/net/snmp").splitlines()
            if line.startswith("Tcp:")
        )  # fmt: skip
        return SEGMENT_BYTES * int(values[names.index("RetransSegs")])

    def pids(self) -> list[int]:
        """Its processes."""
        return [int(pid) for pid in ip("netns", "pids", self._space).split()]

    def processes(self) -> list[int]:
        """Those that were started on it: all but the one that holds its namespaces."""
        return [pid for pid in self.pids() if self._system is None or pid != self._system.pid]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Stop all of its processes, also those that another one has just forked; none runs when this returns.

        A thread that runs on another core goes on for a moment after the signal was sent.
        """
        until_s = time.monotonic() + KILL_S
        before: list[int] = []
        while (now := self.pids()) != before or any(map(_may_run, now)):
            if time.monotonic() > until_s:
                raise TimeoutError(f"processes of {self.name} do not stop: {[pid for pid in now if _may_run(pid)]}")
            self.signal(signal.SIGSTOP)
            before = now

    def thaw(self) -> None:
        """Let its processes go on."""
        self.signal(signal.SIGCONT)

    def die(self) -> None:
        """End all of its processes at once, and lose its disk."""
        self.kill()
        for path in self.tmp.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def kill(self) -> None:
        """End all of its processes."""
        until_s = time.monotonic() + KILL_S
        while self.pids():
            if time.monotonic() > until_s:
                raise TimeoutError(f"processes of {self.name} do not end: {self.pids()}")
            self.signal(signal.SIGKILL)
            time.sleep(0.01)
        if self._system is not None:
            self._system.wait()
            self._system = None

    def cut(self) -> None:
        """Take its link away: a partition."""
        ip("-n", self._network.space, "link", "set", self.name, "down")

    def heal(self) -> None:
        """Give its link back; packets pass when this returns.

        The kernel takes a moment to see a link, and remembers for seconds that it did not find a neighbour.
        """
        ip("-n", self._network.space, "link", "set", self.name, "up")
        self._await_link()

    def _await_link(self) -> None:
        ends = ((self._network.space, self.name), (self._space, "eth0"))
        until_s = time.monotonic() + KILL_S
        while any(" state UP " not in ip("-n", space, "link", "show", "dev", device) for space, device in ends):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the link of {self.name} does not come up")
            time.sleep(0.01)
        for machine in self._network.machines:
            ip("-n", machine._space, "neigh", "flush", "dev", "eth0")

    def shape(self, *, rate: str = "", delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Shape its link both ways, such as rate="1gbit", delay_ms=5, loss=0.01; nothing given: as fast as can be."""
        for space, device in ((self._network.space, self.name), (self._space, "eth0")):
            with suppress(CommandFailed):  # there was none
                tc("-n", space, "qdisc", "del", "dev", device, "root")
            if rate:
                shaped = f"root tbf rate {rate} burst 256k latency 50ms"
                tc("-n", space, "qdisc", "add", "dev", device, *shaped.split())
        self._end_slow_link()
        if delay_ms or loss:
            self._start_slow_link(delay_ms, loss)
        self._await_link()

    def _start_slow_link(self, delay_ms: float, loss: float) -> None:
        """Put a slow link between its device and the bridge; see tests.machines.slow_link."""
        space, ends, bridge = self._network.space, (f"{self.name}-near", f"{self.name}-far"), f"{self.name}-bridge"
        script = Path(__file__).with_name("slow_link.py")
        words = ("ip", "netns", "exec", space, sys.executable, str(script), *ends, str(delay_ms), str(loss))
        self._slow_link = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._slow_link.stdout is not None
        if self._slow_link.stdout.readline() != "up\n":
            raise CommandFailed(f"the slow link of {self.name} does not start")
        ip("-n", space, "link", "add", bridge, "type", "bridge")
        for device, master in ((bridge, None), (self.name, bridge), (ends[0], bridge), (ends[1], "bridge")):
            ip("-n", space, "link", "set", device, *(("master", master) if master else ()), "up")

    def _end_slow_link(self) -> None:
        if self._slow_link is None:
            return
        self._slow_link.kill()
        self._slow_link.communicate()
        self._slow_link = None
        ip("-n", self._network.space, "link", "set", self.name, "master", "bridge")
        ip("-n", self._network.space, "link", "del", f"{self.name}-bridge")

    def remove(self) -> None:
        """Remove it with all of its processes, also those that a set-up which failed has left; may be repeated."""
        with suppress(CommandFailed):  # it is gone
            self.kill()
            for process in self._started:
                process.wait(KILL_S)
                for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                    with suppress(BrokenPipeError):  # it had words for a process that is gone
                        pipe.close()
            self._end_slow_link()
            ip("netns", "del", self._space)


class Network:
    """A bridge and its machines. A context: nothing of them is left at its end."""

    _made = 0

    def __init__(self, num_machines: int) -> None:
        remove_left_over()
        Network._made += 1
        self.number = Network._made
        self.space = _run_name("bridge", self.number)
        # In /tmp, which no machine sees: so none sees the folder of another one.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_run_name('machines', self.number)}-", dir="/tmp"))
        self.machines: list[Machine] = []
        try:
            ip("netns", "add", self.space)
            ip("-n", self.space, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.space, "link", "set", "bridge", "up")
            for number in range(num_machines):
                self.machines.append(Machine(self, number))
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove all machines, their processes and folders."""
        for machine in self.machines:
            machine.remove()
        _remove_spaces([name for name in _spaces() if name.startswith(_run_name("", self.number))])
        shutil.rmtree(self.folder, ignore_errors=True)


class CommandFailed(Exception):
    """A command ended with an error."""


def ip(*words: str) -> str:
    """The output of iproute2's `ip`. Raises CommandFailed."""
    return _output("ip", *words)


def tc(*words: str) -> str:
    """The output of iproute2's `tc`. Raises CommandFailed."""
    return _output("tc", *words)


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def remove_left_over() -> None:
    """Remove namespaces and folders of test runs that were killed."""
    left = [name for name in _spaces() if (found := _NAME.fullmatch(name)) and not _runs(int(found[1]), int(found[2]))]
    _remove_spaces(left)
    for folder in Path("/tmp").glob("headrace-*-*-*-*"):
        if (found := _NAME.match(folder.name)) and not _runs(int(found[1]), int(found[2])):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_spaces(names: Sequence[str]) -> None:
    for name in names:
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)


def _spaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines()]


def _run_name(what: str, number: int = 0) -> str:
    """A name that tells the process that made it: by its number, and by its start, as numbers are used again."""
    pid = os.getpid()
    return f"headrace-{pid}-{_started(pid)}-{number}{what}"


def _runs(pid: int, started: int) -> bool:
    return _started(pid) == started


def _started(pid: int) -> int | None:
    """The time at which a process started, in ticks since boot; None where there is no such process."""
    fields = _fields(Path(f"/proc/{pid}"))
    return int(fields[19]) if fields else None


def _may_run(pid: int) -> bool:
    """Whether a thread of a process to which SIGSTOP was sent runs still.

    One that waits in the kernel for a disk or for its stopped child (D) stops before it runs again.
    """
    return any((fields := _fields(thread)) and fields[0] in "RS" for thread in Path(f"/proc/{pid}/task").glob("*"))


def _fields(process: Path) -> list[str]:
    """What the kernel tells of a process or thread, after its name; empty where there is none."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """`count` machines, removed at the end."""
    with Network(count) as network:
        yield network.machines
