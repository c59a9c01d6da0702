"""Words of generators, workers and services reach a terminal without anything that it would act on."""

import io
import logging
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from headrace import logs
from headrace.errors import HeadraceError
from headrace.lifecycle import exit_code_of
from headrace.logs import StderrLog
from headrace.printable import print_printable, printable
from headrace.service.cli import service_commands
from headrace.service.cluster.local import LocalWorker
from headrace.service.monitor.alarms import alarms
from headrace.service.monitor.display import LiveShow, render
from headrace.service.monitor.lines import status_changes
from headrace.service.monitor.shows import PlainShow
from headrace.trainer.job_status import Status, read

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J\x1b[H"
C1 = "\x9b31m"
EVIL = f"{TITLE}{CLEAR}{C1}\b\r\u202edone: all is well\u2028\x00"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x1b[H\x9b31m\x08\r\u202edone: all is well\u2028\x00"


def harmless(text):
    return all(character.isprintable() or character in "\n\t" for character in text)


def test_what_a_terminal_would_act_on_is_written_out_and_all_else_stays():
    assert printable(EVIL) == SHOWN
    assert printable("Größe\tété\n日本語 🙂 \\x1b") == "Größe\tété\n日本語 🙂 \\x1b"
    assert printable("\udc80") == r"\udc80"


def test_every_character_that_moves_a_cursor_or_turns_text_is_written_out():
    unsafe = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029]
    kept = [code for code in unsafe if printable(chr(code)) == chr(code)]
    assert kept == [ord("\t"), ord("\n")]


def test_say_is_print_for_words_of_others(capsys):
    print_printable(EVIL, 7, sep="|", file=sys.stderr)
    assert capsys.readouterr().err == f"{SHOWN}|7\n"


def test_lines_of_several_threads_do_not_mix():
    class Unbuffered(io.StringIO):
        """Another thread may write between two writes."""

        def write(self, text):
            if text:
                writes.append(text)
            return len(text)

    writes = []
    print_printable("trainer-0| loss", 0.5, file=Unbuffered(), flush=True)
    assert writes == ["trainer-0| loss 0.5\n"]


def test_a_workers_lines_are_harmless_where_its_launcher_reads_them():
    class Printing:
        output = io.StringIO(f"{EVIL}\n")
        ended = threading.Event()

        def terminate(self): ...

        def kill(self): ...

        def wait(self):
            return 0

        def release(self): ...

    seen = []
    worker = LocalWorker("trainer-0", Printing(), lambda name, text: seen.append(text), lambda name, code: None)
    assert worker.kill(5)
    assert seen == worker.last_lines()
    assert all(map(harmless, seen)) and "owned" in seen[0]


def test_a_pipe_commands_last_words_are_harmless_in_log_and_message(caplog):
    stderr = StderrLog("pipe")
    with caplog.at_level(logging.INFO):
        stderr.add(f"{EVIL}\nhalf {TITLE}".encode("utf-8", "surrogatepass"), time.monotonic())
    assert stderr.tail() == f"{SHOWN}\n" + r"half \x1b]0;owned\x07"
    assert harmless(caplog.text)


def test_log_lines_quote_events_harmlessly(monkeypatch):
    root, out = logging.getLogger(), io.StringIO()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.setup("trainer-0")
        logging.getLogger("x").warning("event %s is bad", EVIL)
    finally:
        root.handlers[:], root.level = before, level
    assert out.getvalue().endswith(f"event {SHOWN} is bad\n")


@pytest.mark.parametrize("error", [HeadraceError(EVIL), ValueError(EVIL)])
def test_the_error_that_ends_a_process_is_harmless(capsys, error):
    def fail():
        raise error

    assert exit_code_of(fail) in (1, 70)
    said = capsys.readouterr().err
    assert harmless(said) and SHOWN in said


def test_what_a_rank0_says_is_harmless_in_every_display(capsys):
    told = {"job": "j", "state": EVIL, "trouble": EVIL, "last_death": EVIL, "restarts": 1, "passed_over": {EVIL: EVIL}}
    status = read(Status, {**told, "operations": {"exporting": {"main": {"name": EVIL, "failing": EVIL}}}})
    assert all(map(harmless, [*alarms(status).values(), *status_changes(status, None)]))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    live = LiveShow(console)
    live.on_line("trainer-0", EVIL)
    console.print(render(status, tuple(live._lines)))
    assert harmless(console.file.getvalue())
    PlainShow().on_line("trainer-0", EVIL)
    assert harmless(capsys.readouterr().err)


def test_kept_output_is_harmless_as_the_command_line_shows_it(capsys, monkeypatch):
    page = {"items": [{"worker": "trainer-0", "text": EVIL}], "next": None}
    client = SimpleNamespace(get=lambda *path, **words: page)
    monkeypatch.setattr(service_commands, "service_at", lambda url, token: nullcontext(client))
    service_commands.logs("clicks", last=1)
    assert capsys.readouterr().out == f"trainer-0: {SHOWN}\n"
