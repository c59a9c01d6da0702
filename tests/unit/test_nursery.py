"""A process that the forkserver forked behaves as if `python -m` had started it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.priority import can_lower_priority
from headrace.process import end_at_once
from headrace.service.cluster.child import ForkingStarter
from headrace.service.cluster.runtime import PYTHON
from headrace.service.cluster.warm import LentForkserver, warm_forkserver, warm_launchers
from headrace.warm_forkserver import VARIABLE
from tests.integration.running_job import runs

ROOT = Path(__file__).parents[2]
SHOW = """
import json, os, random, signal, sys, threading
print(json.dumps({
    "name": __name__, "argv": sys.argv, "cwd": os.getcwd(), "leads": os.getpgrp() == os.getsid(0) == os.getpid(),
    "loaded": "json.tool" in sys.modules, "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
    "threads": threading.active_count(), "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "path": sys.path[0],
    "title": open("/proc/self/cmdline").read().rstrip(chr(0)), "random": random.random(),
    "wakeup": signal.set_wakeup_fd(-1),
}))
sys.stderr.write("and this\\n")
"""
END = """
import os, signal, subprocess, sys
print("up", flush=True)
what = sys.argv[1]
if what == "raise": raise KeyError("oh")
if what == "orphan": print(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid)
if what == "away":
    pid = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], start_new_session=True).pid
    os.write(1, b"%d\\n" % pid)  # at once: the shell writes, too
    signal.pause()
if what == "input": print(repr(sys.stdin.read()))
if what == "wait": signal.pause()
sys.exit(int(what) if what.isdigit() else 0)
"""


LAST = """
import ctypes, os, sys, threading, time
def last():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print(threading.get_native_id(), flush=True)
    time.sleep(1000)
threading.Thread(target=last).start()
if sys.argv[1] == "0":  # exit(2) of this thread alone: the others are about to end
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""


@pytest.fixture(params=["own", "warm"])
def nursery(request, tmp_path, monkeypatch):
    """A forkserver of this process, and one that a warm forkserver forked."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "show_me.py").write_text(SHOW)
    (tmp_path / "end_me.py").write_text(END)
    with ExitStack() as held:
        if request.param == "warm":
            for name, text in held.enter_context(warm_forkserver(["json.tool"])).items():
                monkeypatch.setenv(name, text)
        nursery = held.enter_context(ForkingStarter(["json.tool"]))
        assert isinstance(nursery._running.process, LentForkserver) == (request.param == "warm")
        yield nursery


def test_where_no_warm_forkserver_can_be_launchers_start_their_own(tmp_path, monkeypatch, caplog):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with warm_forkserver(["json.tool"]) as variables:
        assert variables == {}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with warm_launchers(["json.tool"]):
        assert VARIABLE not in os.environ
    assert list(folder.iterdir()) == []
    assert "path too long" in caplog.text and "absent" in caplog.text, caplog.text


def start(nursery, folder, *words):
    return nursery.start((*PYTHON, *words), folder)


def finished(child):
    """Exit code and output."""
    code = child.wait()
    with child.output as output:
        said = output.read()
    child.release()
    return code, said


def test_it_is_as_python_m_would_have_it(nursery, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    code, said = finished(start(nursery, folder, "show_me", "--config", "a b"))
    shown, _, rest = said.partition("\n")
    told = json.loads(shown)
    assert (code, rest) == (0, "and this\n")
    random = told.pop("random")
    fds = told.pop("fds")
    assert told == {
        "name": "__main__", "argv": [str(tmp_path / "show_me.py"), "--config", "a b"], "cwd": str(folder),
        "leads": True, "loaded": True, "threads": 1, "sigchld": True, "sigint": True, "path": str(tmp_path),
        "title": "python -m show_me --config a b", "wakeup": -1,
    }  # fmt: skip
    assert len(fds) <= 4  # 0, 1, 2 and the listing's own
    _, again = finished(start(nursery, folder, "show_me"))
    assert json.loads(again.partition("\n")[0])["random"] != random


@pytest.mark.parametrize("code", [0, 1, 2, 70, 75])
def test_its_exit_code_is_reported(nursery, tmp_path, code):
    assert finished(start(nursery, tmp_path, "end_me", str(code))) == (code, "up\n")


def test_an_exception_shows_its_traceback(nursery, tmp_path):
    code, said = finished(start(nursery, tmp_path, "end_me", "raise"))
    assert code == 1
    assert said.endswith("KeyError: 'oh'\n")


def test_a_missing_module_is_a_death_with_a_message(nursery, tmp_path):
    code, said = finished(start(nursery, tmp_path, "no_such_module"))
    assert code == 1
    assert "No module named no_such_module" in said


def test_a_missing_folder_is_a_death_with_a_message(nursery, tmp_path):
    code, said = finished(start(nursery, tmp_path / "none", "show_me"))
    assert code == 1
    assert "No such file or directory" in said


@pytest.mark.parametrize(("act", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_signals_reach_it_and_do_no_harm_after_its_end(nursery, tmp_path, act, number):
    child = start(nursery, tmp_path, "end_me", "wait")
    assert child.output.readline() == "up\n"
    getattr(child, act)()
    assert finished(child) == (-number, "")
    getattr(child, act)()


def test_its_own_children_are_gone_when_its_end_is_reported(nursery, tmp_path):
    code, said = finished(start(nursery, tmp_path, "end_me", "orphan"))
    assert code == 0
    assert not Path(f"/proc/{said.split()[1]}").exists()  # no zombie either


def away(nursery, folder):
    """A child that started a shell in another session, which started a process; the child and both process numbers."""
    child = start(nursery, folder, "end_me", "away")
    assert child.output.readline() == "up\n"
    return child, sorted(int(child.output.readline()) for _ in range(2))


def test_orphans_in_other_sessions_end_with_the_last_worker(nursery, tmp_path):
    (first, left), (second, at_work) = away(nursery, tmp_path), away(nursery, tmp_path)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert all(map(runs, at_work)), "a worker that lives keeps what it started"
    second.kill()
    assert finished(second) == (-signal.SIGKILL, "")
    assert first.output.read() == "", "nobody holds it open any more"
    first.output.close()
    first.release()
    assert not any(Path(f"/proc/{pid}").exists() for pid in (*left, *at_work))


def test_nothing_in_other_sessions_outlives_the_forkserver(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "end_me.py").write_text(END)
    with ForkingStarter([]) as nursery:
        child, left = away(nursery, tmp_path)
    assert finished(child)[0] == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_its_input_closes_for_it_alone(nursery, tmp_path):
    first, second = (start(nursery, tmp_path, "end_me", "input") for _ in range(2))
    for child in (first, second):
        assert child.output.readline() == "up\n"
    os.close(first._given)
    assert first.wait() == 0
    assert first.output.readline() == "''\n"
    assert not second.ended.done()
    first._given = os.dup(0)
    first.release()
    first.output.close()
    second.kill()
    assert finished(second)[0] == -9


def test_a_forkserver_that_died_is_replaced_at_the_next_start(nursery, tmp_path):
    child = start(nursery, tmp_path, "end_me", "wait")
    nursery._running.process.kill()
    assert finished(child)[0] == -signal.SIGKILL
    assert finished(start(nursery, tmp_path, "end_me", "0")) == (0, "up\n")


@pytest.mark.skipif(not can_lower_priority(), reason="no thread may raise its priority again")
@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_ends_has_no_thread_that_runs_after_all_others(nursery, tmp_path, killed):
    """Such a thread frees the memory of the process: on a busy machine it would take many seconds."""
    (tmp_path / "last.py").write_text(LAST)
    child = start(nursery, tmp_path, "last", str(int(killed)))
    thread = int(child.output.readline())
    pid = child.started.result()[0]
    waiting = threading.Thread(target=child.wait)
    waiting.start()
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
    if killed:
        os.kill(pid, signal.SIGSTOP)  # so that it is there to be looked at
        end_at_once(pid)
    deadline = Deadline.after(20)
    while os.sched_getscheduler(thread) == os.SCHED_IDLE:
        assert not killed and not deadline.passed()
        time.sleep(0.01)
    child.kill()
    waiting.join()
    child.output.close()
    child.release()


# -- a warm forkserver


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """Ends the warm forkserver that launchers of this process find. It has imported a module, `small`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "end_me.py").write_text(END)
    (tmp_path / "small.py").touch()
    with ExitStack() as held:
        for name, text in held.enter_context(warm_forkserver(["small"])).items():
            monkeypatch.setenv(name, text)
        yield held.close


def borrows():
    """Whether a launcher would get a forkserver from the warm one."""
    with ForkingStarter([]) as starter:
        return isinstance(starter._running.process, LentForkserver)


def test_a_launcher_is_refused_where_a_forkserver_of_its_own_would_differ(warm, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OF_NO_CONCERN", "1")
    assert borrows()
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert not borrows() and "it was started with another OMP_NUM_THREADS" in caplog.text
    before = os.umask(0o077)
    try:
        assert not borrows() and "it has another Umask" in caplog.text
    finally:
        os.umask(before)
    assert borrows()
    (tmp_path / "small.py").write_text("CHANGED = True\n")
    assert not borrows() and "small.py has changed since it was loaded" in caplog.text
    warm()
    assert not borrows()


def test_what_a_warm_forkserver_forked_has_the_environment_of_its_launcher_and_goes_on_after_its_end(
    warm, tmp_path, monkeypatch
):
    (tmp_path / "show_variable.py").write_text("import os; print(os.environ['OF_THE_LAUNCHER'], 'GONE' in os.environ)")
    monkeypatch.setenv("OF_THE_LAUNCHER", "yes")
    with ForkingStarter([]) as nursery:
        child = start(nursery, tmp_path, "end_me", "wait")
        assert child.output.readline() == "up\n"
        warm()
        assert finished(start(nursery, tmp_path, "show_variable")) == (0, "yes False\n")
        assert not child.ended.done()
        child.terminate()
        assert finished(child) == (-signal.SIGTERM, "")


def test_descriptors_are_given_back(nursery, tmp_path):
    finished(start(nursery, tmp_path, "end_me", "0"))
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        finished(start(nursery, tmp_path, "end_me", "0"))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert nursery._running._children == {}


def test_kernels_are_loaded_from_their_cache_and_none_is_compiled():
    code = (
        "import headrace.pserver.rows.kernels as module, headrace.kernel_cache as cache; cache.load_kernels();"
        "kernels = [thing for thing in vars(module).values() if type(thing).__name__ == 'CPUDispatcher'];"
        "assert not any(sum(k.stats.cache_misses.values()) for k in kernels); print(len(kernels))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 0


def test_a_command_of_another_kind_is_started_from_nothing(nursery, tmp_path):
    child = nursery.start((sys.executable, "-c", "print(1)"), tmp_path)
    assert child.wait() == 0
    assert child.output.read() == "1\n"
    child.output.close()
    child.release()


@pytest.mark.long
def test_what_workers_import_starts_no_thread_but_those_known_to_survive_a_fork():
    """A fork copies only the thread that forks. OpenBLAS and jemalloc restart theirs by pthread_atfork."""
    code = (
        "import headrace.service.spec.config, importlib, threading, pathlib\n"
        "from headrace.service.cluster.worker_plan import preloaded\n"
        "for m in preloaded(headrace.service.spec.config.ClusterSection(shards=1)): importlib.import_module(m)\n"
        "assert threading.active_count() == 1;"
        "print(*(p.read_text().strip() for p in pathlib.Path('/proc/self/task').glob('*/comm')))"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len([name for name in done.stdout.split() if name != "jemalloc_bg_thd"]) == 1
