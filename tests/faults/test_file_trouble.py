"""What a job sees of files that are truncated, replaced or deleted while it runs and while it is down."""

import os

import pytest

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.sources.files import FilesSource, FileStream
from headrace.dataset.spec.config import PipeSection, SourceSection
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import SourceGap
from headrace.trainer.rank0.planner import StreamEnded
from tests.faults.stream_side import StreamSide

FOLLOWED = FilesSource(kind="files", paths=("*.txt",), poll=0.0, follow=True)
BOUNDED = FilesSource(kind="files", paths=("*.txt",))
LINES = b"".join(b"line %d\n" % n for n in range(10))
OTHERS = LINES.upper()
"""As long as LINES."""


def side(folder, config):
    return StreamSide(lambda known: FileStream(config, folder, known))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_bytes(LINES)
    return tmp_path / "a.txt"


@pytest.fixture
def job(path):
    return side(path.parent, FOLLOWED)


@pytest.fixture(params=["running", "down"])
def started(request, job):
    """The job after its first pass, and the planner that goes on: the same, or None for a new one."""
    planner = job.start()
    assert len(job.trains(planner)) == 10
    if request.param == "running":
        yield job, planner
    planner.close()
    if request.param == "down":
        yield job, None


def replace(path, data):
    other = path.with_suffix(".new")
    other.write_bytes(data)
    os.replace(other, path)


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_grows_is_read_on(started, path):
    job, planner = started
    append(path, b"more\n")
    assert job.trains(planner) == [b"more"]


def test_a_truncated_file_stops_the_job(started, path):
    job, planner = started
    os.truncate(path, len(b"line 0\n" * 4))
    job.fails(planner, r"a\.txt.*(became shorter|ends at position 4, but it once reached 10)")


def test_a_file_truncated_and_regrown_to_less_than_it_was_stops_the_job(started, path):
    job, planner = started
    os.truncate(path, 0)
    append(path, b"new\n" * 9)
    job.fails(planner, r"a\.txt.*(became shorter|is not what it was)")


@pytest.mark.parametrize("data", [b"new\n" * 3, OTHERS, b"new\n" * 99])
def test_a_replaced_file_stops_the_job_however_long_the_new_one_is(started, path, data):
    job, planner = started
    replace(path, data)
    job.fails(planner, r"a\.txt.*(was replaced|is not what it was .*--fresh)")


def test_a_copy_in_the_place_of_a_file_is_the_same_file_to_a_job_that_starts_again(job, path):
    """As it is on another machine."""
    planner = job.start()
    assert len(job.trains(planner)) == 10
    planner.close()
    replace(path, LINES + b"more\n")
    assert job.trains() == [b"more"]


def test_a_deleted_file_that_was_read_does_not_hold_up_the_others(started, path, caplog):
    job, planner = started
    path.unlink()
    (path.parent / "b.txt").write_bytes(b"b\n")
    assert job.trains(planner) == [b"b"]
    assert "a.txt was deleted" in caplog.text or "a.txt is no longer there" in caplog.text
    assert job.numbers == {"a.txt": 0, "b.txt": 1}


def test_files_found_later_keep_their_numbers_whatever_their_names(started, path):
    job, planner = started
    (path.parent / "0.txt").write_bytes(b"0\n")
    assert job.trains(planner) == [b"0"]
    (path.parent / "-.txt").write_bytes(b"-\n")
    assert job.trains() == [b"-"]
    assert job.numbers == {"a.txt": 0, "0.txt": 1, "-.txt": 2}


def test_a_file_that_comes_before_the_present_one_is_read_next_and_counted_as_late(job, path):
    planner = job.start()
    assert len(job.trains(planner)) == 10
    append(path, b"more\n")
    for name in ("0.txt", "b.txt"):
        (path.parent / name).write_bytes(name.encode() + b"\n")
    assert job.trains(planner) == [b"0.txt", b"more", b"b.txt"]
    assert planner.num_late == 1
    planner.close()


def test_a_bounded_stream_ends_where_it_did_whatever_was_written_meanwhile(path):
    job = side(path.parent, BOUNDED)
    planner = job.start()
    assert len(job.trains(planner)) == 10
    append(path, b"more\n")
    (path.parent / "0.txt").write_bytes(b"0\n")
    assert isinstance(job.plans(planner), StreamEnded)
    planner.close()
    job.positions = {}
    assert job.trains() == LINES.splitlines()
    path.unlink()
    job.positions = {"a.txt": 9}
    job.fails(None, r"a\.txt is gone, and its positions 9 to 10 are not read yet.*`headrace skip`")


def test_a_bounded_stream_that_ended_is_looked_at_again_by_the_next_run_and_only_what_is_new_is_read(path, caplog):
    job = side(path.parent, BOUNDED)
    assert len(job.trains()) == 10
    assert isinstance(job.plans(), StreamEnded)  # an identical rerun
    assert len(job.journal.operations) == 1
    append(path, b"more\n")
    (path.parent / "b.txt").write_bytes(b"b\nc\n")
    planner = job.start()
    assert job.trains(planner) == [b"more", b"b", b"c"]
    append(path, b"too late\n")
    assert isinstance(job.plans(planner), StreamEnded)
    planner.close()
    (path.parent / "0.txt").write_bytes(b"0\n")
    assert job.trains() == [b"0", b"too late"]
    assert "late: a.txt, 0.txt" in caplog.text
    assert isinstance(job.plans(), StreamEnded)
    assert job.numbers == {"a.txt": 0, "b.txt": 1, "0.txt": 2}
    names = [[each.name for each in op.partitions] for op in job.journal.operations]
    assert names == [["a.txt"], ["a.txt", "b.txt"], ["a.txt", "0.txt"]]


@pytest.mark.parametrize("data", [b"new\n" * 3, OTHERS, b"new\n" * 99])
def test_a_file_replaced_after_it_was_read_is_named_and_what_is_new_beside_it_is_read(path, caplog, data):
    job = side(path.parent, BOUNDED)
    assert len(job.trains()) == 10
    replace(path, data)
    (path.parent / "b.txt").write_bytes(b"b\n")
    assert job.trains() == [b"b"]
    assert "a.txt was replaced" in caplog.text and "--fresh" in caplog.text
    assert isinstance(job.plans(), StreamEnded)


def test_a_file_cut_or_gone_after_it_was_read_is_named(path, caplog):
    job = side(path.parent, BOUNDED)
    assert len(job.trains()) == 10
    os.truncate(path, 7)
    assert isinstance(job.plans(), StreamEnded)
    assert "a.txt ends at position 1 now, and was read up to 10" in caplog.text
    path.unlink()
    assert isinstance(job.plans(), StreamEnded)
    assert "a.txt is no longer there; it was read up to position 10" in caplog.text


def test_a_job_file_that_names_the_next_day_trains_it_and_one_that_names_nothing_says_so(path, caplog):
    job = side(path.parent, BOUNDED.model_copy(update={"paths": ("a.txt",)}))
    assert len(job.trains()) == 10
    (path.parent / "b.txt").write_bytes(b"b\n")
    next_day = side(path.parent, BOUNDED.model_copy(update={"paths": ("b.txt", "c*.txt")}))
    next_day.known, next_day.positions = job.known, job.positions
    planner = next_day.start()
    assert next_day.plans(planner).positions() == {"b.txt": 1}
    planner.close()
    assert f"now no file matches 'c*.txt' in {path.parent}" in caplog.text


def test_a_file_replaced_while_the_stream_is_read_to_its_end_is_named_too(path, caplog):
    job = side(path.parent, BOUNDED)
    (path.parent / "b.txt").write_bytes(b"b\n" * 5)
    job.passes = job.passes.model_copy(update={"max_events": 10})
    assert len(job.trains()) == 10
    planner = job.start()
    assert job.trains(planner) == [b"b"] * 5
    replace(path, OTHERS * 2)
    assert isinstance(job.plans(planner), StreamEnded)
    planner.close()
    assert "a.txt was replaced" in caplog.text


def test_a_file_that_a_logged_plan_needs_and_that_is_gone_is_named_with_the_pass_and_what_to_do(job, path):
    plan = job.plans()
    path.unlink()
    source = FileStream(FOLLOWED, path.parent)
    reader = SegmentReader(source, PipeSection(command=("cat",)), Schema.of(()), SourceSection(), None, path.parent)
    with pytest.raises(SourceGap, match=r"pass 1 .*positions 0 to 10 of a\.txt.*it was deleted.*`headrace skip`"):
        list(reader.read(1, plan.segments[0], PassTally()))
    reader.close()
