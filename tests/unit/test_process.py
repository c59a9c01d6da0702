"""Child processes: what they leave behind, how their end is told, and that each wait has a bound."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace import process
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded
from headrace.process import DEVNULL, STDOUT, ChildProcess, dying_with_parent, run, wait_until_gone

ROOT = Path(__file__).parents[2]
WITH_CHILD = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); "


def python(code):
    return (sys.executable, "-c", code)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start():
    """Starts children; ends them."""
    started = []

    def start(code, **options):
        started.append(ChildProcess(python(code), **options))
        return started[-1]

    yield start
    for child in started:
        child.close()


def test_a_killed_child_leaves_nothing_of_its_group(start):
    child = start(WITH_CHILD + "time.sleep(1000)")
    grandchild = int(child.stdout.readline())
    assert child.code is None and not child.ends_within(0)
    assert child.end() == child.end() == child.code == -signal.SIGKILL
    assert not is_alive(child.pid) and not is_alive(grandchild)


def test_a_child_that_ended_by_itself_takes_its_group_along_and_keeps_its_exit_code(start):
    child = start(WITH_CHILD + "sys.exit(3)")
    grandchild = int(child.stdout.readline())
    assert child.ends_within(10)
    assert is_alive(grandchild)
    assert child.end() == 3
    assert not is_alive(grandchild)


def test_a_stopped_child_can_be_killed(start):
    child = start("import time; print(1, flush=True); time.sleep(1000)")
    child.stdout.readline()
    child.signal(signal.SIGSTOP)
    child.kill()
    assert child.ends_within(10)
    assert child.end() == -signal.SIGKILL


def test_signals_after_the_end_reach_nobody(start):
    child = start("pass")
    assert child.ends_within(10)
    child.signal(signal.SIGTERM)  # a zombie
    assert child.end() == 0
    child.signal(signal.SIGTERM)
    child.kill()
    assert child.code == 0


def test_threads_that_end_one_child_all_find_it_gone(start):
    child = start(WITH_CHILD + "time.sleep(1000)")
    grandchild, seen = int(child.stdout.readline()), []
    threads = [threading.Thread(target=lambda: seen.append((child.end(), is_alive(grandchild)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [(-signal.SIGKILL, False)] * 8


@pytest.mark.parametrize("new_session", [True, False])
def test_a_child_leads_a_group_and_if_asked_a_session(start, new_session):
    child = start("import os; print(os.getpgrp() == os.getpid(), os.getsid(0))", new_session=new_session)
    leads, session = child.stdout.readline().split()
    assert (leads, int(session)) == (b"True", child.pid if new_session else os.getsid(0))


def test_a_process_that_survives_sigkill_is_an_error_and_no_endless_wait(start, monkeypatch):
    child = start("import time; time.sleep(1000)")
    monkeypatch.setattr(process, "KILL_S", 0.1)
    monkeypatch.setattr(process, "kill_group", lambda leader: None)
    with pytest.raises(DeadlineExceeded, match="did not end within 0.1 s after SIGKILL"):
        child.end()
    monkeypatch.undo()
    assert child.end() == -signal.SIGKILL


def test_the_wait_for_a_group_is_bounded(start):
    child = start("import time; time.sleep(1000)")
    began_s = time.monotonic()
    assert not wait_until_gone(child.pid, Deadline.after(0.1))
    assert time.monotonic() - began_s >= 0.1
    child.end()
    assert wait_until_gone(child.pid, Deadline.after(0))


def test_descriptors_are_given_back(start):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child = ChildProcess(python("print(1)"))
        child.close()
        child.close()
        assert run(python("print(1)"), deadline=Deadline.after(60)).output == b"1\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_other_module_starts_processes():
    """service.jobs starts launchers that outlive the service; its supervisor only names the type."""
    allowed = {"headrace/process.py", "service/jobs/launcher_process.py", "service/jobs/supervisor.py"}
    starts = re.compile(r"^\s*(import|from) (subprocess|pty)\b|os\.(system|popen|spawn\w+|posix_spawn\w*)\(", re.M)
    packages = ("headrace", "dataset", "pserver", "trainer", "service")
    found = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if starts.search(path.read_text())
    }
    assert found - allowed == set()


# -- run


def test_input_and_both_outputs_flow_although_each_is_larger_than_a_pipe():
    code = "import sys; data = sys.stdin.read(); sys.stderr.write(data.upper()); print(data, end='')"
    data = b"abc\n" * 100_000
    finished = run(python(code), deadline=Deadline.after(60), data=data)
    assert (finished.code, finished.output, finished.errors) == (0, data, data.upper())


def test_one_output_holds_both_in_their_order():
    code = "import sys; print(1, flush=True); print(2, file=sys.stderr, flush=True); print(3); sys.exit(4)"
    finished = run(python(code), deadline=Deadline.after(60), stderr=STDOUT)
    assert (finished.code, finished.output, finished.errors) == (4, b"1\n2\n3\n", b"")


def test_a_command_that_does_not_read_its_input_ends_as_it_says():
    assert run(python("import sys; sys.exit(5)"), deadline=Deadline.after(60), data=b"x" * (1 << 20)).code == 5


def test_of_too_much_output_the_last_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 10)
    finished = run(python("print('x' * 300_000 + '0123456789', end='')"), deadline=Deadline.after(60))
    assert finished.output == b"0123456789"


@pytest.mark.parametrize("code", ["sleep 1000", ":"])
def test_at_the_deadline_everything_is_killed(code):
    """Also a grandchild that holds the output open."""
    finished = run(("sh", "-c", f"sleep 1000 & echo $!; {code}"), deadline=Deadline.after(1.0))
    assert finished.code is None
    assert not is_alive(int(finished.output))


def test_a_program_that_is_not_there_cannot_be_started(monkeypatch):
    monkeypatch.setattr(process, "_setpriv", lambda: None)
    with pytest.raises(FileNotFoundError):
        run(("/no/such/program",), deadline=Deadline.after(60))


@pytest.mark.skipif(process._setpriv() is None, reason="needs util-linux' setpriv")
def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    told = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(1000)"
    outer = f"from headrace.process import *; run({python(inner)!r}, deadline=Deadline.after(60))"
    parent = subprocess.Popen(python(outer), cwd=ROOT, stdin=DEVNULL)
    try:
        wait_for(lambda: told.exists() and told.read_text().endswith("."))
    finally:
        parent.kill()
        parent.wait()
    pid = int(told.read_text().rstrip("."))
    wait_for(lambda: not is_alive(pid))


def wait_for(condition):
    deadline = Deadline.after(30)
    while not condition():
        deadline.check("waiting")
        time.sleep(0.01)


def test_a_users_command_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    environment = process.user_environment()
    assert "hush" not in environment.values()
    assert (environment["TZ"], environment["LC_ALL"], environment["PATH"]) == ("UTC", "C.UTF-8", os.environ["PATH"])


def test_a_command_is_left_alone_where_the_tool_is_missing(monkeypatch):
    monkeypatch.setattr(process, "_setpriv", lambda: None)
    assert dying_with_parent(["cat"]) == ("cat",)
