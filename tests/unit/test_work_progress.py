"""The progress of commands: a bar on a terminal, lines elsewhere; and what is left of a stream that ends."""

import io
import sys

import pytest
from rich.console import Console

from headrace.errors import SpecError
from headrace.service.cli import progress
from headrace.service.monitor import display, lines
from headrace.trainer.job_status import Status
from headrace.trainer.replica.config import ReplicaConfig

TRAINING = Status(job="news", state="training", events=3_000, events_per_s=50.0, lag={"a": 600, "b": 400})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_each_step_is_a_line(capsys):
    with progress.work_progress("predicting") as show:
        show(0.5, "1 of 2 parts")
        show(1.0, "2 of 2 parts")
    assert capsys.readouterr().err == "1 of 2 parts\n2 of 2 parts\n"


def test_without_a_terminal_counts_are_a_line_every_two_seconds(capsys, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", iter([0.0, 1.0, 2.0, 2.5, 4.0]).__next__)
    with progress.counted("merging", "rows") as count:
        for done in (100, 200, 250, 400):
            count(done, 1_000)
    assert capsys.readouterr().err == "200 of 1,000 rows, 100 rows/s\n400 of 1,000 rows, 100 rows/s\n"


def test_on_a_terminal_a_bar_shows_share_rate_and_time_left_and_leaves_results_alone(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress.work_progress("merging", "rows") as show:
        show.count(500, 1_000)
        print("a result")
    drawn = terminal.getvalue()
    assert "merging" in drawn and "50%" in drawn and "500 of 1,000 rows" in drawn and "rows/s" in drawn
    assert capsys.readouterr().out == "a result\n", "what is piped on is not redirected to the terminal"


def test_a_stream_that_ends_shows_what_is_left():
    assert lines.left_text(TRAINING) == "75% of 4,000 events, about 20.0 s left"
    shown = list(lines.status_changes(TRAINING, None, ends=True))
    assert shown[-1].endswith("  75% of 4,000 events, about 20.0 s left")
    assert "left" not in "".join(lines.status_changes(TRAINING, None))
    console = Console(file=io.StringIO(), width=120)
    console.print(display.render(TRAINING, (), ends=True))
    assert "75% of 4,000 events, about 20.0 s left" in console.file.getvalue()


@pytest.mark.parametrize("status", [Status(), Status(state="training", events=5), Status(state="done", lag={"a": 3})])
def test_what_is_left_is_not_guessed(status):
    assert lines.left_text(status) == ""


def test_a_replica_of_a_store_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"--store.*there is no folder"):
        ReplicaConfig(store=tmp_path / "none")
