"""A process whose job was taken over is gone after two checks of the log, whatever it waits for; others go on."""

import subprocess
import sys
import threading

import pytest

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.trainer.journal.log import Log, Superseded
from headrace.trainer.journal.succession import end_when_superseded, raise_superseded

WAITING = """
import sys, threading
from pathlib import Path
from headrace.trainer.journal.succession import end_when_superseded

end_when_superseded(Path(sys.argv[1]), 1, check_s=0.05)
print("up", flush=True)
threading.Event().wait()
"""


def claim(folder, generation):
    Log.claim(folder, generation, Deadline.after(5)).close()


def test_a_process_that_waits_for_ever_ends_once_a_newer_generation_has_the_job(tmp_path):
    claim(tmp_path / "log", 1)
    command = [sys.executable, "-c", WAITING, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == "up\n"
        claim(tmp_path / "log", 2)
        _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == Superseded.exit_code
    assert "generation 2 of the workers has claimed this job; generation 1 is too late" in said


def test_the_newest_generation_is_left_alone_and_an_older_one_has_one_pause_to_end_in_order(tmp_path, monkeypatch):
    looks, ended, looked = [3, 3, 2, 4, 4], threading.Event(), []
    monkeypatch.setattr(
        "headrace.trainer.journal.succession.newest_generation", lambda _: looked.append(1) or looks[len(looked) - 1]
    )
    end_when_superseded(tmp_path, 3, check_s=0.001, end=lambda code: ended.set())
    assert ended.wait(10)
    assert len(looked) == 5


def test_a_log_that_cannot_be_read_now_is_checked_again(tmp_path, monkeypatch):
    looked, ended = [], threading.Event()

    def newest(_folder):
        looked.append(1)
        if len(looked) < 3:
            raise OSError("the network is away")
        return 8

    monkeypatch.setattr("headrace.trainer.journal.succession.newest_generation", newest)
    end_when_superseded(tmp_path, 7, check_s=0.001, end=lambda code: ended.set())
    assert ended.wait(10)
    assert len(looked) == 4


def test_an_error_of_a_replaced_trainer_is_superseded_and_others_stay(tmp_path):
    claim(tmp_path / "log", 1)
    with pytest.raises(HeadraceError, match="a file is gone"), raise_superseded(tmp_path / "log", 1):
        raise HeadraceError("a file is gone")
    claim(tmp_path / "log", 2)
    with pytest.raises(Superseded, match="generation 2") as told, raise_superseded(tmp_path / "log", 1):
        raise HeadraceError("a file is gone")
    assert str(told.value.__cause__) == "a file is gone"
