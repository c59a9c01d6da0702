"""Output of a job's processes: kept in bounded files, and read on from any position."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.durable import SymbolicLinkFound
from headrace.service.jobs.host import LineFilter, LineLevel
from headrace.service.jobs.output_files import FILES, OutputWriter, files_of, read_lines


def write(folder, *texts, worker="trainer-0", max_bytes=1 << 20):
    output = OutputWriter(folder, max_bytes)
    for text in texts:
        output.write(worker, text)
    output.close()


def texts(found):
    return [line.text for line in found]


def test_lines_come_back_as_they_were_with_their_worker_and_time(tmp_path):
    write(tmp_path, "a: b", "  c", "", "ü\r")
    found = read_lines(tmp_path, None, 0, 100)
    assert texts(found) == ["a: b", "  c", "", "ü\r"]
    assert {line.worker for line in found} == {"trainer-0"} and all(line.at.endswith("Z") for line in found)


def test_read_on_from_the_last_line_only_new_ones_come(tmp_path):
    write(tmp_path, "1", "2")
    first = read_lines(tmp_path, None, 0, 1)
    assert texts(first) == ["1"]
    write(tmp_path, "3")
    assert texts(read_lines(tmp_path, None, first[-1].after, 100)) == ["2", "3"]
    assert read_lines(tmp_path, None, read_lines(tmp_path, None, 0, 100)[-1].after, 100) == []


def test_lines_of_one_worker_and_the_last_ones(tmp_path):
    write(tmp_path, "1")
    write(tmp_path, "s", worker="shard-0")
    write(tmp_path, "2", "3")
    assert texts(read_lines(tmp_path, LineFilter("trainer-0"), 0, 2)) == ["1", "2"]
    assert texts(read_lines(tmp_path, LineFilter("trainer-0"), -1, 2)) == ["2", "3"]
    assert texts(read_lines(tmp_path, LineFilter("shard-0"), -1, 100)) == ["s"]
    assert read_lines(tmp_path, LineFilter("shard-7"), 0, 100) == []


def test_lines_are_chosen_by_text_and_by_level_and_a_traceback_has_that_of_its_error(tmp_path):
    said = ["12:00:00 INFO  a: begins", "12:00:01 ERROR a: Boom", "Traceback:", "  line 3", "12:00:02 INFO  a: goes on"]
    write(tmp_path, *said)
    assert texts(read_lines(tmp_path, LineFilter(level=LineLevel.WARNING), -1, 9)) == said[1:4]
    assert texts(read_lines(tmp_path, LineFilter(text="BOOM"), -1, 9)) == [said[1]]
    assert texts(read_lines(tmp_path, LineFilter(text="line", level=LineLevel.ERROR), 0, 9)) == [said[3]]
    assert texts(read_lines(tmp_path, LineFilter(level=LineLevel.INFO), -1, 9)) == said
    (error,) = read_lines(tmp_path, LineFilter(level=LineLevel.ERROR), 0, 1)
    assert texts(read_lines(tmp_path, LineFilter(level=LineLevel.ERROR), error.after, 9)) == said[2:4], "the next page"


def test_a_folder_that_is_not_there_has_no_lines(tmp_path):
    assert read_lines(tmp_path / "none", None, 0, 10) == read_lines(tmp_path / "none", None, -1, 10) == []


def test_files_are_bounded_and_who_reads_behind_them_begins_at_the_oldest(tmp_path):
    numbers = [f"{number:04d}" for number in range(500)]
    write(tmp_path, *numbers, max_bytes=8000)
    sizes = [path.stat().st_size for _, path in files_of(tmp_path)]
    assert len(sizes) == FILES and sum(sizes) <= 8000 + 100
    found = texts(read_lines(tmp_path, None, 0, 1000))
    assert found == numbers[-len(found) :] and 100 < len(found) < 500
    assert texts(read_lines(tmp_path, None, -1, 60)) == numbers[-60:]


def test_a_line_that_a_kill_cut_off_does_not_swallow_the_next(tmp_path):
    write(tmp_path, "1")
    [(_, path)] = files_of(tmp_path)
    with path.open("ab") as file:
        file.write(b"2026-01-01T00:00:00.000Z trainer-0: hal")
    assert texts(read_lines(tmp_path, None, 0, 10)) == ["1"]
    write(tmp_path, "2")
    assert texts(read_lines(tmp_path, None, 0, 10)) == ["1", "hal", "2"]


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path, monkeypatch):
    output = OutputWriter(tmp_path, 1 << 20)
    monkeypatch.setattr(output, "_append", lambda data: (_ for _ in ()).throw(OSError(28, "no room")))
    output.write("trainer-0", "lost")
    monkeypatch.undo()
    output.write("trainer-0", "kept")
    output.close()
    assert texts(read_lines(tmp_path, None, 0, 10)) == ["kept"]


@given(
    written=st.lists(
        st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60), max_size=40
    ),
    step=st.integers(1, 7),
    place=st.integers(0, 4000),
)
def test_read_in_steps_every_line_comes_once_and_any_place_is_answered(tmp_path_factory, written, step, place):
    folder = tmp_path_factory.mktemp("output")
    write(folder, *written, max_bytes=1 << 20)
    found, after = [], 0
    while part := read_lines(folder, None, after, step):
        found += part
        after = part[-1].after
    assert texts(found) == written
    behind = [
        line.text for line, begin in zip(found, [0, *(line.after for line in found)], strict=False) if begin >= place
    ]
    assert texts(read_lines(folder, None, place, 1000)) == behind


@pytest.mark.parametrize("limit", [0, 1])
def test_no_more_lines_than_asked_for(tmp_path, limit):
    write(tmp_path, "1", "2")
    assert len(read_lines(tmp_path, None, -1, limit)) == limit


def test_a_link_in_place_of_a_file_is_neither_read_nor_written(tmp_path):
    """Else viewers would read any file of the machine, and a job's output would go into it."""
    secret = tmp_path / "secret"
    secret.write_text("a secret\n")
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "00000000000000000000.log").symlink_to(secret)
    for after in (0, -1):
        with pytest.raises(SymbolicLinkFound, match="is a symbolic link"):
            read_lines(folder, None, after, 10)
    with pytest.raises((SymbolicLinkFound, OSError)):
        OutputWriter(folder, 1 << 20)
    assert secret.read_text() == "a secret\n"


def test_what_is_no_file_has_no_lines(tmp_path):
    os.mkfifo(tmp_path / "00000000000000000000.log")
    (tmp_path / "\u0661.log").write_text("1\n")
    assert read_lines(tmp_path, None, 0, 10) == []
