"""The commands of a shard: operations on tables, questions about rows, the live feed, commits.

pserver.protocol.shard_command tells how they travel. The calls of every step are in pserver.protocol.shards.Shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace import codec
from headrace.codec import NotUnderstood
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shard_command import ANY_TIME, CommandCall, Gate, ShardCommand
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.server.shard_host import ShardHost


@dataclass(frozen=True, slots=True)
class SurveyShrink(ShardCommand[ShrinkSurvey | None, ShrinkSurvey | None]):
    """The rows that `shrink` would delete now.

    A thread of each shard counts while training goes on, so rows that change meanwhile may count either way. None
    while it counts: ask again. With `at_once`, between passes only: counted in this call, exactly.
    """

    gate: ClassVar[Gate] = ANY_TIME
    shrink: ShrinkRows

    def apply(self, host: ShardHost, call: CommandCall) -> ShrinkSurvey | None:
        return host.shard.survey(self.shrink)

    def combine(self, replies: Sequence[ShrinkSurvey | None]) -> ShrinkSurvey | None:
        surveys = [each for each in replies if each is not None]
        return ShrinkSurvey.total(surveys) if len(surveys) == len(replies) else None


@dataclass(frozen=True, slots=True)
class Explain(ShardCommand[dict[str, Any], dict[str, Any]]):
    """Everything known about a key, as JSON-able data: see pserver.tables.table.ShardTable.explain.

    The result also has the "shard", if shards are processes."""

    gate: ClassVar[Gate] = ANY_TIME
    table: str
    of_key: int
    group: int

    def key(self) -> int:
        return self.of_key

    def apply(self, host: ShardHost, call: CommandCall) -> dict[str, Any]:
        known = host.shard.table(self.table).explain(self.of_key, self.group)
        return known if host.number is None else known | {"shard": host.number}

    def combine(self, replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        (known,) = replies
        return known


def command_from(name: str, fields: bytes) -> ShardCommand[Any, Any]:
    """The command that a caller sent. Raises InvalidShardCall."""
    if name not in ShardCommand.kinds:
        raise InvalidShardCall(f"unknown command {name!r}")
    try:
        command = codec.unpacked(ShardCommand.kinds[name], fields, name)
    except NotUnderstood as error:
        raise InvalidShardCall(str(error)) from error
    command.check()
    return command
