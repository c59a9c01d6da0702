"""The start and end of processes, tested in processes of their own."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from headrace.errors import DeadlineExceeded, HeadraceError, SpecError
from headrace.lifecycle import ExitCode, error_in, exit_code_of, on_stop_signal, stop_flag

WATCHED = """
import os, subprocess
from headrace.lifecycle import end_with_parent
child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
end_with_parent()
print(child.pid, flush=True)
child.wait()
"""


def test_the_message_of_an_error_is_found_in_the_last_lines(capsys):
    def fails():
        raise SpecError("two\nlines", "a.b")

    exit_code_of(fails)
    printed = capsys.readouterr().err.splitlines()
    assert error_in(["error: an older one", "more", *printed]) == str(SpecError("two\nlines", "a.b"))
    assert error_in(["all is well"]) == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_the_flag_and_nothing_else(number):
    with stop_flag() as stopping:
        assert not stopping.is_set()
        os.kill(os.getpid(), number)
        assert stopping.wait(5)


def test_each_signal_is_noted_and_the_old_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    noted = []
    with on_stop_signal(lambda: noted.append("stop")):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert noted == ["stop", "stop"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_may_come_while_the_main_thread_holds_the_lock_that_the_action_takes():
    turn, noted = threading.Lock(), []

    def note():
        with turn:
            noted.append("stop")

    with on_stop_signal(note), turn:
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted == []
    assert noted == ["stop"]


def test_other_signals_are_noted_where_they_are_named():
    before, noted = signal.getsignal(signal.SIGHUP), []
    with on_stop_signal(lambda: noted.append("stop"), signal.SIGHUP):
        os.kill(os.getpid(), signal.SIGHUP)
    assert noted == ["stop"]
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_process_and_what_it_started_die_when_its_standard_input_closes():
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(10) == -signal.SIGKILL
    assert process.stdout.read() == b""  # ends only once the child, which holds it too, is gone
    process.stdout.close()


@pytest.mark.parametrize(("error", "code"), [(SpecError("x"), 2), (HeadraceError("x"), 1), (DeadlineExceeded("x"), 75)])
def test_an_error_for_people_is_one_line_and_its_exit_code(capsys, error, code):
    def main():
        raise error

    assert exit_code_of(main) == code
    assert capsys.readouterr().err == "error: x\n"


def test_a_bug_shows_its_traceback_and_is_no_error_for_people(capsys):
    assert exit_code_of(lambda: 1 / 0) is ExitCode.BUG
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("ZeroDivisionError: division by zero\n")


def test_exit_codes_are_the_ones_we_promised():
    assert {code.name: code.value for code in ExitCode} == {
        "DRAINED": 0, "FAILED": 1, "BAD_CONFIG": 2, "NO_SAMPLES": 3, "BUG": 70, "RETRY": 75,
    }  # fmt: skip


def test_a_good_end_is_drained():
    assert exit_code_of(lambda: None) is ExitCode.DRAINED


ENDS = """
import atexit, gc, sys, threading, time, weakref
from headrace.lifecycle import run_to_end

class Closed:
    def __del__(self):
        print("freed", flush=True)

KEPT = Closed()

def main():
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    print("main")
    %s

run_to_end(main)
print("never")
"""


@pytest.mark.parametrize(
    ("last", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("from headrace.errors import SpecError; raise SpecError('x')", 2, "error: x\n"),
    ],
)
def test_a_process_ends_as_python_ends_it(last, code, error):
    ended = subprocess.run([sys.executable, "-c", ENDS % last], capture_output=True, text=True, timeout=20, check=False)
    freed = "freed\n" if error == "no\n" else ""  # Python's own end prints the message, and frees
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "main\nthread\nat exit\n" + freed, error)


@pytest.mark.parametrize("code", [0, 75])
def test_a_process_whose_last_output_is_lost_says_so_by_its_exit_code(code):
    script = (
        f"import sys; from headrace.lifecycle import run_to_end; run_to_end(lambda: print('x') or sys.exit({code}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", script], stdout=full, env=environment, check=False)
    assert ended.returncode == (code or 120)
