"""Encodes messages of shard.proto and the JSON they carry, and decodes them.

pserver.protocol.frames has the messages of the data plane.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from headrace import documents
from headrace.codec import plain, typed
from headrace.pserver.config import TableSection, Wire
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol.shards import ShardCommitPart, ShardFigures, TableStats
from headrace.pserver.protocol.table_operations import (
    TableOperation,
    message_of,
    operation_of,
    sum_by_group,
)

FORMAT = 7
"""Version of the protocol, on gRPC and on the data plane; both ends must have the same."""
SERVICE = pb.DESCRIPTOR.services_by_name["Shard"]
"""The calls of shard.proto."""


def tables_json(tables: Mapping[str, TableSection], wire: Wire = Wire.FLOAT32) -> bytes:
    """The sections of the tables, and how their rows travel, as text: equal ones give equal text."""
    sections = {name: section.model_dump(mode="json") for name, section in tables.items()}
    text = json.dumps(sections, sort_keys=True)
    return (text if wire is Wire.FLOAT32 else f"{text} {wire}").encode()


def operations_json(operations: Sequence[TableOperation]) -> bytes:
    """Operations as text."""
    return json.dumps([message_of(operation) for operation in operations]).encode()


def operations_from(text: bytes) -> list[TableOperation]:
    """The inverse of `operations_json`."""
    return [operation_of(message) for message in documents.parse(text, "operations")]


def parts_json(parts: Sequence[ShardCommitPart]) -> bytes:
    """Parts of a commit as text."""
    return json.dumps(plain(parts)).encode()


def parts_from(text: bytes) -> list[ShardCommitPart]:
    """The inverse of `parts_json`. Raises InvalidShardCall where a name leads out of a commit."""
    what = "parts of a commit"
    return typed(list[ShardCommitPart], documents.parse(text, what), what, InvalidShardCall)


def with_stats(stats: Mapping[str, TableStats], refused: Mapping[str, int], figures: ShardFigures) -> pb.StatsReply:
    """A StatsReply."""
    reply = pb.StatsReply(refused=refused, figures_json=json.dumps(asdict(figures)).encode())
    for name, of_table in stats.items():
        counts = reply.tables[name]
        counts.num_rows, counts.num_bytes, counts.new_rows = of_table.num_rows, of_table.num_bytes, of_table.new_rows
        counts.rows_by_group.update(of_table.rows_by_group)
        counts.new_by_group.update(of_table.new_by_group)
        counts.dirty_rows = of_table.dirty_rows
        counts.sweeping, counts.unadmitted = of_table.sweeping, of_table.unadmitted
        if of_table.max_dirty_rows is not None:
            counts.max_dirty_rows = of_table.max_dirty_rows
    return reply


def figures_from(reply: pb.StatsReply) -> ShardFigures:
    """The traffic and waits of a shard."""
    found = documents.parse_object(reply.figures_json, "the figures of a shard")
    return ShardFigures(found["links"], found["waited_s"], found["apart"])


def stats_from(replies: Sequence[pb.StatsReply], table: str) -> TableStats:
    """The stats of a table from the StatsReply of every shard."""
    counts = [reply.tables[table] for reply in replies]
    fullest = max(counts, key=lambda count: count.dirty_rows)
    return TableStats(
        sum(count.num_rows for count in counts),
        sum(count.num_bytes for count in counts),
        sum(count.new_rows for count in counts),
        sum_by_group(count.rows_by_group for count in counts),
        fullest.dirty_rows,
        fullest.max_dirty_rows if fullest.HasField("max_dirty_rows") else None,
        any(count.sweeping for count in counts),
        sum(count.unadmitted for count in counts),
        sum_by_group(count.new_by_group for count in counts),
    )
