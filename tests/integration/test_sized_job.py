"""`headrace size` on a whole job: what it tells of the events that it measured is what a run of them has."""

import json

import pytest

from tests.integration.stream_job import headrace, write_job


@pytest.mark.long
def test_a_job_is_measured_in_a_store_that_is_gone_afterwards(tmp_path):
    job = write_job(tmp_path)
    options = ["--events", "1179", "--days", "1", "--sample", "5000", "--json"]
    run = headrace(job, command="size", options=options)
    assert run.code == 0, run.output
    found, _ = json.JSONDecoder().raw_decode(run.output)  # what it says meanwhile comes after it
    (table,), measured = found["tables"], found["measured"]
    assert measured["events"] == found["events_sampled"] == 3 * 400 - 21
    assert table["rows"] == table["low"] == table["high"] == measured["rows"]["default"] > 300
    assert table["memory_bytes"] == measured["row_memory_bytes"]["default"]
    assert found["cores"].keys() >= {"trainer-0", "shard-0"}  # 0 where a part used less than a tick between two looks
    assert min(found["push_bytes_step"], found["pull_bytes_step"]) > 64 * 3 * 4  # three slots, a key and a weight each
    assert (found["trainers"], found["shards"]) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []
