"""What a user sees when a job starts again on a stream that changed while it was down."""

import os

import pytest

from headrace.lifecycle import ExitCode
from tests.faults.test_kafka_trouble import add_partition, drop_before, recreate
from tests.integration.running_job import RunningJob, assert_gone
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

FOLLOW = changed(SPEC, {"sources.lines.follow": True, "sources.lines.poll": "100ms"})
KAFKA = changed(SPEC, {"sources.lines": {"kind": "kafka", "topics": ["later"]}})


def kill_after(job, folder, num_events, *settings):
    """Run until so many events are trained, then kill everything at once."""
    running = RunningJob(job, folder, *settings)
    try:
        running.until_events(num_events)
    finally:
        running.kill()
    assert_gone(running)


def goes_on(job, folder, num_events, *settings):
    """Run until so many events are trained in all, and end in peace; the report."""
    running = RunningJob(job, folder, *settings)
    try:
        running.until_events(num_events)
        running.process.terminate()
        code, said = running.end()
    finally:
        running.kill()
    assert code == 0, said
    return running.report


def refused(job, words, *settings):
    """The job starts, says why it cannot go on, and ends."""
    ended = headrace(job, *settings)
    assert ended.code == ExitCode.FAILED, ended.output
    assert words in ended.output
    assert "Traceback" not in ended.output
    assert ended.report is None


@pytest.mark.slow
def test_a_followed_file_replaced_while_the_job_was_down_is_refused_until_the_old_one_is_back(tmp_path):
    job = write_job(tmp_path, num_parts=2, spec=FOLLOW)
    path, kept = tmp_path / "part-1.txt", tmp_path / "kept"
    kill_after(job, tmp_path, 793)
    path.rename(kept)
    path.write_bytes((tmp_path / "part-0.txt").read_bytes() * 2)
    refused(job, "part-1.txt is not what it was when the job began to read it")
    os.replace(kept, path)
    (tmp_path / "part-00.txt").write_bytes((tmp_path / "part-0.txt").read_bytes())
    report = goes_on(job, tmp_path, 1_193)
    assert report["events"] == 1_193
    assert report["positions"] == {"part-0.txt": 400, "part-1.txt": 393, "part-00.txt": 400}


@pytest.mark.slow
@pytest.mark.kafka
def test_a_topic_made_anew_while_the_job_was_down_is_refused_however_long_it_is(kafka, tmp_path):
    job = write_job(tmp_path, num_parts=1, spec=KAFKA)
    lines = (tmp_path / "part-0.txt").read_bytes().splitlines()
    topic = kafka.create_topic()
    kafka.produce(topic, 0, lines)
    settings = f"sources.lines.options.bootstrap_servers={kafka.servers}", f'sources.lines.topics=["{topic}"]'
    kill_after(job, tmp_path, 400, *settings)
    recreate(kafka, topic, lines * 2)
    refused(job, f"{topic}/0 is not what it was when the job began to read it", *settings)


@pytest.mark.kafka
def test_partitions_and_records_that_came_while_the_job_was_down_are_read_and_a_gap_is_passed(kafka, tmp_path):
    job = write_job(tmp_path, num_parts=1, spec=KAFKA)
    lines = (tmp_path / "part-0.txt").read_bytes().splitlines()
    topic = kafka.create_topic()
    kafka.produce(topic, 0, lines[:100])
    settings = f"sources.lines.options.bootstrap_servers={kafka.servers}", f'sources.lines.topics=["{topic}"]'
    assert goes_on(job, tmp_path, 100, *settings)["positions"] == {f"{topic}/0": 100}
    kafka.produce(topic, 0, lines[100:200])
    drop_before(kafka, topic, 110)
    add_partition(kafka, topic, lines[200:250])
    report = goes_on(job, tmp_path, 240, *settings, "sources.lines.on_gap=earliest")
    assert report["events"] == 240
    assert report["positions"] == {f"{topic}/0": 200, f"{topic}/1": 50}
