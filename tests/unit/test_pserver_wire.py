"""Messages between trainers and shards: the decoder reads what the encoder writes, and refuses all else."""

import json
import struct
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import packed, plain
from headrace.pserver.config import TableSection
from headrace.pserver.errors import (
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
from headrace.pserver.protocol import frames, messages, statuses
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.frames import DataCall, DataReply, DataRequest, TableNumbers
from headrace.pserver.protocol.parts import Part
from headrace.pserver.protocol.shard_command import reply_from
from headrace.pserver.protocol.shards import Gradients, Keys, ShardCommitPart, ShardFigures
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ExportCut,
    ForgetRow,
    SetTables,
    ShrinkRows,
    ShrinkSurvey,
)
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.server.commands import (
    CountRows,
    Explain,
    JobCounts,
    Operate,
    RestoreCommit,
    ShardCounts,
    SurveyShrink,
    TakeSnapshot,
    WriteSnapshot,
    command_from,
)
from headrace.pserver.store.row_store import StoredFile

COUNTS = st.dictionaries(st.sampled_from(["a", "b", "a table of a longer name"]), st.integers(0, 70), max_size=3)


def floats(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def received(arrays):
    """The arrays of a message as the other end has them: at odd places in memory."""
    return [memoryview(b"x" + bytes(array))[1:] for array in arrays]


@given(COUNTS, st.booleans())
def test_keys_survive_encoding(counts, learn):
    tables = {
        n: Keys(np.arange(c, dtype=np.uint64) << np.uint64(33), np.arange(c, dtype=np.uint16))
        for n, c in counts.items()
    }
    request = DataRequest(DataCall.ANNOUNCE, 7, 3, 1 << 40, 2.5, batch=300, learn=learn, parts=tuple(counts.items()))
    numbers = TableNumbers(dict.fromkeys(counts, 1))
    assert frames.decode_request(memoryview(frames.encode_request(request, numbers)), numbers) == request
    found = frames.keys_from(request, received(frames.key_frames(tables)))
    assert list(found) == list(tables)
    for name, keys in tables.items():
        assert (found[name].keys_U == keys.keys_U).all() and (found[name].group_U == keys.group_U).all()
        assert found[name].keys_U.flags.aligned and not found[name].keys_U.flags.writeable


PARTS = st.builds(Part, st.booleans(), *[st.integers(0, (1 << 32) - 1)] * 3)


@given(COUNTS, st.integers(1, 9), st.none() | st.integers(0, 1 << 63), st.none() | st.integers(0, 1 << 63), PARTS)
def test_gradients_and_rows_survive_encoding_bit_for_bit(counts, dim, batch, following, part):
    tables = {n: Gradients(floats(1, c, dim), floats(2, c), floats(3, c)) for n, c in counts.items()}
    widths, parts = dict.fromkeys(counts, dim), tuple(counts.items())
    numbers = TableNumbers(widths)
    request = DataRequest(
        DataCall.EXCHANGE, 1, 0, 5, 0.0, 9, 8, batch, following=following, batch_samples=1 << 50, parts=parts, part=part
    )
    assert frames.decode_request(memoryview(frames.encode_request(request, numbers)), numbers) == request
    found = frames.gradients_from(request, received(frames.gradient_frames(tables)), widths)
    for name, push in tables.items():
        assert (found[name].grads_UD == push.grads_UD).all() and found[name].grads_UD.shape == push.grads_UD.shape
        assert (found[name].show_U == push.show_U).all() and (found[name].click_U == push.click_U).all()
    rows = {name: push.grads_UD for name, push in tables.items()}
    reply = DataReply(6, parts=parts)
    assert frames.decode_reply(memoryview(frames.encode_reply(reply, numbers)), numbers) == reply
    back = frames.rows_from(reply, received(frames.row_frames(rows)), widths)
    assert all((back[name] == rows[name]).all() for name in rows) and list(back) == list(rows)


@given(st.sampled_from(sorted(code.value[0] for code in grpc.StatusCode if code.value[0])), st.text())
def test_an_error_survives_encoding(status, details):
    reply, numbers = DataReply(6, status, details.encode("utf-8", "replace").decode()), TableNumbers({})
    assert frames.decode_reply(memoryview(frames.encode_reply(reply, numbers)), numbers) == reply


@pytest.mark.parametrize("change", [-4, 4])
def test_an_array_of_the_wrong_length_is_refused(change):
    reply = DataReply(1, parts=(("a", 2),))
    with pytest.raises(InvalidShardCall, match=f"payload of {24 + change} bytes, 24 of them expected"):
        frames.rows_from(reply, [memoryview(bytes(2 * 3 * 4 + change))], {"a": 3})


@pytest.mark.parametrize("num_frames", [0, 2])
def test_too_few_or_too_many_arrays_are_refused(num_frames):
    with pytest.raises(InvalidShardCall, match="payload of 0 bytes|has more than it says"):
        frames.rows_from(DataReply(1, parts=(("a", 2),)), [memoryview(bytes(24))] * num_frames, {"a": 3})


def test_another_format_is_refused_in_every_message():
    numbers = TableNumbers({"a": 1})
    request = bytearray(frames.encode_request(DataRequest(DataCall.PULL, 1, 0, 5, 1.0, batch=1), numbers))
    reply = bytearray(frames.encode_reply(DataReply(5), numbers))
    assert request[0] == reply[0] == messages.FORMAT == 8
    request[0] = reply[0] = 3
    with pytest.raises(InvalidShardCall, match="the caller speaks format 3, this shard format 8"):
        frames.decode_request(memoryview(request), numbers)
    with pytest.raises(InvalidShardCall, match="format 3, not 8"):
        frames.decode_reply(memoryview(reply), numbers)


def valid_header(parts=()):
    request = DataRequest(DataCall.EXCHANGE, 1, 0, 5, 1.0, batch=1, parts=parts)
    return frames.encode_request(request, TableNumbers({"a": 1, "b": 2}))


@given(st.binary(max_size=120) | st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=30)))
def test_a_malformed_header_is_refused_and_nothing_else(change):
    """Random bytes, or a valid header with some of its bytes replaced."""
    numbers, header = TableNumbers({"a": 1, "b": 2}), bytearray(valid_header((("a", 2), ("b", 1))))
    if isinstance(change, bytes):
        header = bytearray(change)
    else:
        header[change[0] : change[0] + len(change[1])] = change[1]
    for decode in (frames.decode_request, frames.decode_reply):
        with suppress(InvalidShardCall):
            decode(memoryview(header), numbers)
    assert frames.request_number(memoryview(header)) is None or len(header) >= len(valid_header())


@pytest.mark.parametrize("parts", [((2, 1),), ((0, 1), (0, 1))])
def test_tables_that_are_not_here_or_come_twice_are_refused(parts):
    encoded = b"".join(struct.pack("<II", *part) for part in parts)
    with pytest.raises(InvalidShardCall, match="of 2 tables"):
        frames.decode_request(memoryview(valid_header() + encoded), TableNumbers({"a": 1, "b": 2}))


def test_tables_are_equal_in_any_order_and_differ_with_any_setting():
    one, two = TableSection(dim=1), TableSection(dim=2)
    assert messages.tables_json({"a": one, "b": two}) == messages.tables_json({"b": two, "a": one})
    assert messages.tables_json({"a": one}) != messages.tables_json({"a": TableSection(dim=1, init_range=0.5)})


def over_the_wire(command, reply):
    """A reply as the caller of a command gets it."""
    return reply_from(command_from(type(command).__name__, packed(command)), packed(reply))


def test_counts_of_shards_add_up_and_the_fullest_one_counts():
    one = TableStats(3, 100, 1, {1: 2, 4: 1}, dirty_rows=3, max_dirty_rows=9, frozen_groups=(4,))
    two = TableStats(2, 50, 0, {4: 2}, dirty_rows=8, max_dirty_rows=10, frozen_groups=(4,))
    figures = ShardFigures({"trainer-0": {"sent_bytes": 5}}, [[0.5]], [{"mean": 0.5, "max": 2, "behind": 3}])
    sent = [ShardCounts({"a": stats}, figures, {"silent": 7}) for stats in (one, two)]
    replies = [over_the_wire(CountRows(), each) for each in sent]
    assert replies == sent
    assert json.dumps(asdict(replies[0])) == json.dumps(asdict(sent[0])), "counts stay whole numbers"
    total = TableStats(5, 150, 1, {1: 2, 4: 3}, 8, 10, frozen_groups=(4,))
    assert CountRows().combine(replies) == JobCounts({"a": total}, [figures] * 2, {"silent": 14})
    assert TableStats.total([TableStats(1, 1, 1, {0: 1})]).max_dirty_rows is None


FACTS = {"a": TableFacts(3, {1: 3})}
PART = ShardCommitPart("shard-1", (2048, 4096), FACTS, {"shard-1/a/1.sst": StoredFile("ab" * 32, 12)})


@pytest.mark.parametrize(
    "command",
    [
        CountRows(),
        Explain("a", 1 << 63, 3),
        Operate(3, [AdvanceDay(to=2), ShrinkRows(table="a"), ForgetRow(table="a", group=1, key=1 << 63)]),
        Operate(3, [SetTables(tables={"a": {"dim": 4}}), ExportCut(since=2, tables=("a",))]),
        RestoreCommit(Path("/a"), [PART, PART], 3),
        RestoreCommit(Path("/a"), [], 0),
        SurveyShrink(ShrinkRows(table="a", delete_below=0.1)),
        TakeSnapshot(3),
    ],
)
def test_a_command_survives_encoding(command):
    assert command_from(type(command).__name__, packed(command)) == command


def test_a_reply_survives_encoding():
    assert over_the_wire(WriteSnapshot(Path("/a")), PART) == PART
    assert over_the_wire(SurveyShrink(ShrinkRows(table="a")), None) is None
    survey = ShrinkSurvey(9, {1: 2}, {})
    assert over_the_wire(SurveyShrink(ShrinkRows(table="a")), survey) == survey


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Restart", {}, "unknown command 'Restart'"),
        ("PlainCommand", {}, "unknown command 'PlainCommand'"),
        ("TakeSnapshot", {"version": "3"}, r"TakeSnapshot: Expected `int`, got `str` - at `\$.version`"),
        ("Operate", {"version": 3, "operations": [{"op": "set on fire"}]}, "Operate: Invalid value 'set on fire'"),
        (
            "RestoreCommit",
            {"folder": "/a", "parts": [plain(PART) | {"folder": "../a"}], "version": 3},
            "RestoreCommit: .*parts",
        ),
    ],
)
def test_a_command_that_no_trainer_sends_is_refused(name, fields, message):
    with pytest.raises(InvalidShardCall, match=message):
        command_from(name, packed(fields))


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
    assert statuses.code_of(statuses.number_of(code)) is code
    error = statuses.error_of_status(code, "why", "shard 3", 2)
    assert type(error) is ours and isinstance(error, PserverError) and error.exit_code == exit_code


@pytest.mark.parametrize(
    "error",
    [
        ShardUnavailable("shard 3", 2, "why"),
        StepTimedOut("waited"),
        StaleGeneration("why"),
        MessageTooLarge("shard 3", "why"),
        InvalidShardCall("why"),
        StoreFailed("why"),
        StoreDamaged("why"),
        OutOfMemory("why"),
    ],
)
def test_an_error_of_a_shard_is_the_same_one_at_its_caller(error):
    code = statuses.status_of(error)
    assert type(statuses.error_of_status(code, str(error), "shard 3", 2)) is type(error)


def test_the_surface_of_the_protocol_is_the_one_we_promised():
    part = Part(True, 10, 11, 12)
    request = DataRequest(DataCall.EXCHANGE, 1, 2, 3, 0.5, 4, 5, 6, True, 7, 8, (("b", 9),), part=part)
    header = frames.encode_request(request, TableNumbers({"a": 1, "b": 2}))
    assert header == struct.pack("<HBBIIQIIQQQd5I", 8, 3, 23, 1, 2, 3, 4, 5, 6, 7, 8, 0.5, 10, 11, 12, 1, 9)
    assert frames.encode_reply(DataReply(3, 4, "why"), TableNumbers({})) == struct.pack("<HBBQ", 8, 4, 0, 3) + b"why"
    assert sorted(method.name for method in messages.SERVICE.methods) == ["Call", "Hello"]
