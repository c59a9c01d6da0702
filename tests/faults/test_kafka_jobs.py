"""What a user sees of a job when its topic is not there, or its broker is down or goes away."""

import pytest

from headrace.lifecycle import ExitCode
from tests.integration.running_job import RunningJob, assert_gone
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed
from tests.kafka.cluster import free_ports

pytestmark = pytest.mark.kafka

KAFKA_SPEC = changed(SPEC, {"sources.lines": {"kind": "kafka", "topics": ["no-such-topic"]}})
NEVER = "cluster.max_restarts=0"


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, num_parts=1, spec=KAFKA_SPEC)


def broker(servers):
    return f"sources.lines.options.bootstrap_servers={servers}"


def test_a_topic_that_does_not_exist_is_named_at_the_deadline(kafka, job):
    ended = headrace(job, broker(kafka.servers), "sources.lines.connect_deadline=1s", NEVER, timeout_s=40)
    assert ended.code == ExitCode.RETRY
    assert f"error: topic 'no-such-topic' does not exist at {kafka.servers}" in ended.output
    assert "Traceback" not in ended.output
    assert ended.report is None


def test_a_broker_that_is_down_at_the_start_is_named_at_the_deadline(job):
    (port,) = free_ports(1)
    ended = headrace(job, broker(f"127.0.0.1:{port}"), "sources.lines.connect_deadline=1s", NEVER, timeout_s=40)
    assert ended.code == ExitCode.RETRY
    assert f"error: no broker of 127.0.0.1:{port} answered within 1.0 s" in ended.output
    assert "is it running and reachable from here?" in ended.output
    assert "Traceback" not in ended.output


def test_a_job_waits_for_a_broker_that_was_killed_says_so_and_goes_on(own_kafka, job, tmp_path):
    lines = (tmp_path / "part-0.txt").read_bytes().splitlines()
    topic = own_kafka.create_topic(2)
    own_kafka.produce(topic, 0, lines[:150])
    running = RunningJob(job, tmp_path, broker(own_kafka.servers), f'sources.lines.topics=["{topic}"]')
    try:
        running.until_events(150)
        own_kafka.kill()
        running.until_said("Kafka does not answer: waiting")
        own_kafka.start()
        running.until_said("Kafka answers again")
        own_kafka.produce(topic, 0, lines[150:200])
        own_kafka.produce(topic, 1, lines[200:])
        running.until_events(len(lines))
        running.process.terminate()
        code, said = running.end()
    finally:
        running.kill()
    assert code == 0, said
    assert running.report["events"] == running.report["samples"] == len(lines)
    assert running.report["positions"] == {f"{topic}/0": 200, f"{topic}/1": 200}
    assert running.report["rejected"] == {}
    assert_gone(running)


HELD = 900
GATED_CAT = """
import pathlib, sys, time
held = pathlib.Path("held").read_bytes()
for line in sys.stdin.buffer:
    while line.rstrip() == held and not pathlib.Path("open").exists():
        time.sleep(0.01)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""
"""Goes past one line only once it may, so that the broker is gone in mid-pass however slow the machine is."""


@pytest.mark.slow
def test_a_broker_killed_in_mid_pass_changes_no_bit_of_what_is_learnt(own_kafka, tmp_path):
    spec = changed(KAFKA_SPEC, {"pipe.command": ["python", "gated_cat.py"]})
    job = write_job(tmp_path, num_parts=1, num_lines=2_500, spec=spec)
    (tmp_path / "gated_cat.py").write_text(GATED_CAT)
    lines, gate = (tmp_path / "part-0.txt").read_bytes().splitlines(), tmp_path / "open"
    (tmp_path / "held").write_bytes(lines[HELD])
    gate.touch()
    topic = own_kafka.create_topic(2)
    own_kafka.produce(topic, 0, lines[:1_500])
    own_kafka.produce(topic, 1, lines[1_500:])
    settings = (broker(own_kafka.servers), f'sources.lines.topics=["{topic}"]', "sources.lines.end=latest")
    undisturbed = headrace(job, *settings, store="undisturbed").report
    gate.unlink()
    running = RunningJob(job, tmp_path, *settings)
    try:
        running.until_events(400)
        own_kafka.kill()
        gate.touch()
        running.until_said("Kafka does not answer: waiting")
        own_kafka.start()
        code, said = running.end()
    finally:
        running.kill()
    assert code == 0, said
    assert "Kafka answers again" in said
    assert running.report["positions"] == {f"{topic}/0": 1_500, f"{topic}/1": 1_000}
    assert running.report | {"wall_s": 0} == undisturbed | {"wall_s": 0}
    assert_gone(running)
