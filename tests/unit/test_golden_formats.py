"""Files of every released format stay readable: log and manifest of formats 1 and 2."""

import json
import re
import shutil
from pathlib import Path

import pytest

from headrace.codec import plain
from headrace.dataset.stream.source import Partition
from headrace.errors import HeadraceError
from headrace.service.cluster.store import check_free
from headrace.trainer.checkpoint.commits import MANIFEST, Commits, manifest_fields, manifest_text
from headrace.trainer.checkpoint.rewind import known_partitions, positions
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import RecordKind, read
from headrace.trainer.journal.partitions import KnownPartition, present_partitions
from headrace.trainer.journal.pass_plan import PassPlan, cut
from headrace.trainer.journal.records import PassClose

GOLDEN = Path(__file__).parents[1] / "golden" / "formats-1"
GOLDEN_2 = GOLDEN.parent / "formats-2"


def test_the_log_of_format_1_is_readable():
    records = read(GOLDEN / "log")
    kinds = [
        RecordKind.CLAIM,
        RecordKind.OPERATION,
        RecordKind.PLAN,
        RecordKind.PLAN,
        RecordKind.CLOSE,
        RecordKind.CLAIM,
        RecordKind.VOID,
        RecordKind.PLAN,
        RecordKind.CLOSE,
    ]
    assert [record.kind for record in records] == kinds
    assert [record.number for record in records] == list(range(1, 10))
    history = JobHistory.of(records)
    assert (history.timeline, history.base, history.generation, history.closed) == ("t1", None, 2, 3)
    assert sorted(history.plans) == [1, 3] and sorted(history.voids) == [2] and sorted(history.closes) == [1, 3]
    assert history.spec == {"name": "golden"}
    segment = {"partition": "t/0", "number": 0, "begin": 20, "end": 30, "identity": "a"}
    assert plain(history.plans[3].content) == {"number": 3, "segments": ((segment,), ()), "learn": True}
    digests = {"dense": "d0", "pushes": "p0", "metrics": "m0"}
    counts = {"day": 0, "events": 10, "samples": 12, "rejected": {"not UTF-8": 1}}
    assert history.closes[3].content == PassClose(number=3, **counts, digests=digests)


def test_the_manifest_of_format_1_is_readable():
    (commit,) = Commits(GOLDEN).whole()
    assert (commit.name, commit.order, commit.version, commit.timeline) == ("t1-0000000003-g2", (1, 3, 2), 3, "t1")
    assert (commit.log_from, commit.num_rows, commit.num_bytes) == (9, 4, 14)
    assert commit.manifest.positions == {"t/0": 30} and commit.state["spec"] == {"name": "golden"}
    (part,) = commit.shards
    assert (part.folder, part.buckets) == ("shard-0", (0, 4096))
    assert part.tables["default"].rows_by_group == {0: 3, 7: 1}
    assert commit.files["shard-0/default/000009.sst"] == part.files["shard-0/default/000009.sst"]


@pytest.mark.parametrize("store", [GOLDEN, GOLDEN_2, GOLDEN.parent / "store-of-defaults-1" / "store"])
def test_a_manifest_that_was_read_is_written_as_it_was(store):
    (commit,) = Commits(store).whole()
    assert json.loads(manifest_text(commit.manifest)) == json.loads((commit.folder / MANIFEST).read_bytes())
    assert list(plain(commit.manifest)) == list(manifest_fields(commit))


HOURS = {
    "logs/9/a.txt": KnownPartition("logs/9/a.txt", 0, 0, 8, "1:0", "files", ("9",)),
    "logs/10/a.txt": KnownPartition("logs/10/a.txt", 1, 0, 11, "1:1", "files", ("10",)),
    "logs/8/a.txt": KnownPartition("logs/8/a.txt", 2, 0, 4, "1:2", "files", ("8",)),
}
"""Two files in order; then one that is late, and more lines of the second."""


def test_the_log_of_format_2_is_readable():
    history = JobHistory.of(read(GOLDEN_2 / "log"))
    assert known_partitions(history, None) == HOURS
    ranges = [
        [[(s.number, s.begin, s.end) for s in rank] for rank in history.plans[n].content.segments] for n in (1, 2, 3)
    ]
    assert ranges == [[[(0, 0, 5)], [(0, 5, 8), (1, 0, 2)]], [[(1, 2, 5)], [(1, 5, 8)]], [[(2, 0, 4)], [(1, 8, 11)]]]


def test_the_manifest_of_format_2_is_readable_and_a_job_continues_in_the_same_order():
    (commit,) = Commits(GOLDEN_2).whole()
    history = JobHistory.of([])
    known = known_partitions(history, commit)
    assert (commit.name, known) == ("t1-0000000003-g1", HOURS)
    now = [Partition(name, 9, 0, 0, each.end, True, each.identity) for name, each in reversed(HOURS.items())]
    again = PassPlan(1, cut(present_partitions(known, now, {}, []), {}, 10, 1))
    assert [(s.number, s.begin, s.end) for s in again.segments[0]] == [(2, 0, 4), (0, 0, 6)]
    assert positions(history, commit) == {name: each.end for name, each in HOURS.items()}


def newer_log(folder):
    for path in (folder / "log").glob("*.log"):
        path.write_bytes(re.sub(rb"^[0-9]+ ", b"99 ", path.read_bytes(), flags=re.M))
    return lambda: read(folder / "log")


def newer_manifest(folder):
    (path,) = folder.glob("commits/*/manifest.json")
    path.write_text(re.sub(r'"format": ?[0-9]+', '"format": 99', path.read_text()))
    return lambda: Commits(folder).read(path.parent.name)


def newer_store(folder):
    (folder / "headrace.json").write_text('{"kind": "store", "format": 99}')
    return lambda: check_free(folder, "golden", fresh=False)


@pytest.mark.parametrize("store", [GOLDEN, GOLDEN_2], ids=lambda store: store.name)
@pytest.mark.parametrize("newer", [newer_log, newer_manifest, newer_store])
def test_a_newer_format_is_refused_by_name_with_what_to_do_and_nothing_is_changed(tmp_path, store, newer):
    shutil.copytree(store, tmp_path / "store")
    open_it = newer(tmp_path / "store")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "store").rglob("*")) if path.is_file()}
    with pytest.raises(HeadraceError, match=r"of format 99.* reads (up to |format )[0-9]; run the newer one"):
        open_it()
    assert {path: path.read_bytes() for path in sorted((tmp_path / "store").rglob("*")) if path.is_file()} == before
