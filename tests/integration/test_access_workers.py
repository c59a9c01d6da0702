"""Strangers call the workers of a real job; and where the workers' secrets are not."""

import json
import os
import re
from pathlib import Path

import grpc
import pytest

from headrace.deadline import Deadline
from headrace.proto import rendezvous_pb2, role_pb2
from headrace.pserver.proto import feed_pb2, shard_pb2
from headrace.rpc import channels
from headrace.rpc.job_client import JobClient
from tests.integration.running_job import RunningJob
from tests.integration.test_run_processes import ENDLESS, SPEC, TWO_BY_TWO, lines

NO_BUSINESS = {"AWS_SECRET_ACCESS_KEY": "hunter2-aws", "HEADRACE_TOKEN": "hunter2-token"}
COMMAND = "pipe.command=['./echo.sh']"
ANSWER_S = 10


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    (folder / "job.toml").write_text(SPEC)
    (folder / "lines.txt").write_text(lines(0, 3000))
    (folder / "echo.sh").write_text("#!/bin/sh\nenv > environment.txt\nexec cat\n")
    (folder / "echo.sh").chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_BUSINESS.items():
            patch.setenv(name, value)
        running = RunningJob(folder / "job.toml", folder, TWO_BY_TWO, COMMAND, *ENDLESS)
    try:
        running.until_events(3000)
        yield running
    finally:
        running.kill()


def told(job):
    """What the launcher told each worker, by name, of the newest generation."""
    files = sorted((job.store / "workers").glob("g*/*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files}


def methods(*files):
    """Every call of the services: its path, whether it answers with a stream, and whether it is asked with one."""
    for file in files:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method.server_streaming, method.client_streaming


def asked(channel, path, answers, asks, metadata):
    """The status that a call with nothing in it ends with."""
    kind = {(False, False): "unary_unary", (True, False): "unary_stream"}.get((answers, asks), "stream_stream")
    given = iter([b""]) if asks else b""
    try:
        found = getattr(channel, kind)(path)(given, timeout=ANSWER_S, metadata=metadata)
        list(found) if kind != "unary_unary" else found
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_ports_of_shards_and_ranks_answer_nobody_without_the_jobs_secret(job):
    sockets = sorted((job.store / "workers").glob("g*/*.socket"))
    assert {path.stem for path in sockets} == {"launcher", "shard-0", "shard-1", "trainer-0", "trainer-1"}
    right = told(job)["trainer-0"]["secret"]
    wrong = [(), ((channels.SECRET_KEY, ""),), ((channels.SECRET_KEY, "0" * 64),), ((channels.SECRET_KEY, right[:-1]),)]
    wrong += [((channels.SECRET_KEY, right.upper()),), ((channels.SECRET_KEY, right), (channels.SECRET_KEY, "0" * 64))]
    for path in sockets:
        with channels.open_channel(f"unix:{path}") as channel:
            for method, answers, asks in methods(role_pb2, shard_pb2, feed_pb2, rendezvous_pb2):
                for metadata in wrong:
                    status = asked(channel, method, answers, asks, metadata)
                    assert status is grpc.StatusCode.UNAUTHENTICATED, (path.stem, method, metadata)
    assert job.process.poll() is None
    events = 3000
    with (job.store.parent / "lines.txt").open("a") as file:
        file.write(lines(3000, 4000))
    assert job.until_events(events + 1000) == 4000


def test_the_feeds_secret_opens_the_feed_alone_and_the_jobs_does_not_open_it(job):
    told_of_feed = JobClient(job.store).answer({"do": "feed"}, Deadline.after(60))
    feed, own = told_of_feed["secret"], told(job)["trainer-0"]["secret"]
    assert feed != own
    ports = [told_of_feed["chief"], *told_of_feed["shards"]]
    workers = [f"unix:{path}" for path in (job.store / "workers").glob("g*/*.socket")]
    assert len(ports) == 3 and not set(ports) & set(workers)
    refused = grpc.StatusCode.UNAUTHENTICATED
    for address, secret, module in [(each, own, feed_pb2) for each in ports] + [
        (each, feed, other) for each in workers for other in (role_pb2, shard_pb2)
    ]:
        with channels.open_channel(address) as channel:
            for method, answers, asks in methods(module):
                assert asked(channel, method, answers, asks, channels.metadata(secret)) is refused, (address, method)


def test_nobody_listens_where_other_machines_could_come_in(job):
    listening = set()
    for pid in [job.process.pid, *job.workers().values()]:
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                inodes.add(match[1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    listening.add(words[1].rpartition(":")[0])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert listening and listening <= loopback, listening


def test_the_secret_is_in_no_process_list_environment_or_output(job):
    secrets = {each["secret"].encode() for each in told(job).values()}
    assert secrets and all(len(secret) == 64 for secret in secrets)
    for pid in [job.process.pid, *job.workers().values()]:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert not [secret for secret in secrets if secret in shown]
    assert not [secret for secret in secrets if secret.decode() in "".join(job.said)]
    logs = [path for path in job.store.rglob("*") if path.is_file() and "workers" not in path.parts]
    assert logs and not [path for path in logs for secret in secrets if secret in path.read_bytes()]


def test_files_with_the_secret_and_sockets_are_their_owners_alone(job):
    for path in (job.store / "workers").glob("g*"):
        assert path.stat().st_mode & 0o077 == 0
        assert all(file.stat().st_mode & 0o077 == 0 for file in [*path.glob("*.json"), *path.glob("*.socket")])
        assert len(list(path.glob("*.socket"))) == 5


def test_a_pipe_command_sees_nothing_of_the_services_environment(job):
    environment = (job.store.parent / "environment.txt").read_text()
    names = set(re.findall(r"^(\w+)=", environment, re.M))
    assert "HEADRACE_SLOTS" in names
    assert not [name for name in names if name in NO_BUSINESS or name.startswith("AWS_")]
    secrets = {each["secret"] for each in told(job).values()} | set(NO_BUSINESS.values())
    assert not [secret for secret in secrets if secret in environment]
