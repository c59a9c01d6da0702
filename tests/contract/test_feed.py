"""A subscriber of the live feed has the job's rows at each version, bit for bit, on any number of shards."""

import socket
import threading
import time
from collections import deque
from dataclasses import replace

import grpc
import numpy as np
import pytest

from headrace.errors import Refused, Unavailable
from headrace.identity.authority import open_authority
from headrace.identity.peers import PeerName, PeerRole
from headrace.pserver.feed import feed_messages
from headrace.pserver.feed.feed_client import FeedStream, FeedTooSlow
from headrace.pserver.proto import feed_pb2, shard_pb2
from headrace.pserver.protocol import messages
from headrace.pserver.protocol.table_operations import AdvanceDay, ForgetRow, SetTables, ShrinkRows
from headrace.pserver.server.commands import CountRows, PublishVersion
from headrace.rpc import channels, refusals
from headrace.trainer.replica.feed_updates import FeedUpdates
from tests.contract import feed_world as f
from tests.contract import shards_world as w
from tests.contract.test_shards import some_batches
from tests.contract.test_shards_living import TABLES as LIVING

KINDS = [0, 2, w.OverTls(0), w.OverTls(2)]
IDS = ["embedded", "2-shards", "embedded-over-tls", "2-shards-over-tls"]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=IDS)
TABLES = {name: table.model_copy(update={"slots": {}}) for name, table in LIVING.items()}


def some_operations(draw, version):
    """What may happen at a close."""
    key = int(w.keys(int(draw.choice(f.SIGNS))).keys_U[0])
    name, group = [("default", 1), ("other", 2)][draw.integers(2)]
    lr = {"tables": {"other": TABLES["other"].model_dump(mode="json")}}
    all_of_them = [
        ShrinkRows(table="other", at_once=bool(draw.integers(2))),
        ShrinkRows(table="default", delete_below=2.0, at_once=bool(draw.integers(2))),
        AdvanceDay(to=version),
        ForgetRow(table=name, group=group, key=key),
        SetTables(**lr),
    ]
    return [all_of_them[i] for i in draw.permutation(len(all_of_them))[: draw.integers(4)]]


def live(job, passes=1):
    """Passes with operations: alike at a replay."""
    for _ in range(passes):
        version = job.version + 1
        draw = np.random.default_rng(version)
        batches = some_batches(0, int(draw.integers(1, 4)), seed=version)
        job.live(batches, some_operations(draw, version), day=version // 3)


@every_kind
def test_who_follows_holds_every_version(kind):
    with f.job(kind, TABLES) as job, f.follower(job) as held:
        live(job)
        held.until(1)
        for version in range(2, 12):
            live(job)
            held.until(version)
    assert [update.whole for update in held.updates] == [True] + [False] * 10
    assert any(len(update.tables["other"].gone) for update in held.updates)
    assert held.updates[3].model is None and held.updates[3].onnx is None


@pytest.mark.long
@every_kind
def test_who_comes_and_hears_at_any_time_holds_the_versions_it_is_told(kind):
    """Two follow; one hears after every pass, the other now and then, and leaves and comes again."""
    draw = np.random.default_rng(kind)
    with f.job(kind, TABLES) as job:
        live(job, 3)
        with f.follower(job) as often, f.follower(job) as seldom:
            for version in range(4, 20):
                live(job)
                often.until(version)
                match draw.integers(4):
                    case 0:
                        seldom.until(version)
                    case 1:
                        seldom.begin_again()
            seldom.until(19)
    assert often.rows == seldom.rows == job.known[19] and len(often.updates) == 16


def test_rows_that_left_memory_are_told_too(tmp_path):
    """More rows than fit: each pass learns from some of many others, and commits let them leave."""
    many = range(1000, 3000)
    tables = {name: table.model_copy(update={"memory": 120_000, "admission": ()}) for name, table in TABLES.items()}
    with f.job(0, tables, tmp_path / "live", restore=(tmp_path, [], 0)) as job:
        with f.follower(job) as often:
            for version in range(1, 16):
                draw = np.random.default_rng(version)
                keys = w.keys(*draw.choice(many, 250, replace=False).tolist())
                job.live([some_batches(0, 1, seed=version)[0] | {"default": keys}, *some_batches(0, 1, seed=version)])
                w.commit(job.shards, tmp_path / f"commit-{version}", version)
                often.until(version, partly=True)
                if version % 6 == 0:
                    often.begin_again()
            with f.follower(job) as late:
                late.until(15, partly=True)
        wanted = f.read(job.shards, "default", many)
        (stats,) = [job.shards.call(CountRows(), w.soon()).tables["default"]]
        assert stats.num_bytes < 90_000 < 80 * stats.num_rows  # some are in the store alone
    zeros = bytes(20)
    for held in (often, late):
        assert {key: held.rows["default"].get(key, zeros) for key in wanted} == wanted
    assert len(often.updates) == 15 and not any(update.whole for update in often.updates[1:])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 2), (2, 1)], ids=["embedded", "1-to-2", "2-to-1"])
def test_after_a_crash_it_never_steps_back_and_is_told_what_changed_since_the_commit(before, after, tmp_path):
    with f.job(before, TABLES, tmp_path / "first", restore=(tmp_path, [], 0)) as job:
        live(job, 3)
        parts = w.commit(job.shards, tmp_path / "commit", 3)
        with f.follower(job) as held:
            held.until(3)
            live(job, 3)
            held.until(6)
            known = job.known
    with f.job(after, TABLES, tmp_path / "second", 2, restore=(tmp_path / "commit", parts, 3)) as job:
        held.job = job
        held.begin_again()
        live(job, 2)
        assert held.hear(0.3) is None  # 4 and 5 are made again, and were told
        live(job, 3)
        held.until(8)
        held.feed.close()
    assert {version: job.known[version] for version in (3, 4, 5, 6)} == {v: known[v] for v in (3, 4, 5, 6)}
    assert [update.whole for update in held.updates] == [True] + [False] * (len(held.updates) - 1)


def test_who_has_less_than_the_commit_or_another_timeline_is_told_everything(tmp_path):
    with f.job(1, TABLES, tmp_path / "first", restore=(tmp_path, [], 0)) as job:
        with f.follower(job) as held:
            live(job)
            held.until(1)
        live(job, 2)
        parts = w.commit(job.shards, tmp_path / "commit", 3)
    with f.job(1, TABLES, tmp_path / "second", 2, restore=(tmp_path / "commit", parts, 3)) as job:
        held.job = job
        held.begin_again()
        live(job, 2)
        held.until(5)
        held.feed.close()
    assert held.updates[-1].whole
    with f.job(1, TABLES, tmp_path / "third", 3, "t2", (tmp_path / "commit", parts, 3)) as job:
        held.job, held.version = job, 0  # the timeline's own versions
        held.begin_again()
        live(job)
        held.until(4)
        held.feed.close()
    assert held.updates[-1].whole and held.updates[-1].timeline == "t2"


@every_kind
def test_a_base_that_is_read_while_passes_go_on_is_a_version(kind):
    with f.job(kind, w.TABLES) as job:
        for number in range(2):  # 10,000 rows, which nobody asks for one by one
            more = {"default": w.keys(*range(1000 + 5000 * number, 6000 + 5000 * number))}
            job.live([more | {"other": w.keys(*f.SIGNS, group=2)}])
        first = f.Held(job)
        while first.hear(0.05, partly=True) is None:  # compiles the kernels, which may take longer than what follows
            job.rank0.tick(job.version)
        first.feed.close()
        held = [f.Held(job) for _ in range(3)]
        ended, errors = threading.Event(), []

        def follow(one):
            try:
                while one.hear(0.2, partly=True) is None or not ended.is_set() or one.version < job.version:
                    pass
            except Exception as error:  # noqa: BLE001  # told by the test's thread
                errors.append(error)

        threads = [threading.Thread(target=follow, args=(one,)) for one in held]
        for thread in threads:
            thread.start()
        until = w.Deadline.after(20)
        while job.version < 15 and not until.passed():
            draw = np.random.default_rng(job.version)
            keys = w.keys(*(1000 + draw.choice(10_000, 2000, replace=False)).tolist())
            job.live([some_batches(0, 1, seed=job.version)[0] | {"default": keys}])
        ended.set()
        while any(thread.is_alive() for thread in threads) and not until.passed():
            job.rank0.tick(job.version)
            time.sleep(0.01)
        for one, thread in zip(held, threads, strict=True):
            thread.join(10)
            one.feed.close()
        wanted = f.read(job.shards, "default", range(1000, 11_000))
    assert not errors
    for one in held:
        assert one.version == job.version and {k: one.rows["default"].get(k) for k in wanted} == wanted


@pytest.mark.parametrize("kind", [1, w.OverTls(1)], ids=["plain", "over-tls"])
def test_a_subscriber_that_does_not_read_is_disconnected_and_counted(monkeypatch, caplog, kind):
    """The transport takes some 20 versions before the feed sees that nobody reads; the number is its choice."""
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_WAITING_BYTES", 1 << 20)
    big = {"default": w.keys(*range(100, 8000)), "other": w.keys(*f.SIGNS, group=2)}
    before = refusals.PROCESS.counts().get("too_slow", 0)
    with f.job(kind, w.TABLES) as job:
        where = job.find(None)
        stream = FeedStream("shard 0", where.shards[0], where.secret, where.peer(0))
        parts = stream.parts(0, 1)
        assert next(parts).whole
        version = 0
        while refusals.PROCESS.counts().get("too_slow", 0) == before:
            version += 1
            assert version <= 300, "300 versions went somewhere, and nobody read them"
            w.train(job.shards, version, [big], seed=version, steps=1)
            job.shards.call(PublishVersion(version), w.soon())
        assert "it is too slow for the live feed: " in caplog.text
        with pytest.raises(FeedTooSlow):  # also where the reason is not read either
            deque(parts, maxlen=0)
        stream.close()


def refused(kind, credentials, name):
    """The error of a subscriber with these credentials, and what is counted then."""
    with f.job(kind, w.TABLES) as job:
        job.live(some_batches())
        where = replace(job.find(None), credentials=credentials)
        before = refusals.PROCESS.counts().get(name, 0)
        held = FeedUpdates(lambda deadline: where)
        with pytest.raises(Unavailable) as error:
            held.next(w.Deadline.after(20))
        held.close()
        until = w.soon()
        while refusals.PROCESS.counts().get(name, 0) == before:  # a stranger is gone before it is counted
            until.check(f"{name} in {refusals.PROCESS.counts()}")
            time.sleep(0.01)
    return str(error.value)


@pytest.mark.parametrize("kind", [w.OverTls(0), w.OverTls(1)], ids=["embedded", "1-shard"])
def test_only_a_replica_of_this_generation_and_authority_is_served_and_strangers_are_counted(kind, tmp_path):
    trainer = w.credentials(PeerRole.TRAINER, 1)
    assert "is this the address of another process?" in refused(kind, trainer, "other_peer")
    old = w.credentials(PeerRole.REPLICA, 0, 0)
    assert "of an older generation" in refused(kind, old, "other_generation")
    other = open_authority(tmp_path, "shards").credentials(PeerName("shards", 1, PeerRole.REPLICA, 0))
    forged = other.model_copy(update={"authority": w.authority().pem})
    assert "may not accept the certificate" in refused(kind, forged, "wrong_certificate")
    assert "does not prove to be trainer-0 of generation 1" in refused(kind, other, "silent")  # it left


def test_a_port_scan_of_the_feed_is_counted_and_leaves_it_to_replicas():
    with f.job(w.OverTls(1), w.TABLES) as job:
        job.live(some_batches())
        where = job.find(None)
        before = refusals.PROCESS.counts().get("silent", 0)
        for address in (where.rank0, *where.shards):
            host, port = address.split(":")
            socket.create_connection((host, int(port)), 5).close()
        with f.follower(job) as held:
            held.until(1)
        until = w.soon()
        while refusals.PROCESS.counts().get("silent", 0) < before + 2:
            until.check(f"two scans in {refusals.PROCESS.counts()}")
            time.sleep(0.01)


NOT_HEARD = 40
"""Versions of 20,000 rows: four times what connections take for a subscriber that does not listen."""


def test_a_disconnected_subscriber_reconnects_and_gets_the_changes(monkeypatch):
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_WAITING_BYTES", 1 << 10)
    monkeypatch.setattr("headrace.trainer.replica.feed_updates.MAX_AHEAD", 2)
    big = {"default": w.keys(*range(20_000)), "other": w.keys(*f.SIGNS, group=2)}
    with f.job(1, w.TABLES) as job, f.follower(job) as held:
        job.live([big])
        held.until(1, partly=True)
        for _ in range(NOT_HEARD):
            job.live([big])
            job.shards.call(PublishVersion(job.version), w.soon())
        until = w.Deadline.after(20)
        with pytest.raises(Unavailable, match="too slow"):
            while not until.passed():
                held.hear(0.1, partly=True)
        monkeypatch.undo()
        held.until(job.version, partly=True)
        assert held.rows["default"].keys() == set(big["default"].keys_U.tolist())
    assert not any(update.whole for update in held.updates[1:])


@every_kind
def test_the_feeds_secret_reads_the_feed_and_calls_nothing_else(kind):
    with f.job(kind, w.TABLES) as job:
        where = job.find(None)
        assert where.secret != w.SECRET and len(where.secret) == 32
        assert job.find(None).secret == where.secret
        for shard, address in [(None, where.rank0), *enumerate(where.shards)]:
            channel = channels.open_channel(address, tls=where.peer(shard))
            stats = channel.unary_unary(
                channels.path_of(messages.SERVICE, "Call"), shard_pb2.CommandRequest.SerializeToString
            )
            with pytest.raises(grpc.RpcError) as refused:
                stats(shard_pb2.CommandRequest(), timeout=5, metadata=channels.metadata(where.secret))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            subscribe = channel.unary_stream(
                channels.path_of(feed_messages.SERVICE, "Subscribe"), feed_pb2.SubscribeRequest.SerializeToString
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(subscribe(feed_pb2.SubscribeRequest(format=1), timeout=5, metadata=channels.metadata(w.SECRET)))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            channel.close()


@every_kind
def test_the_last_version_of_a_job_that_ends_is_heard(kind):
    with f.job(kind, TABLES) as job, f.follower(job) as held:
        live(job)
        held.until(1)
        live(job, 2)
        job.rank0.shut()
        job.shards.close()
        while held.version < 3:
            assert held.hear() is not None
        assert isinstance(held.troubled(), Unavailable)


def test_who_leaves_gives_its_place_back(monkeypatch):
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_SUBSCRIBERS", 1)
    with f.job(1, w.TABLES) as job:
        for _ in range(3):
            job.live(some_batches())
            until = w.Deadline.after(10)
            while True:  # until the one before has left
                with f.follower(job) as held:
                    try:
                        held.until(job.version)
                        break
                    except Unavailable:
                        until.check("a place")


def test_where_another_process_listens_now_the_feed_is_looked_for_again():
    with f.job(0, w.TABLES) as job, f.job(0, w.TABLES) as other:
        job.live(some_batches())
        with f.follower(job) as held:
            stale = replace(job.find(None), rank0=other.find(None).rank0)
            first = [stale]
            held.feed = FeedUpdates(lambda deadline: first.pop() if first else job.find(deadline))
            assert isinstance(held.troubled(), Unavailable)
            held.until(1)


def test_another_format_and_too_many_are_told_so(monkeypatch):
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_SUBSCRIBERS", 1)
    with f.job(0, w.TABLES) as job:
        job.live(some_batches())
        with f.follower(job) as held:
            held.until(1)
            with f.follower(job) as another:
                assert "1 subscribers follow already" in str(another.troubled())
        monkeypatch.setattr("headrace.pserver.feed.feed_messages.FORMAT", 2)
        with f.follower(job) as newer:
            monkeypatch.setattr("headrace.pserver.feed.feed_server.feed_messages", type("Old", (), {"FORMAT": 1}))
            assert isinstance(newer.troubled(), Refused)
