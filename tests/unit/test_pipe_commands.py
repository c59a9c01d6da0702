"""What a pipe command may do wrong, and what is said then; no process outlives it."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset.formats.generator_columns import slots_of_job
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.command import check_command, encode_slots, prepare_command
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.spec.config import EventTime, MetaSlot, PipeSection, SourceSection, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import BadEvent, PipeFailed, SourceUnavailable
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedFault
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import SpecError

SCHEMA = Schema.of([SparseSlot(name="s"), MetaSlot(name="label", kind="meta", type="int64")])
LINES = [f"1 {n} 1 {n % 2}".encode() for n in range(20)]
ALL = Segment("memory/0", 0, 0, 20)


def script(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "pipe.py").write_text("import sys, os, time\n" + text)
    return ("python", "pipe.py")


def read(folder, command, *, lines=LINES, segments=None, source=None, config=None, dead_letters=None, **settings):
    """Samples in a row, and the tally."""
    pipe = PipeSection(command=command, **{"tries": 1, "deadline": 10.0} | settings)
    reader = SegmentReader(
        source or MemorySource([lines]), pipe, SCHEMA, config or SourceSection(), dead_letters, folder
    )
    tally = PassTally()
    try:
        blocks = list(reader.read(3, segments or [Segment("memory/0", 0, 0, len(lines))], tally))
    finally:
        reader.close()
    return blocks, tally


def signs(blocks) -> list[int]:
    return [sign for block in blocks for sign in block.sparse["s"].values_N.tolist()]


def ends_soon(pid: int) -> bool:
    """Whether a killed process is gone: the kernel takes a moment to end one that is not our child."""
    patience = Deadline.after(30.0)
    while is_alive(pid) and not patience.passed():
        time.sleep(0.005)
    return not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what goes well


def test_lines_go_through_a_program_and_become_samples(tmp_path):
    blocks, tally = read(tmp_path, ("cat",))
    assert signs(blocks) == list(range(20))
    assert np.concatenate([block.event_B for block in blocks]).tolist() == list(range(20))
    assert (tally.num_events, tally.num_samples, tally.num_judged, tally.rejected) == (20, 20, 20, {})


def test_segments_keep_their_order_whatever_the_number_of_processes(tmp_path):
    lines = [f"1 {n} 1 0".encode() for n in range(5000)]
    segments = [Segment("memory/0", 0, 0, 4000), Segment("memory/0", 0, 4000, 4100), Segment("memory/0", 0, 4100, 5000)]
    for processes in (1, 2, 3):
        blocks, _ = read(tmp_path, ("cat",), lines=lines, segments=segments, processes=processes)
        assert signs(blocks) == list(range(5000))
        assert np.concatenate([block.event_B for block in blocks]).tolist() == list(range(5000))


def test_each_segment_has_a_process_of_its_own(tmp_path):
    command = script(tmp_path, "n = len(sys.stdin.readlines()); print('1', n, '1 0')")
    blocks, _ = read(tmp_path, command, segments=[Segment("memory/0", 0, 0, 5), Segment("memory/0", 0, 5, 20)])
    assert signs(blocks) == [5, 15]


def test_more_than_a_pipe_holds_flows_both_ways(tmp_path):
    lines = [b"1 7 1 0" + b" " * 2000] * 6000
    blocks, tally = read(tmp_path, ("cat",), lines=lines)
    assert tally.num_samples == 6000


def test_the_command_runs_in_the_folder_with_a_clean_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    command = script(
        tmp_path,
        "good = ['PYTHONHASHSEED', 'TZ', 'LC_ALL', 'HEADRACE_SLOTS', 'HEADRACE_PROTOCOL', 'PATH']\n"
        "ok = os.getcwd() == sys.argv[1] and all(map(os.environ.get, good)) and 'hush' not in os.environ.values()\n"
        "ok = ok and sys.executable == sys.argv[2] and hash('a') == int(sys.argv[3])\n"
        "print('1', int(ok), '1 0')",
    )
    salt = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True
    ).stdout.strip()
    blocks, _ = read(tmp_path, (*command, str(tmp_path), sys.executable, salt))
    assert signs(blocks) == [1]


def test_event_time_comes_from_a_slot(tmp_path):
    config = SourceSection(event_time=EventTime(slot="label", unit="ms"))
    blocks, _ = read(tmp_path, ("cat",), lines=[b"0 1 1500"], config=config)
    assert blocks[0].time_s_B.tolist() == [1.5]


# -- what is refused before anything starts


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("no-such-program-here",), "no such program on PATH"),
        (("./no-such-file",), "no such program, or it may not be executed"),
        (("python", "no_such_script.py"), "no such file"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_before_anything_starts(tmp_path, command, said):
    with pytest.raises(SpecError, match=said) as refused:
        check_command(PipeSection(command=command), tmp_path)
    assert refused.value.path == "pipe.command"
    with pytest.raises(SpecError, match=said):
        read(tmp_path, command)


def test_a_file_that_may_not_be_executed_is_refused(tmp_path):
    (tmp_path / "plain").write_text("")
    with pytest.raises(SpecError, match="may not be executed"):
        check_command(PipeSection(command=("./plain",)), tmp_path)


@pytest.mark.parametrize("event_time", [EventTime(field="ts"), EventTime(kind="record"), EventTime(slot="s")])
def test_event_time_that_multislot_cannot_tell_is_refused(tmp_path, event_time):
    with pytest.raises(SpecError, match="event_time"):
        read(tmp_path, ("cat",), config=SourceSection(event_time=event_time))


def test_secrets_and_slots_are_what_a_command_does_not_and_does_see(tmp_path):
    command = prepare_command(PipeSection(command=("cat",)), SCHEMA, tmp_path, tmp_path / "job.toml")
    assert command.environment["HEADRACE_SLOTS"] == '[["s","sparse","uint64",0],["label","meta","int64",1]]'
    assert command.environment["HEADRACE_SPEC"] == str(tmp_path / "job.toml")
    assert set(command.environment) <= {
        "PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "PYTHONHASHSEED", "PYTHONPATH",
        "HEADRACE_PROTOCOL", "HEADRACE_SLOTS", "HEADRACE_EXTRA", "HEADRACE_SPEC",
    }  # fmt: skip


def test_very_many_slots_are_told_shortly():
    many = Schema.of([SparseSlot(name="C{1..10000}")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_SLOTS", encode_slots(many))
        assert len(encode_slots(many)) <= 100_000
        told = slots_of_job(None)
    assert told is not None and [slot.name for slot in told.slots] == [slot.name for slot in many.slots]


# -- a command that fails on a segment


def test_a_command_that_ends_with_an_error_names_segment_tries_code_and_last_words(tmp_path, caplog):
    command = script(tmp_path, "sys.stdin.read(); print('1 1 1 1'); sys.exit('disk on fire')")
    with pytest.raises(PipeFailed) as failed:
        read(tmp_path, command, tries=2)
    said = str(failed.value)
    for word in ("python pipe.py", str(tmp_path), "exit code 1", "memory/0 [0, 20)", "try 2 of 2", "disk on fire"):
        assert word in said
    assert "try 1" in caplog.text


def test_a_try_that_failed_leaves_nothing_in_the_samples(tmp_path):
    command = script(
        tmp_path,
        "for line in sys.stdin: print(line, end='')\n"
        "sys.stdout.flush()\n"
        "if not os.path.exists('second'): open('second', 'w'); sys.exit(3)",
    )
    blocks, tally = read(tmp_path, command, tries=2)
    assert signs(blocks) == list(range(20))
    assert tally.num_events == tally.num_samples == 20


def test_a_command_killed_by_a_signal_says_which(tmp_path):
    with pytest.raises(PipeFailed, match="was killed by signal 9"):
        read(tmp_path, script(tmp_path, "os.kill(os.getpid(), 9)"))


@pytest.mark.parametrize("text", ["exec sleep 600", "cat >rest; exec sleep 600", "exec >&-; exec sleep 600"])
def test_a_command_that_hangs_is_killed_at_its_deadline_with_all_it_started(tmp_path, text):
    command = ("sh", "-c", f"sleep 600 & echo $$ $! >pids; {text}")
    started_s = time.monotonic()
    with pytest.raises(PipeFailed, match="and was killed"):
        read(tmp_path, command, deadline=0.6)
    assert time.monotonic() - started_s < 60
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(map(ends_soon, pids))


def test_what_a_command_left_running_is_ended_with_its_segment(tmp_path):
    command = script(
        tmp_path,
        "import subprocess\n"
        "null = subprocess.DEVNULL\n"
        "child = subprocess.Popen(['sleep', '600'], stdin=null, stdout=null, stderr=null)\n"
        "open('pids', 'w').write(str(child.pid))\n"
        "sys.stdin.read(); print('1 1 1 1')",
    )
    blocks, _ = read(tmp_path, command)
    assert signs(blocks) == [1]
    assert ends_soon(int((tmp_path / "pids").read_text()))


def test_a_command_that_does_not_read_all_events_is_found_out(tmp_path):
    lines = [b"1 7 1 0" + b" " * 2000] * 6000
    with pytest.raises(PipeFailed, match="closed its input before it had read all events"):
        read(tmp_path, ("head", "-n", "1"), lines=lines)


def test_a_command_that_never_stops_printing_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.dataset.pipe.multislot_runner.OUTPUT_BYTES", 1 << 20)
    with pytest.raises(PipeFailed, match="printed far more than its events can explain"):
        read(tmp_path, ("yes", "1 1 1 1"))


def test_a_line_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.dataset.pipe.multislot_runner.MAX_LINE_BYTES", 1 << 16)
    with pytest.raises(PipeFailed, match="printed a line longer than"):
        read(tmp_path, script(tmp_path, "sys.stdin.read(); print('1' * (1 << 22))"))


def test_what_every_process_says_is_logged_once_and_then_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    command = script(tmp_path, "print('the same', file=sys.stderr)\nsys.stdin.read()")
    segments = [Segment("memory/0", 0, 0, 1)] * 25
    read(tmp_path, command, segments=segments)
    told = [message.partition(": ")[2] for message in caplog.messages if "the same" in message]
    assert told == ["the same", "10 lines so far repeat lines of earlier processes; the last: the same"]


def test_stderr_goes_to_the_log_a_few_lines_at_a_time(tmp_path, caplog):
    caplog.set_level("INFO")
    read(tmp_path, script(tmp_path, "for n in range(500): print('noise', n, file=sys.stderr)\nsys.stdin.read()"))
    logged = [record for record in caplog.messages if "noise" in record]
    assert 0 < len(logged) <= 20
    assert any("480 more lines on stderr were not logged" in message for message in caplog.messages)


# -- what is no sample


def test_what_is_no_sample_is_rejected_line_by_line(tmp_path):
    command = script(tmp_path, "sys.stdin.read(); print('loading model ...'); print('1 5 1 1'); print('1 6 0')")
    blocks, tally = read(tmp_path, command)
    assert signs(blocks) == [5]
    assert tally.rejected == {Reason.UNPARSABLE: 1, Reason.LABEL_MISSING: 1}
    assert "output line 1" in tally.first_of[Reason.UNPARSABLE]
    assert tally.num_judged == 3


def test_half_a_sample_at_the_end_is_rejected_even_where_it_could_be_parsed(tmp_path):
    command = script(tmp_path, "sys.stdin.read(); sys.stdout.write('1 5 1 1\\n1 612 1 1')")
    blocks, tally = read(tmp_path, command)
    assert signs(blocks) == [5]
    assert tally.rejected == {Reason.HALF: 1}


def test_events_that_no_line_can_carry_never_reach_the_command(tmp_path):
    lines = [b"1 1 1 1", None, b"1 2 1 1\n1 3 1 1", b"1 4 1 1" + b" " * 100, b"", b"1 5 1 1"]
    blocks, tally = read(tmp_path, ("cat",), lines=lines, config=SourceSection(max_event_bytes=50))
    assert signs(blocks) == [1, 5]
    assert tally.rejected == {Reason.NULL: 1, Reason.LINE_FEED: 1, Reason.TOO_LONG: 1, Reason.WRONG_COUNT: 1}
    assert tally.num_events == 6


def test_fail_stops_at_the_first_bad_event(tmp_path):
    with pytest.raises(BadEvent, match=r"memory/0 at 1: null value.*on_bad_event"):
        read(tmp_path, ("cat",), lines=[b"1 1 1 1", None], on_bad_event="fail")


def test_dead_letters_hold_the_bytes(tmp_path):
    letters = DeadLetters(tmp_path / "dead", 0, PipeSection(command=("cat",)).dead_letters)
    pipe = PipeSection(command=("cat",))
    reader = SegmentReader(MemorySource([[b"oops", None]]), pipe, SCHEMA, SourceSection(), letters, tmp_path)
    tally = PassTally()
    list(reader.read(3, [Segment("memory/0", 0, 0, 2)], tally))
    path = letters.publish(3)
    reader.close()
    assert tally.num_dead_letters == 2
    assert path is not None and '"bytes": "b29wcw=="' in path.read_text()


# -- the source


def test_a_source_that_goes_away_is_waited_for_and_read_on_where_it_stopped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("headrace.dataset.loader.segment_parts.AWAY_WAIT_S", 0.01)
    source = MemorySource([LINES], faults=[ScriptedFault(on_read=1, after_events=7), ScriptedFault(on_read=2)])
    blocks, tally = read(tmp_path, ("cat",), source=source)
    assert signs(blocks) == list(range(20))
    assert tally.num_events == 20
    assert "waiting for memory/0" in caplog.text


def test_a_source_that_stays_away_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.dataset.loader.segment_parts.AWAY_WAIT_S", 0.01)
    source = MemorySource([LINES], faults=[ScriptedFault(on_read=n) for n in range(1, 200)])
    pipe = PipeSection(command=("cat",))
    reader = SegmentReader(source, pipe, SCHEMA, SourceSection(), None, tmp_path, max_outage_s=0.05)
    with pytest.raises(SourceUnavailable):
        list(reader.read(1, [ALL], PassTally()))
    reader.close()


def test_closing_ends_a_command_at_work_at_once(tmp_path):
    command = script(tmp_path, "open('pids', 'w').write(str(os.getpid())); time.sleep(600)")
    pipe = PipeSection(command=command, tries=3)
    reader = SegmentReader(MemorySource([LINES]), pipe, SCHEMA, SourceSection(), None, tmp_path)
    ended: list[str] = []

    def work():
        with pytest.raises(PipeFailed) as failed:
            list(reader.read(1, [ALL], PassTally()))
        ended.append(str(failed.value))

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        time.sleep(0.01)
    reader.close()
    thread.join(5)
    assert not thread.is_alive() and len(ended) == 1
    assert ends_soon(int((tmp_path / "pids").read_text()))
