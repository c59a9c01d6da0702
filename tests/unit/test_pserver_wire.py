"""Messages: protobuf reads what our encoder writes, and inconsistent messages are refused."""

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.client.connection import error_of_call
from pserver.config import TableSection
from pserver.errors import (
    InvalidShardCall,
    MessageTooLarge,
    OutOfMemory,
    PserverError,
    ShardUnavailable,
    StaleGeneration,
    StepTimedOut,
    StoreDamaged,
    StoreFailed,
)
from pserver.proto import shard_pb2 as pb
from pserver.protocol import messages
from pserver.protocol.shards import Gradients, Keys, ShardCommitPart, TableStats
from pserver.store.row_store import StoredFile

COUNTS = st.dictionaries(st.sampled_from(["a", "b", "a table of a longer name"]), st.integers(0, 70), max_size=3)


def floats(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(COUNTS, st.booleans())
def test_keys_survive_encoding(counts, learn):
    tables = {
        n: Keys(np.arange(c, dtype=np.uint64) << np.uint64(33), np.arange(c, dtype=np.uint16))
        for n, c in counts.items()
    }
    loaded = messages.with_keys(pb.AnnounceRequest(batch=300, learn=learn), tables)
    message = pb.AnnounceRequest.FromString(messages.encoded(loaded))
    assert (message.batch, message.learn) == (300, learn)
    found = messages.keys_from(message)
    assert list(found) == list(tables)
    for name, keys in tables.items():
        assert (found[name].keys_U == keys.keys_U).all() and (found[name].group_U == keys.group_U).all()


@given(COUNTS, st.integers(1, 9))
def test_gradients_and_rows_survive_encoding_bit_for_bit(counts, dim):
    tables = {n: Gradients(floats(1, c, dim), floats(2, c), floats(3, c)) for n, c in counts.items()}
    widths = dict.fromkeys(counts, dim)
    message = pb.ExchangeRequest.FromString(
        messages.encoded(messages.with_gradients(pb.ExchangeRequest(step=9), tables))
    )
    found = messages.gradients_from(message, widths)
    for name, push in tables.items():
        assert (found[name].grads_UD == push.grads_UD).all() and found[name].grads_UD.shape == push.grads_UD.shape
        assert (found[name].show_U == push.show_U).all() and (found[name].click_U == push.click_U).all()
    rows = {name: push.grads_UD for name, push in tables.items()}
    back = messages.rows_from(pb.RowsReply.FromString(messages.encoded(messages.with_rows(rows))), widths)
    assert all((back[name] == rows[name]).all() for name in rows) and list(back) == list(rows)


@given(st.integers(0, 1 << 20))
def test_a_large_payload_has_protobufs_own_encoding(num_floats):
    rows = {"a": np.zeros((num_floats % 40_000, 1), np.float32)}
    loaded = messages.with_rows(rows)
    standard = pb.RowsReply(parts=loaded.message.parts, payload=rows["a"].tobytes())
    assert messages.encoded(loaded) == standard.SerializeToString()


@pytest.mark.parametrize("change", [-4, 4])
def test_a_payload_of_the_wrong_length_is_refused(change):
    reply = pb.RowsReply(parts=[pb.TablePart(table="a", num_keys=2)], payload=bytes(2 * 3 * 4 + change))
    with pytest.raises(InvalidShardCall, match=f"payload of {24 + change} bytes"):
        messages.rows_from(reply, {"a": 3})


def test_gradients_of_a_table_that_is_not_here_are_refused():
    message = pb.ExchangeRequest(parts=[pb.TablePart(table="a", num_keys=2)])
    with pytest.raises(InvalidShardCall, match="'a', which is not here"):
        messages.gradients_from(message, {"b": 1})


def test_tables_are_equal_in_any_order_and_differ_with_any_setting():
    one, two = TableSection(dim=1), TableSection(dim=2)
    assert messages.tables_json({"a": one, "b": two}) == messages.tables_json({"b": two, "a": one})
    assert messages.tables_json({"a": one}) != messages.tables_json({"a": TableSection(dim=1, init_range=0.5)})


def test_stats_of_shards_add_up_and_the_fullest_one_counts():
    one = TableStats(3, 100, 1, {1: 2, 4: 1}, dirty_rows=3, max_dirty_rows=9)
    two = TableStats(2, 50, 0, {4: 2}, dirty_rows=8, max_dirty_rows=10)
    replies = [pb.StatsReply.FromString(messages.with_stats({"a": stats}).SerializeToString()) for stats in (one, two)]
    assert messages.stats_from(replies, "a") == TableStats(5, 150, 1, {1: 2, 4: 3}, 8, 10)
    assert messages.stats_from([messages.with_stats({"a": TableStats(1, 1, 1, {0: 1})})], "a").max_dirty_rows is None


def test_parts_of_a_commit_survive_encoding():
    facts = {"a": {"rows": 3, "rows_by_group": {"1": 3}}}
    part = ShardCommitPart("shard-1", (2048, 4096), facts, {"shard-1/a/1.sst": StoredFile("ab", 12)})
    assert messages.parts_from(messages.parts_json([part, part])) == [part, part]
    assert messages.parts_from(messages.parts_json([])) == []


class Failure(grpc.RpcError):
    def __init__(self, code, details="why"):
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "ours", "exit_code"),
    [
        (grpc.StatusCode.UNAVAILABLE, ShardUnavailable, 75),
        (grpc.StatusCode.CANCELLED, ShardUnavailable, 75),
        (grpc.StatusCode.DEADLINE_EXCEEDED, StepTimedOut, 75),
        (grpc.StatusCode.FAILED_PRECONDITION, StaleGeneration, 75),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, MessageTooLarge, 1),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidShardCall, 1),
        (grpc.StatusCode.UNAUTHENTICATED, InvalidShardCall, 1),
        (grpc.StatusCode.UNKNOWN, InvalidShardCall, 1),
        (grpc.StatusCode.ABORTED, StoreFailed, 1),
        (grpc.StatusCode.DATA_LOSS, StoreDamaged, 75),
        (grpc.StatusCode.OUT_OF_RANGE, OutOfMemory, 1),
    ],
)
def test_every_status_becomes_one_of_our_errors(code, ours, exit_code):
    error = error_of_call(Failure(code), "shard 3", 2)
    assert type(error) is ours and isinstance(error, PserverError) and error.exit_code == exit_code


def test_the_surface_of_the_protocol_is_the_one_we_promised():
    fields = {
        name: [(field.number, field.name) for field in message.fields]
        for name, message in sorted(pb.DESCRIPTOR.message_types_by_name.items())
    }
    assert fields["ExchangeRequest"] == [
        (1, "caller"),
        (2, "pass_number"),
        (3, "step"),
        (4, "batch"),
        (5, "parts"),
        (6, "batch_samples"),
        (7, "following"),
        (15, "payload"),
    ]
    assert fields["AnnounceRequest"] == [(1, "caller"), (2, "batch"), (3, "learn"), (4, "parts"), (15, "payload")]
    assert fields["RowsReply"] == [(1, "parts"), (15, "payload")]
    assert sorted(method.name for method in messages.SERVICE.methods) == [
        "Announce", "ClosePass", "Digest", "Exchange", "Explain", "Feed", "Hello", "OpenPass", "Operate", "Publish",
        "Pull", "Restore", "Settle", "Snapshot", "Stats", "Survey", "WriteSnapshot",
    ]  # fmt: skip
