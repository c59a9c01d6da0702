"""A job with a password in its file, run as a user runs it: what it leaves on disk holds none, and goes on without."""

import os
import stat

import pytest

from headrace.lifecycle import ExitCode
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import RecordKind, read
from tests.integration.hosted_service import CONFIG, HostedService, spec_of
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(300)]
PASSWORD = "hunter2-of-the-broker"
"""The broker of the tests asks for none; what is passed to the client all the same is in its options."""
OPTIONS = """
kind = "kafka"
topics = ["{topic}"]
[sources.lines.options]
bootstrap_servers = "{servers}"
sasl_plain_username = "me"
sasl_plain_password = {password}
"""


def spec_file(kafka, topic, password):
    options = OPTIONS.format(topic=topic, servers=kafka.servers, password=password)
    return SPEC.replace('\nkind = "files"\npaths = ["part-*.txt"]\n', options)


def holding(folder, *secrets):
    """Files below `folder` that hold one of them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


def specs_logged(store):
    return [record.body for record in read(store / "log") if record.body.get("op") == "spec"]


def trained(job, num_events):
    """The job run until it has trained so many events, then ended; all it said."""
    running = RunningJob(job, job.parent)
    try:
        running.until_events(num_events)
        running.process.terminate()
        code, said = running.end()
    finally:
        running.kill()
    assert code == ExitCode.DRAINED, said
    return said


def test_a_password_is_in_no_file_of_the_store_and_its_change_is_no_change_of_the_job(kafka, tmp_path):
    topic = kafka.create_topic(1)
    made = write_job(tmp_path, num_parts=1, num_lines=1200)
    events = (tmp_path / "part-0.txt").read_bytes().splitlines()
    kafka.produce(topic, 0, events[:800])
    old_mask = os.umask(0o022)
    try:
        made.write_text(spec_file(kafka, topic, f'"{PASSWORD}"'))
        first, store = trained(made, 800), tmp_path / "store"
        assert stat.S_IMODE(store.stat().st_mode) == 0o700
        assert holding(store, PASSWORD) == []
        assert "***" in str(specs_logged(store)[0]["spec"])

        (tmp_path / "password").write_text("rotated-hunter2\n")
        kafka.produce(topic, 0, events[800:])
        made.write_text(spec_file(kafka, topic, '{ file = "password" }'))
        second = trained(made, len(events))
        assert not [spec for spec in specs_logged(store) if "file" in str(spec["spec"]["sources"])]
        assert holding(store, PASSWORD, "rotated-hunter2") == []

        again = headrace(made, command="rerun", options=["--from", Commits(store).names()[0]])
        assert again.code == 0 and ": identical" in again.output, again.output
        made.write_text(spec_file(kafka, topic, '{ env = "NOT_SET_HERE" }'))
        refused = headrace(made)
        assert refused.code == ExitCode.BAD_CONFIG, refused.output
        assert (
            "sasl_plain_password: the environment variable NOT_SET_HERE, which it names, is not set" in refused.output
        )
        shown = first + second + again.output + refused.output
        assert PASSWORD not in shown and "rotated-hunter2" not in shown
    finally:
        os.umask(old_mask)


def test_a_service_keeps_what_workers_are_told_and_passwords_below_its_own_root(kafka, tmp_path):
    topic = kafka.create_topic(1)
    write_job(tmp_path, num_parts=1)
    kafka.produce(topic, 0, (tmp_path / "part-0.txt").read_bytes().splitlines())
    service = HostedService(tmp_path, CONFIG)
    options = {"bootstrap_servers": kafka.servers, "sasl_plain_password": PASSWORD}
    source = {"kind": "kafka", "topics": [topic], "options": options}
    try:
        service.start()
        spec = spec_of(
            sources={"lines": source}, store={"path": "store"}, cluster={"shards": 1}, commit={"every_passes": 1}
        )
        service.ask("POST", "/jobs", {"name": "one", "spec": spec, "base": str(service.folder / "data")})
        service.until("/jobs/one/commits", lambda page: page["items"])
        store = service.folder / "data" / "store"
        workers = store / "workers"
        assert workers.is_symlink() and workers.resolve() == service.jobs / "one" / "workers"
        told = sorted(path.name for path in workers.glob("g*/*.json"))
        assert told == ["rank0.json", "shard-0.json", "trainer-0.json"]
        assert holding(service.folder / "data", PASSWORD) == []
        assert stat.S_IMODE(store.stat().st_mode) == 0o700
        service.ask("POST", "/jobs/one/commits", {})  # rank 0 is found through the link
        for path in ("", "/spec", "/log", "/output?worker=trainer-0"):
            assert PASSWORD not in str(service.ask("GET", f"/jobs/one{path}"))
        assert PASSWORD not in service.said()
        service.ask("POST", "/jobs/one/drain")  # a stop would kill it after a while, and then nothing is put away
        service.until("/jobs/one", lambda job: job["phase"] == "ended")
        assert not workers.exists() and not workers.is_symlink()
    finally:
        service.clean_up()
    assert [record.body for record in read(store / "log") if record.kind is RecordKind.CLOSE]
