"""Encodes messages of shard.proto with the arrays they carry, and decodes them.

Arrays are sent as the last field of a message, `payload`, with one copy. They are decoded as read-only views of it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import DTypeLike, NDArray

from millrace import documents
from pserver.config import TableSection
from pserver.errors import InvalidShardCall
from pserver.proto import shard_pb2 as pb
from pserver.protocol.shards import F32, Gradients, Keys, ShardCommitPart, TableStats
from pserver.protocol.table_operations import ShrinkSurvey, TableOperation, message_of, operation_of

FORMAT = 3
"""Version of the protocol; both ends must have the same."""
PAYLOAD_TAG = bytes([15 << 3 | 2])
"""Protobuf's tag of field 15, which has a length and bytes."""
SERVICE = pb.DESCRIPTOR.services_by_name["Shard"]
"""The calls of shard.proto."""

Sent = TypeVar("Sent", bound=Message, covariant=True)
KeyedMessage = pb.AnnounceRequest | pb.ExchangeRequest | pb.RowsReply
"""Messages whose `parts` say how many keys each table has."""


class WithPayload(Protocol):
    """A message whose last field holds arrays."""

    @property
    def payload(self) -> bytes:
        """The arrays' bytes."""
        ...


@dataclass(frozen=True, slots=True)
class MessageWithArrays(Generic[Sent]):
    """A message with the arrays of its payload, which are not copied yet."""

    message: Sent
    arrays: Sequence[NDArray[Any]]


def encoded(outgoing: Message | MessageWithArrays[Message]) -> bytes:
    """The bytes of a message or a Loaded message. Encoded fields of protobuf may simply be concatenated."""
    if not isinstance(outgoing, MessageWithArrays):
        return outgoing.SerializeToString()
    num_bytes = sum(array.nbytes for array in outgoing.arrays)
    if num_bytes == 0:
        return outgoing.message.SerializeToString()
    arrays = (np.ascontiguousarray(array).data for array in outgoing.arrays if array.size)
    return b"".join([outgoing.message.SerializeToString(), PAYLOAD_TAG, _varint(num_bytes), *arrays])


def _varint(number: int) -> bytes:
    """Protobuf's encoding of a length: seven bits in each byte, lowest bits first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


class Payload:
    """Reads a message's payload from its beginning."""

    def __init__(self, message: WithPayload) -> None:
        """`message` must have a payload."""
        self._bytes, self._at = message.payload, 0

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """The next array of the payload."""
        count = int(np.prod(shape))
        num_bytes = count * np.dtype(dtype).itemsize
        if self._at + num_bytes > len(self._bytes):
            raise InvalidShardCall(f"a payload of {len(self._bytes)} bytes ends within an array")
        array = np.frombuffer(self._bytes, dtype, count, self._at) if count else np.empty(0, dtype)
        self._at += num_bytes
        if not array.flags.aligned:  # after an odd number of slot groups; kernels need aligned arrays
            array = array.copy()
            array.flags.writeable = False
        return array.reshape(shape)

    def end(self) -> None:
        """Check that the payload ends here."""
        if self._at != len(self._bytes):
            raise InvalidShardCall(f"a payload of {len(self._bytes)} bytes, {self._at} of them expected")


def _parts(message: KeyedMessage) -> Iterator[tuple[str, int]]:
    return ((part.table, part.num_keys) for part in message.parts)


def with_keys(message: pb.AnnounceRequest, tables: Mapping[str, Keys]) -> MessageWithArrays[pb.AnnounceRequest]:
    """`message` with keys."""
    arrays: list[NDArray[Any]] = []
    for name, keys in tables.items():
        message.parts.add(table=name, num_keys=len(keys.keys_U))
        arrays += [keys.keys_U, keys.group_U]
    return MessageWithArrays(message, arrays)


def keys_from(message: pb.AnnounceRequest) -> dict[str, Keys]:
    """Keys by table."""
    payload = Payload(message)
    found = {n: Keys(payload.take(np.uint64, count), payload.take(np.uint16, count)) for n, count in _parts(message)}
    payload.end()
    return found


def with_gradients(
    message: pb.ExchangeRequest, tables: Mapping[str, Gradients]
) -> MessageWithArrays[pb.ExchangeRequest]:
    """`message` with gradients."""
    arrays: list[NDArray[Any]] = []
    for name, push in tables.items():
        message.parts.add(table=name, num_keys=len(push.show_U))
        arrays += [push.grads_UD, push.show_U, push.click_U]
    return MessageWithArrays(message, arrays)


def gradients_from(message: pb.ExchangeRequest, widths: Mapping[str, int]) -> dict[str, Gradients]:
    """Gradients by table; `widths` are D of each."""
    payload, found = Payload(message), {}
    for name, count in _parts(message):
        if name not in widths:
            raise InvalidShardCall(f"gradients of table {name!r}, which is not here")
        grads_UD = payload.take(np.float32, count, widths[name])
        found[name] = Gradients(grads_UD, payload.take(np.float32, count), payload.take(np.float32, count))
    payload.end()
    return found


def with_rows(rows: Mapping[str, F32]) -> MessageWithArrays[pb.RowsReply]:
    """A RowsReply."""
    message = pb.RowsReply(parts=[pb.TablePart(table=name, num_keys=len(rows_UD)) for name, rows_UD in rows.items()])
    return MessageWithArrays(message, list(rows.values()))


def rows_from(reply: pb.RowsReply, widths: Mapping[str, int]) -> dict[str, F32]:
    """(U, D) rows by table of a RowsReply."""
    payload = Payload(reply)
    found = {name: payload.take(np.float32, count, widths[name]) for name, count in _parts(reply)}
    payload.end()
    return found


def tables_json(tables: Mapping[str, TableSection]) -> bytes:
    """The sections of the tables as text: equal sections give equal text."""
    sections = {name: section.model_dump(mode="json") for name, section in tables.items()}
    return json.dumps(sections, sort_keys=True).encode()


def operations_json(operations: Sequence[TableOperation]) -> bytes:
    """Operations as text."""
    return json.dumps([message_of(operation) for operation in operations]).encode()


def operations_from(text: bytes) -> list[TableOperation]:
    """The inverse of `operations_json`."""
    return [operation_of(message) for message in documents.parse(text, "operations")]


def survey_json(survey: ShrinkSurvey | None) -> bytes:
    """A survey as text; empty while it is counted."""
    return b"" if survey is None else json.dumps(asdict(survey)).encode()


def survey_from(text: bytes) -> ShrinkSurvey | None:
    """The inverse of `survey_json`."""
    if not text:
        return None
    found = documents.parse_object(text, "a survey")
    below, unseen = ({int(group): count for group, count in found[why].items()} for why in ("below", "unseen"))
    return ShrinkSurvey(found["rows"], below, unseen)


def sum_of_surveys(surveys: Sequence[ShrinkSurvey]) -> ShrinkSurvey:
    """The sum of the counts of all shards."""

    def total(counts: Sequence[Mapping[int, int]]) -> dict[int, int]:
        groups = sorted({group for each in counts for group in each})
        return {group: sum(each.get(group, 0) for each in counts) for group in groups}

    below, unseen = total([each.below for each in surveys]), total([each.unseen for each in surveys])
    return ShrinkSurvey(sum(each.rows for each in surveys), below, unseen)


def parts_json(parts: Sequence[ShardCommitPart]) -> bytes:
    """Parts of a commit as text."""
    return json.dumps([part.message() for part in parts]).encode()


def parts_from(text: bytes) -> list[ShardCommitPart]:
    """The inverse of `parts_json`."""
    return [ShardCommitPart.of_message(message) for message in documents.parse(text, "parts of a commit")]


def with_stats(stats: Mapping[str, TableStats]) -> pb.StatsReply:
    """A StatsReply."""
    reply = pb.StatsReply()
    for name, of_table in stats.items():
        counts = reply.tables[name]
        counts.num_rows, counts.num_bytes, counts.new_rows = of_table.num_rows, of_table.num_bytes, of_table.new_rows
        counts.rows_by_group.update(of_table.rows_by_group)
        counts.dirty_rows = of_table.dirty_rows
        counts.sweeping, counts.unadmitted = of_table.sweeping, of_table.unadmitted
        if of_table.max_dirty_rows is not None:
            counts.max_dirty_rows = of_table.max_dirty_rows
    return reply


def stats_from(replies: Sequence[pb.StatsReply], table: str) -> TableStats:
    """The stats of a table from the StatsReply of every shard."""
    counts = [reply.tables[table] for reply in replies]
    groups = sorted({group for count in counts for group in count.rows_by_group})
    fullest = max(counts, key=lambda count: count.dirty_rows)
    return TableStats(
        sum(count.num_rows for count in counts),
        sum(count.num_bytes for count in counts),
        sum(count.new_rows for count in counts),
        {group: sum(dict(count.rows_by_group).get(group, 0) for count in counts) for group in groups},
        fullest.dirty_rows,
        fullest.max_dirty_rows if fullest.HasField("max_dirty_rows") else None,
        any(count.sweeping for count in counts),
        sum(count.unadmitted for count in counts),
    )
