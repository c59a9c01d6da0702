"""Which stream a file is a part of, and where it comes in it."""

import pytest

from headrace.config import validate
from headrace.dataset.sources.file_order import FileOrder
from headrace.dataset.sources.files import FilesSource, FileStream
from headrace.dataset.spec.path_pattern import Pattern
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.trainer.journal.partitions import present_partitions, with_new_partitions
from headrace.trainer.journal.pass_plan import streams


def orders(*texts, by=None):
    return FileOrder([Pattern(text) for text in texts], by)


def test_all_files_are_one_stream_by_the_fields_of_their_pattern():
    order = orders("logs/{day}/{hour}/*.jsonl")
    path = "logs/2024-05-01/9/part-0.jsonl"
    assert order.stream(0, path) == "files" and order.period(0, path) == ("2024-05-01", "9")
    assert orders("*.jsonl").period(0, "a.jsonl") == ()


def test_a_field_that_partitions_makes_streams_and_is_no_time():
    order = orders("{day}/{shard}-{hour}.txt", by="shard")
    assert order.stream(0, "1/b-7.txt") == "shard=b" and order.period(0, "1/b-7.txt") == ("1", "7")
    assert order.stream(0, "1/-7.txt") == "shard="


def test_a_field_that_stands_twice_is_one_time():
    assert orders("{day}/{day}-{hour}.txt").period(0, "1/1-5.txt") == ("1", "5")


def test_patterns_of_the_same_fields_are_one_listing_and_others_come_one_after_another():
    assert orders("a/{day}/*", "b/{day}/*").period(1, "b/3/x") == ("3",)
    assert orders("old/*", "new/{day}/*").period(1, "new/3/x") == ("1", "3")
    assert orders("second.txt", "first.txt").period(0, "second.txt") == ("0",)


def read_in_order(folder, config, known=None):
    """Names by stream as a job reads them: by what its log says."""
    source = FileStream(config, folder, known or ())
    seen = source.partitions(Deadline.after(5))
    registry, _ = with_new_partitions(known or {}, seen, source.bounded)
    source.close()
    return [[p.name for p in stream] for stream in streams(present_partitions(registry, seen, {}, []))], registry


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")


def test_the_order_is_the_same_after_a_restart_and_a_late_file_takes_its_place(tmp_path):
    write(tmp_path, "b/2", "b/10", "a/1")
    config = FilesSource(kind="files", paths=("b/*", "a/*"), follow=True, poll=0.0)
    names, known = read_in_order(tmp_path, config)
    assert names == [["b/2", "b/10", "a/1"]]
    assert read_in_order(tmp_path, config, known)[0] == names
    write(tmp_path, "b/9")
    names, known = read_in_order(tmp_path, config, known)
    assert names == [["b/2", "b/9", "b/10", "a/1"]] and known["b/9"].number == 3


def test_files_of_the_same_hour_in_two_folders_are_neighbours(tmp_path):
    write(tmp_path, "clicks/9/a", "clicks/10/a", "views/9/a", "views/10/a")
    config = FilesSource(kind="files", paths=("clicks/{hour}/*", "views/{hour}/*"))
    assert read_in_order(tmp_path, config)[0] == [["clicks/9/a", "views/9/a", "clicks/10/a", "views/10/a"]]


def test_declared_partitions_are_streams_of_their_own(tmp_path):
    write(tmp_path, "1/s0.txt", "2/s0.txt", "1/s1.txt", "10/s1.txt")
    config = FilesSource(kind="files", paths=("{day}/{shard}.txt",), partition_by="{shard}")
    assert read_in_order(tmp_path, config)[0] == [["1/s0.txt", "2/s0.txt"], ["1/s1.txt", "10/s1.txt"]]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("shard", r'"shard" is not a field; write it as in paths, like "\{shard\}"'),
        ("{hour}", r'"\{hour\}" is not in paths.1, "b/\{shard\}"'),
    ],
)
def test_a_field_that_is_in_no_path_is_refused_with_the_path(by, message):
    raw = {"kind": "files", "paths": ["{hour}/{shard}", "b/{shard}"], "partition_by": by}
    with pytest.raises(SpecError, match=message):
        validate(FilesSource, raw)
