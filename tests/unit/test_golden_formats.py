"""Files of every released format number stay readable: log and manifest as format 1 wrote them."""

from pathlib import Path

from trainer.commits import Commits
from trainer.history import History
from trainer.log import Kind, read

GOLDEN = Path(__file__).parents[1] / "golden" / "formats-1"


def test_the_log_of_format_1_says_what_it_said():
    records = read(GOLDEN / "log")
    kinds = [Kind.CLAIM, Kind.OPERATION, Kind.PLAN, Kind.PLAN, Kind.CLOSE, Kind.CLAIM, Kind.VOID, Kind.PLAN, Kind.CLOSE]
    assert [record.kind for record in records] == kinds
    assert [record.number for record in records] == list(range(1, 10))
    history = History.of(records)
    assert (history.timeline, history.base, history.generation, history.closed) == ("t1", None, 2, 3)
    assert sorted(history.plans) == [1, 3] and sorted(history.voids) == [2] and sorted(history.closes) == [1, 3]
    assert history.spec == {"name": "golden"}
    segment = {"partition": "t/0", "number": 0, "begin": 20, "end": 30, "identity": "a"}
    assert history.plans[3].body == {"number": 3, "segments": [[segment], []], "learn": True}
    digests = {"dense": "d0", "pushes": "p0", "metrics": "m0"}
    counts = {"day": 0, "events": 10, "samples": 12, "rejected": {"not UTF-8": 1}}
    assert history.closes[3].body == {"number": 3, **counts, "digests": digests}


def test_the_manifest_of_format_1_says_what_it_said():
    (commit,) = Commits(GOLDEN).whole()
    assert (commit.name, commit.order, commit.version, commit.timeline) == ("t1-0000000003-g2", (1, 3, 2), 3, "t1")
    assert (commit.log_from, commit.num_rows, commit.num_bytes) == (9, 4, 14)
    assert commit.manifest["positions"] == {"t/0": 30} and commit.state["spec"] == {"name": "golden"}
    (part,) = commit.shards
    assert (part.folder, part.buckets) == ("shard-0", (0, 4096))
    assert part.tables["default"]["rows_by_group"] == {"0": 3, "7": 1}
    assert commit.files["shard-0/default/000009.sst"] == part.files["shard-0/default/000009.sst"]
