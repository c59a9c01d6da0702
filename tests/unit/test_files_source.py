import logging

import pytest

from headrace.dataset.sources import files
from headrace.dataset.sources.files import FilesSource, FileStream
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Segment, is_same
from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError


def source(tmp_path, *paths: str, **settings) -> FileStream:
    return FileStream(FilesSource(kind="files", paths=paths, poll=0.0, **settings), tmp_path)


def write(tmp_path, name: str, text: str = "x\n") -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    with (tmp_path / name).open("a") as file:
        file.write(text)


def soon() -> Deadline:
    return Deadline.after(5)


def ends(source: FileStream) -> dict[str, int]:
    return {partition.name: partition.end for partition in source.partitions(soon())}


def read(source: FileStream, name: str, begin: int, end: int) -> list[bytes | None]:
    return read_segment(source, Segment(name, 0, begin, end))


def read_segment(source: FileStream, segment: Segment) -> list[bytes | None]:
    return [block.value(i) for block in source.read(segment, soon()) for i in range(len(block))]


def test_no_file_is_an_error_that_names_glob_and_folder(tmp_path):
    write(tmp_path, "a.txt")
    with pytest.raises(SpecError, match=rf"paths\.1: no file matches '\*\.jsonl' in {tmp_path}"):
        source(tmp_path, "*.txt", "*.jsonl")


def test_partitions_keep_the_order_of_the_spec_and_a_file_is_one_partition(tmp_path):
    for name in ("b/1.txt", "b/2.txt", "a/1.txt"):
        write(tmp_path, name)
    assert list(ends(source(tmp_path, "b/*.txt", "a/*.txt", "*/1.txt"))) == ["b/1.txt", "b/2.txt", "a/1.txt"]


def test_a_bounded_source_keeps_the_end_it_found(tmp_path):
    write(tmp_path, "a.txt", "1\n2\n")
    found = source(tmp_path, "*.txt")
    assert ends(found) == {"a.txt": 2}
    write(tmp_path, "a.txt", "3\n")
    write(tmp_path, "b.txt", "1\n")
    assert ends(found) == {"a.txt": 2}


def test_follow_sees_new_lines_and_new_files_last(tmp_path):
    write(tmp_path, "b.txt", "1\n")
    found = source(tmp_path, "*.txt", follow=True)
    assert not found.bounded and ends(found) == {"b.txt": 1}
    write(tmp_path, "b.txt", "2\n3")
    write(tmp_path, "a.txt", "1\n")
    assert list(ends(found).items()) == [("b.txt", 2), ("a.txt", 1)]
    assert not any(partition.final for partition in found.partitions(soon()))
    assert read(found, "b.txt", 0, 2) == [b"1", b"2"]


def test_follow_may_begin_with_nothing(tmp_path):
    found = source(tmp_path, "logs/*.txt", follow=True)
    assert ends(found) == {}
    write(tmp_path, "logs/a.txt")
    assert ends(found) == {"logs/a.txt": 1}


def test_a_pattern_that_has_matched_nothing_yet_is_told(tmp_path):
    write(tmp_path, "a/1.txt")
    found = source(tmp_path, "a/*.txt", "b/*.txt", "c/[12].txt", follow=True)
    assert list(found.missing) == [
        f"no file matches 'b/*.txt' in {tmp_path} (wildcards skip names like _x and .x)",
        f"no file matches 'c/[12].txt' in {tmp_path} (wildcards skip names like _x and .x)",
    ]
    write(tmp_path, "b/1.txt")
    write(tmp_path, "c/2.txt")
    (tmp_path / "a" / "1.txt").unlink()  # it was there once
    assert list(ends(found)) == ["a/1.txt", "b/1.txt", "c/2.txt"] and list(found.missing) == []
    restarted = again(tmp_path, found, "a/*.txt", follow=True)
    assert list(restarted.missing) == []


@pytest.mark.parametrize("format", ["lines", "parquet"])
def test_a_file_that_cannot_be_read_is_bad_input_by_its_name(tmp_path, format):
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")  # an input or output error at its first byte
    found = FileStream(FilesSource(kind="files", paths=("*.txt",), format=format), tmp_path)
    with pytest.raises(BadInput, match=r"a.txt: cannot be read: "):
        found.partitions(soon())


def test_follow_looks_no_more_often_than_asked(tmp_path):
    write(tmp_path, "a.txt", "1\n")
    found = FileStream(FilesSource(kind="files", paths=("*.txt",), follow=True, poll=3600.0), tmp_path)
    assert ends(found) == {"a.txt": 1}
    write(tmp_path, "a.txt", "2\n")
    assert ends(found) == {"a.txt": 1}


def test_a_rank_that_never_asked_for_partitions_reads_new_files_too(tmp_path):
    found = source(tmp_path, "*.txt", follow=True)
    write(tmp_path, "a.txt", "1\n2\n")
    assert read(found, "a.txt", 0, 2) == [b"1", b"2"]


def test_a_followed_file_that_is_deleted_is_final_and_cannot_be_read(tmp_path, caplog):
    write(tmp_path, "a.txt", "1\n2\n")
    found = source(tmp_path, "*.txt", follow=True)
    assert ends(found) == {"a.txt": 2}
    (tmp_path / "a.txt").unlink()
    (partition,) = found.partitions(soon())
    assert partition.final and partition.end == 2
    assert "a.txt was deleted" in caplog.text
    found.close()
    with pytest.raises(SourceGap, match="gone"):
        read(found, "a.txt", 0, 1)


def test_a_followed_file_that_is_cut_is_an_error_that_names_it(tmp_path):
    write(tmp_path, "a.txt", "1\n2\n")
    found = source(tmp_path, "*.txt", follow=True)
    found.partitions(soon())
    (tmp_path / "a.txt").write_text("1\n")
    with pytest.raises(SourceGap, match=r"a\.txt: .*became shorter"):
        found.partitions(soon())


def test_folders_open_by_their_marker_and_late_files_are_counted(tmp_path, caplog):
    for name in ("logs/1/9/a.jsonl", "logs/1/10/a.jsonl", "logs/1/11/a.jsonl", "logs/1/9/_SUCCESS"):
        write(tmp_path, name)
    found = source(tmp_path, "logs/{day}/{hour}/*.jsonl", follow=True, ready="_SUCCESS")
    assert list(ends(found)) == ["logs/1/9/a.jsonl"]
    write(tmp_path, "logs/1/11/_SUCCESS")
    assert list(ends(found)) == ["logs/1/9/a.jsonl"]
    assert "folder logs/1/10 has no _SUCCESS: it and later folders wait" in caplog.text
    write(tmp_path, "logs/1/10/_SUCCESS")
    assert list(ends(found)) == ["logs/1/9/a.jsonl", "logs/1/10/a.jsonl", "logs/1/11/a.jsonl"]
    assert found.num_late_files == 0
    write(tmp_path, "logs/1/9/b.jsonl")
    for _ in range(2):
        assert len(ends(found)) == 3
    assert found.num_late_files == 1
    assert caplog.text.count("late file logs/1/9/b.jsonl") == 1


def test_the_marker_is_no_partition(tmp_path):
    for name in ("logs/1/a", "logs/1/_SUCCESS"):
        write(tmp_path, name)
    assert list(ends(source(tmp_path, "logs/{day}/*", ready="_SUCCESS"))) == ["logs/1/a"]


def test_a_bounded_source_leaves_out_folders_that_are_not_ready(tmp_path, caplog):
    for name in ("logs/1/a", "logs/2/a", "logs/2/_SUCCESS"):
        write(tmp_path, name)
    with caplog.at_level(logging.WARNING):
        assert list(ends(source(tmp_path, "logs/{day}/*", ready="_SUCCESS"))) == ["logs/2/a"]
    assert "logs/1 has no _SUCCESS: it is not read" in caplog.text


def test_no_folder_ready_is_an_error(tmp_path):
    write(tmp_path, "logs/1/a")
    with pytest.raises(SpecError, match="has its marker '_SUCCESS'"):
        source(tmp_path, "logs/{day}/*", ready="_SUCCESS")


def test_many_files_do_not_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 3)
    for number in range(10):
        write(tmp_path, f"{number}.txt", f"{number}\nx\n")
    found = source(tmp_path, "*.txt", follow=True)
    found.partitions(soon())
    for _ in range(2):
        for number in range(10):
            assert read(found, f"{number}.txt", 0, 1) == [b"%d" % number]
    assert len(found._open) <= 3
    assert sum(file._stream is not None for file in found._files.values()) <= 3
    found.close()


def again(tmp_path, found: FileStream, *paths: str, **settings) -> FileStream:
    """The source as a restart opens it."""
    known = [partition.name for partition in found.partitions(soon())]
    return FileStream(FilesSource(kind="files", paths=paths, poll=0.0, **settings), tmp_path, known)


def test_a_folder_opened_before_a_restart_is_not_opened_again_for_files_that_came_too_late(tmp_path):
    for name in ("logs/9/a.jsonl", "logs/9/_SUCCESS", "logs/10/a.jsonl"):
        write(tmp_path, name)
    settings = {"follow": True, "ready": "_SUCCESS"}
    found = source(tmp_path, "logs/{hour}/*.jsonl", **settings)
    assert list(ends(found)) == ["logs/9/a.jsonl"]
    write(tmp_path, "logs/9/b.jsonl")
    write(tmp_path, "logs/10/_SUCCESS")
    restarted = again(tmp_path, found, "logs/{hour}/*.jsonl", **settings)
    assert list(ends(restarted)) == ["logs/9/a.jsonl", "logs/10/a.jsonl"]
    assert restarted.num_late_files == 1


def test_a_bounded_source_opened_again_is_the_one_it_was_even_where_its_files_are_gone(tmp_path):
    for name in ("b.txt", "c.txt"):
        write(tmp_path, name)
    found = source(tmp_path, "*.txt")
    found.partitions(soon())
    write(tmp_path, "a.txt")
    (tmp_path / "b.txt").unlink()
    assert list(ends(again(tmp_path, found, "*.txt"))) == ["c.txt"]


def test_a_rank_that_only_reads_reads_what_it_would_call_late(tmp_path):
    for name in ("logs/9/a.jsonl", "logs/9/_SUCCESS"):
        write(tmp_path, name)
    reader = source(tmp_path, "logs/{hour}/*.jsonl", follow=True, ready="_SUCCESS")
    write(tmp_path, "logs/9/b.jsonl", "1\n")
    rank0 = source(tmp_path, "logs/{hour}/*.jsonl", follow=True, ready="_SUCCESS")
    assert list(ends(rank0)) == ["logs/9/a.jsonl", "logs/9/b.jsonl"]
    assert read(reader, "logs/9/b.jsonl", 0, 1) == [b"1"]


def test_copies_of_a_file_on_other_machines_are_one_partition_also_while_they_grow(tmp_path):
    for name, content in {"a": "1\n2\n", "b": "1\n2\n", "c": "1\n3\n"}.items():
        write(tmp_path, f"{name}/x.txt", content)
    short, copied, other = (source(tmp_path / name, "*.txt", follow=True) for name in "abc")
    (partition,) = short.partitions(soon())
    segment = Segment("x.txt", 0, 0, 2, partition.identity)
    write(tmp_path, "b/x.txt", "1\n2\n" + "3\n" * 100_000)
    assert read_segment(copied, segment) == [b"1", b"2"]
    (grown,) = copied.partitions(soon())
    assert grown.identity.startswith(partition.identity) and is_same(partition.identity, grown.identity)
    assert len(grown.identity) == len("content:") + 8 * 9
    with pytest.raises(SourceGap, match=r"x\.txt is not what it was"):
        read_segment(other, segment)


def test_identities_of_earlier_programs_are_accepted_and_others_compared():
    assert is_same("65024:12", "content:01234567") and is_same("", "a") and is_same("a", "a")
    assert not is_same("a", "b") and not is_same("65024:12", "65024:13")
    assert not is_same("content:01234567", "content:0123456889abcdef")


def test_a_segment_of_a_file_that_was_replaced_is_refused(tmp_path):
    """Known by its first bytes, or by its inode where an earlier program has logged that."""
    write(tmp_path, "a.txt", "1\n2\n")
    found = source(tmp_path, "*.txt", follow=True)
    (partition,) = found.partitions(soon())
    status = (tmp_path / "a.txt").stat()
    old = Segment("a.txt", 0, 0, 2, f"{status.st_dev}:{status.st_ino}")
    assert read_segment(found, old) == [b"1", b"2"]
    write(tmp_path, "other", "x\ny\nz\n")
    (tmp_path / "other").replace(tmp_path / "a.txt")
    segment = Segment("a.txt", 0, 0, 2, partition.identity)
    with pytest.raises(SourceGap, match="replaced"):
        list(found.read(segment, soon()))
    for known in (segment, old):
        with pytest.raises(SourceGap, match=r"a\.txt is not what it was"):
            list(source(tmp_path, "*.txt", follow=True).read(known, soon()))


def test_a_file_put_back_is_followed_again_and_a_new_one_of_its_name_is_an_error(tmp_path):
    write(tmp_path, "a.txt", "1\n")
    found = source(tmp_path, "*.txt", follow=True)
    assert ends(found) == {"a.txt": 1}
    (tmp_path / "a.txt").rename(tmp_path / "away")
    assert found.partitions(soon())[0].final
    (tmp_path / "away").rename(tmp_path / "a.txt")
    write(tmp_path, "a.txt", "2\n")
    (partition,) = found.partitions(soon())
    assert (partition.end, partition.final) == (2, False)
    (tmp_path / "a.txt").rename(tmp_path / "kept")  # so that its inode is not given to the next
    found.partitions(soon())
    write(tmp_path, "a.txt", "1\n2\n3\n")
    with pytest.raises(SourceGap, match="replaced"):
        found.partitions(soon())
