"""`python -m headrace.dataset`: how a user tries a generator before training."""

import io
import re

import pytest
from rich.console import Console

from headrace.dataset import __main__ as command
from headrace.dataset.__main__ import first_segments, main, read_stream, try_stream
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.timing import timing_hints
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.spec.config import PipeSection
from headrace.dataset.stream.source import Partition, Segment
from headrace.errors import SpecError
from headrace.lifecycle import exit_code_of

SPEC = """
name = "demo"
[sources.lines]
kind = "files"
paths = ["events.txt"]
[pipe]
command = ["cat"]
[[slots]]
names = ["user", "item"]
[[slots]]
name = "price"
kind = "dense"
[[slots]]
name = "click"
kind = "meta"
[model]
name = "only the trainer reads this"
"""


@pytest.fixture
def spec(tmp_path):
    lines = [f"1 {n} 2 {n} {n + 1} 1 0.5 1 {n % 2}" for n in range(50)]
    lines[2] = "1 2 hello"
    (tmp_path / "events.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "job.toml").write_text(SPEC)
    return tmp_path / "job.toml"


def output(spec, limit: int, *overrides: str, show: int = 20) -> str:
    console = Console(file=io.StringIO(), width=160)
    try_stream(read_stream(spec, overrides), spec.resolve(), limit, console, show)
    return console.file.getvalue()


def test_it_shows_samples_rejections_slots_and_rates(spec):
    shown = output(spec, 5)
    assert "0.5" in shown and "3 4" in shown and "1 4 " not in shown
    assert "unparsable" in shown and "slot 'item': 'hello' at byte 5" in shown
    assert "mean count" in shown and "~4" in shown
    assert "5 events, 4 samples, 1 rejected" in shown and "samples/s" in shown


def test_only_so_many_events_are_read(spec):
    assert "50 events, 49 samples" in output(spec, 1000)
    assert "1 events, 1 samples" in output(spec, 1)


def test_the_limit_is_of_events_read_and_show_of_samples_printed(spec):
    shown = output(spec, 50, show=3)
    assert "50 events, 49 samples" in shown and "... and 46 more samples (--show)" in shown
    assert sum("0.5" in line for line in shown.splitlines()) == 3
    assert "... and 49 more samples" in output(spec, 50, show=0)


@pytest.mark.parametrize("name", ["event", "error"])
@pytest.mark.parametrize("pipe", ['pipe={kind="columns"}', 'pipe.protocol="arrow"'])
def test_a_slot_named_like_a_column_of_answers_is_refused_as_a_start_does(spec, pipe, name):
    with pytest.raises(SpecError, match=f"slot '{name}': the arrow protocol reserves this name; rename the slot"):
        output(spec, 5, pipe, f'slots.1.name="{name}"', "slots.1.size=1")


def test_many_events_are_tried_without_printing_or_keeping_them(spec, monkeypatch):
    """Three samples are made into text, however many events are read."""
    cells = []
    monkeypatch.setattr(command, "cell", lambda samples, name, row: cells.append((len(samples), row)) or "")
    (spec.parent / "events.txt").write_text("1 1 1 2 1 0.5 1 1\n" * 20_000)
    assert "20000 events, 20000 samples" in output(spec, 20_000, show=3)
    assert {size for size, _ in cells} == {3} and {row for _, row in cells} == {0, 1, 2}


def test_it_says_where_the_time_went(spec):
    assert "s waiting for the pipe command and" in output(spec, 5) and "hint" not in output(spec, 5)


def test_a_command_that_takes_most_of_the_time_is_told_with_what_helps(spec):
    (spec.parent / "events.txt").write_text("1 1 1 2 1 0.5 1 1\n" * 1_000)
    shown = output(spec, 1_000, 'pipe.command=["sh", "-c", "sleep 0.5; cat"]')
    assert "hint: most of the time is spent in the pipe command" in shown and "generate_columns" in shown


@pytest.mark.parametrize(
    ("times", "pipe", "words"),
    [
        ((0.1, 9.0, 0.5), {}, 'generate_columns and uses protocol = "arrow"; pipe.processes = 4 runs that many'),
        ((0.1, 36.0, 0.5), {"processes": 4, "protocol": "arrow"}, "if it defines generate_columns$"),
        ((0.1, 2.0, 7.0), {}, 'protocol = "arrow" is faster to parse'),
        ((0.1, 2.0, 7.0), {"protocol": "arrow"}, "pipe.processes = 4 parses in parallel"),
        ((9.0, 2.0, 1.0), {}, "plain files are faster to read than gzip"),
        ((3.0, 4.0, 3.0), {}, None),
    ],
)
def test_advice_is_of_the_part_that_dominates(times, pipe, words):
    source_s, pipe_s, parse_s = times
    tally = PassTally(num_events=5_000, num_samples=5_000, source_s=source_s, pipe_s=pipe_s, parse_s=parse_s)
    section = PipeSection.model_validate({"command": ("cat",), **pipe})
    told = list(timing_hints(tally, 10.0, section, FilesSource(kind="files", paths=("x",)), num_cores=4))
    assert [bool(re.search(words, line)) for line in told] == [True] if words else told == []


def test_it_ends_with_1_where_every_event_is_rejected(spec, capsys):
    (spec.parent / "events.txt").write_text("1 2 hello\n" * 7)
    assert exit_code_of(lambda: main(["--spec", str(spec)])) == 1
    told = capsys.readouterr()
    assert "no sample from 7 events: all were rejected; the first: events.txt at 0" in told.err
    assert "unparsable" in told.out


def test_many_slots_are_shown_one_a_row(spec):
    shown = output(
        spec,
        3,
        'slots.0.names=["C{1..12}"]',
        'pipe.command=["sed", "s/.*/1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 9 1 0/"]',
    )
    assert "sample 1" in shown and "C12" in shown


def test_overrides_and_errors_are_those_of_the_spec(spec):
    with pytest.raises(SpecError, match=r"pipe\.command: 'nope': no such program"):
        main(["--spec", str(spec), "--set", 'pipe.command=["nope"]'])
    with pytest.raises(SpecError, match="pipe.proces: unknown key; did you mean 'processes'"):
        main(["--spec", str(spec), "--set", "pipe.proces=1"])


def test_what_stops_a_job_at_a_bad_event_does_not_stop_a_try(spec):
    assert "1 rejected" in output(spec, 5, 'pipe.on_bad_event="fail"')
    assert not (spec.parent / "dead_letters").exists()


def test_the_first_positions_are_taken_partition_after_partition():
    partitions = [Partition("a", 0, 5, 7, 9, True), Partition("b", 1, 0, 0, 0, True), Partition("c", 2, 0, 0, 9, True)]
    assert list(first_segments(partitions, 4)) == [Segment("a", 0, 7, 9), Segment("c", 2, 0, 2)]


def test_weights_and_text_are_shown_as_they_are(spec):
    spec.write_text(
        '[sources.lines]\nkind = "files"\npaths = ["events.txt"]\n[pipe]\ncommand = ["cat"]\n'
        '[[slots]]\nname = "title"\nkind = "meta"\ntype = "string"\n'
    )
    (spec.parent / "events.txt").write_text("1 hällo\n")
    assert "hällo" in output(spec, 1)
