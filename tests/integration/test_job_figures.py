"""Figures of a real job with two trainers and two shards: who sent how much to whom, and who waited."""

import sys

import pytest

from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = pytest.mark.long

SLOW_AT = """
import sys, time
for line in sys.stdin:
    if line.split()[-1] == "77":
        time.sleep(0.01)  # the load of the test: only rank 1 reads such lines
    sys.stdout.write(line)
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("figures"))
    ended = headrace(job, "cluster.trainers=2", "cluster.shards=2")
    assert ended.code == 0, ended.output
    return ended.report


def test_the_report_has_the_traffic_of_every_pair_of_workers(report):
    links = report["links"]
    trainers, shards = ("trainer-0", "trainer-1"), ("shard-0", "shard-1")
    assert set(links) == {*trainers, *shards}
    for trainer, other in (trainers, trainers[::-1]):
        assert set(links[trainer]) == {other, *shards}
        assert links[trainer][other]["sent_bytes"] == links[other][trainer]["received_bytes"] > 0
        for shard in shards:
            mine, theirs = links[trainer][shard], links[shard][trainer]
            assert mine["shared_sent_bytes"] == theirs["shared_received_bytes"] > mine["sent_bytes"] > 0
            assert mine["wait_s"] > 0


def test_the_report_has_the_waits_of_each_rank_for_the_others(report):
    waits = report["waits"]
    assert waits["recent_passes"] == report["passes"] == 3
    for span in ("last", "recent"):
        assert [waits[span][rank][rank] for rank in (0, 1)] == [0.0, 0.0]
    assert waits["recent"][0][1] + waits["recent"][1][0] > 0
    assert max(map(max, waits["recent"])) < waits["recent_s"] < report["wall_s"]


def test_a_trainer_with_a_slow_pipe_is_named(tmp_path):
    job = write_job(tmp_path, num_parts=2, spec=SPEC.replace('["cat"]', f'["{sys.executable}", "slow.py"]'))
    (tmp_path / "slow.py").write_text(SLOW_AT)
    for part in (tmp_path / "part-0.txt", tmp_path / "part-1.txt"):  # a pass is a file, its second half is for rank 1
        lines = part.read_text().splitlines()
        slow = [f"{line.rpartition(' ')[0]} 77" for line in lines[len(lines) // 2 :]]
        part.write_text("".join(f"{line}\n" for line in [*lines[: len(lines) // 2], *slow]))
    ended = headrace(job, "cluster.trainers=2", "cluster.shards=2")
    assert ended.code == 0, ended.output
    found, waits = ended.report["straggler"], ended.report["waits"]
    assert (found["rank"], found["part"]) == (1, "pipe"), found
    assert waits["recent"][0][1] > waits["recent"][1][0]
    assert f"straggler {found['text']}" in ended.output
