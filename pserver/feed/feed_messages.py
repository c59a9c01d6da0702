"""Messages of feed.proto with the arrays they carry, to bytes and back.

pserver.feed.payloads encodes arrays; pserver.feed.publisher decides which messages are sent.

Shapes: U deleted keys, P present rows, D weights of a row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import documents
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed.payloads import MessageWithArrays, Payload
from headrace.pserver.feed.table_changes import PresentRows, TableDelta
from headrace.pserver.proto import feed_pb2 as pb
from headrace.pserver.protocol.shards import U64

FORMAT = 1
"""Version of the messages' meaning; both ends must have the same."""
PART_BYTES = 4 << 20
"""About how much of rows or keys one message holds."""
MAX_MESSAGE_BYTES = 1 << 30
"""Bound of a message. Rank 0 sends all tensors of a model in one."""
SERVICE = pb.DESCRIPTOR.services_by_name["Feed"]
NO_GONE = np.empty(0, np.uint64)

Outgoing = MessageWithArrays[pb.FeedPart]
"""A message that is to be sent, with its arrays."""


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """A message, its arrays read-only views of it."""

    kind: pb.FeedPart.Kind
    version: int
    whole: bool
    tables: Mapping[str, TableDelta]
    tensors: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]
    onnx: bytes


def begin(*, whole: bool) -> Outgoing:
    """The first message of a shard."""
    return MessageWithArrays(pb.FeedPart(kind=pb.FeedPart.BEGIN, whole=whole), [])


def read() -> Outgoing:
    """The mark that the base is complete."""
    return MessageWithArrays(pb.FeedPart(kind=pb.FeedPart.READ), [])


def version(number: int, facts: Mapping[str, Any] | None = None) -> Outgoing:
    """The mark that everything up to a version was sent, with what a shard says of it."""
    told = json.dumps(facts).encode() if facts else b""
    return MessageWithArrays(pb.FeedPart(kind=pb.FeedPart.VERSION, version=number, facts_json=told), [])


def rows(kind: pb.FeedPart.Kind, table: str, delta: TableDelta) -> Iterator[Outgoing]:
    """The changes of a table, in messages of a bounded size; none if there are no changes."""
    present, width = delta.rows, delta.rows.rows_PD.shape[1]
    at_once = max(1, PART_BYTES // (10 + 4 * width))
    for begin_P in range(0, len(present.keys_P), at_once):
        chosen = slice(begin_P, begin_P + at_once)
        arrays = present.keys_P[chosen], present.group_P[chosen], present.rows_PD[chosen]
        part = pb.FeedRows(table=table, num_rows=len(arrays[0]), width=width)
        yield MessageWithArrays(pb.FeedPart(kind=kind, tables=[part]), arrays)
    for begin_U in range(0, len(delta.gone_U), PART_BYTES // 8):
        gone_U = delta.gone_U[begin_U : begin_U + PART_BYTES // 8]
        part = pb.FeedRows(table=table, width=width, num_gone=len(gone_U))
        yield MessageWithArrays(pb.FeedPart(kind=kind, tables=[part]), [gone_U])


def dense(number: int, tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> Outgoing:
    """Rank 0's message of a version."""
    message = pb.FeedPart(kind=pb.FeedPart.VERSION, version=number, facts_json=json.dumps(facts).encode())
    for name, value in tensors.items():
        message.tensors.add(name=name, dtype=value.dtype.str, shape=value.shape)
    return MessageWithArrays(message, [value.reshape(-1) for value in tensors.values()])


def introduction(facts: Mapping[str, Any], onnx: bytes | None) -> Outgoing:
    """The first message of rank 0, and the one after its model changed."""
    return MessageWithArrays(
        pb.FeedPart(kind=pb.FeedPart.BEGIN, facts_json=json.dumps(facts).encode(), onnx=onnx or b""), []
    )


def num_bytes(outgoing: Sequence[Outgoing]) -> int:
    """About how much memory the messages hold until they are sent."""
    return sum(100 + len(each.message.onnx) + sum(array.nbytes for array in each.arrays) for each in outgoing)


def part_of(message: pb.FeedPart) -> FeedMessage:
    """A message, decoded. Raises InvalidShardCall where its payload does not fit."""
    payload, tables, tensors = Payload(message), dict[str, TableDelta](), dict[str, NDArray[Any]]()
    for each in message.tables:
        keys_P, group_P = payload.take(np.uint64, each.num_rows), payload.take(np.uint16, each.num_rows)
        present = PresentRows(keys_P, group_P, payload.take(np.float32, each.num_rows, each.width))
        tables[each.table] = TableDelta(present, _gone(payload, each.num_gone))
    for tensor in message.tensors:
        tensors[tensor.name] = payload.take(_dtype(tensor.dtype), *tensor.shape)
    payload.end()
    facts = documents.parse_object(message.facts_json, "facts of a feed") if message.facts_json else {}
    return FeedMessage(message.kind, message.version, message.whole, tables, tensors, facts, message.onnx)


def _gone(payload: Payload, count: int) -> U64:
    return payload.take(np.uint64, count) if count else NO_GONE


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in "fiub":  # no objects, no structures
        raise InvalidShardCall(f"a tensor of type {text!r}")
    return dtype
