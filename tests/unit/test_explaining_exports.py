"""`headrace explain` says which exports a key is in: rows and tombstones of the newest chain, by a bounded search."""

import pyarrow.parquet as pq
import pytest

from headrace.deadline import Deadline
from headrace.service.exports import key_search
from headrace.service.spec.job import load_job
from headrace.trainer.exports.reader import open_export
from tests.fakes.exports import key, write_export
from tests.integration.stream_job import SPEC

ROWS = {("a", sign): [1, 2, 3, 4, 5] for sign in range(1, 200)}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SPEC + '[exports.main]\npath = "out"\n[exports.more]\n')
    folder = tmp_path / "out" / "small" / "t1"
    write_export(folder, "base", 3, ROWS, rows_a_file=17)
    write_export(folder, "delta", 5, {("b", 9): [0] * 5}, [("a", 7)], parent=(3, "base"))
    unfinished = write_export(folder, "delta", 6, {("a", 500): [0] * 5}, parent=(5, "delta"))
    (unfinished / "_DONE").unlink()
    return load_job(path)


def lines_of(job, slot, sign):
    return list(
        key_search.format_exports(key_search.exports_with_key(job, "default", key(slot, sign), Deadline.after(20)))
    )


def test_a_key_is_found_in_the_newest_complete_chain_of_each_stream(job):
    main, more = lines_of(job, "a", 5)
    assert main == (
        "exports of main: in 0000000003-base (as a row); a server that loads them up to t1/0000000005-delta has the key"
    )
    assert more == "exports of more: no export is complete yet"
    assert lines_of(job, "a", 7)[0].endswith(
        "in 0000000003-base (as a row), 0000000005-delta (as a tombstone); "
        "a server that loads them up to t1/0000000005-delta no longer has the key"
    )
    assert lines_of(job, "a", 500)[0] == (
        "exports of main: the key is in none of the 2 exports that make up t1/0000000005-delta"
    ), "an export that is not complete is none"


def test_every_row_is_found_in_files_of_many_row_groups_and_nothing_else_is(tmp_path):
    path = write_export(tmp_path, "base", 1, ROWS, rows_a_file=50)
    for file in path.glob("rows-*.parquet"):
        pq.write_table(pq.read_table(file), file, row_group_size=6, write_statistics=False)
    export = open_export(str(path), tmp_path / "scratch")
    for sign in range(300):
        search = key_search.KeySearch("default", key("a", sign), Deadline.after(20))
        assert search.kind(export) == ("row" if ("a", sign) in ROWS else None)
    assert key_search.KeySearch("other", key("a", 5), Deadline.after(20)).kind(export) is None


def test_what_cannot_be_looked_into_is_said_and_no_reason_to_stop(job, tmp_path):
    for file in (tmp_path / "out").rglob("tombstones-*.parquet"):
        file.unlink()
    main, more = lines_of(job, "a", 7)
    assert main.startswith("exports of main: cannot be searched: ") and "is missing" in main
    assert more == "exports of more: no export is complete yet"


def test_a_job_without_exports_says_nothing_of_them(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SPEC)
    assert key_search.exports_with_key(load_job(path), "default", 1, Deadline.after(5)) == []
