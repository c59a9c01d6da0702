"""`python -m dataset`: how a user tries a generator before training."""

import io

import pytest
from rich.console import Console

from dataset.__main__ import first_segments, main, try_stream
from dataset.source import Partition, Segment
from dataset.spec import read_stream
from millrace.errors import SpecError

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


def output(spec, limit: int, *overrides: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    try_stream(read_stream(spec, overrides), spec.resolve(), limit, console)
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
