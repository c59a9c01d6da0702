"""Commands to shards: each call that is not one of every step is a frozen class, described once.

A command has its fields, its gate, `apply`, which a shard does, and `combine`, which makes one result of the replies of
all shards. pserver.server.commands has the commands, pserver.server.shard_host runs them on a shard, in a trainer's
process or in one of its own. They travel as the name of the class and its fields; so do replies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from headrace import codec
from headrace.deadline import Deadline

Reply = TypeVar("Reply")
Result = TypeVar("Result", covariant=True)


class CallerThread(Enum):
    """The thread of a trainer that sends a command, and how. No thread of one kind waits behind another."""

    LOOP = auto()
    """The loop's: all shards at the same time."""
    READER = auto()
    """The one that reads a pass: each shard gets its part, all at the same time."""
    COMMIT = auto()
    """The one that writes and settles snapshots: all shards at the same time."""
    ANY = auto()
    """Any: one shard after another."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The ranks that may send a command, and when."""

    only_rank_0: bool
    between_steps: bool
    """Whether a shard runs it alone, while no step is applied; otherwise beside all other calls."""
    thread: CallerThread


OF_ANY_RANK = Gate(only_rank_0=False, between_steps=False, thread=CallerThread.LOOP)
BETWEEN_STEPS = Gate(only_rank_0=False, between_steps=True, thread=CallerThread.LOOP)
BETWEEN_PASSES = Gate(only_rank_0=True, between_steps=True, thread=CallerThread.LOOP)
"""A shard checks that no pass is open, or that its rows are as the last close left them."""
IN_PASS = Gate(only_rank_0=False, between_steps=False, thread=CallerThread.READER)
"""Every rank sends it once in each open pass; a shard answers when all ranks have."""
COMMITTING = Gate(only_rank_0=True, between_steps=False, thread=CallerThread.COMMIT)
ANY_TIME = Gate(only_rank_0=True, between_steps=False, thread=CallerThread.ANY)


@dataclass(frozen=True, slots=True)
class CommandCall:
    """The call that brought a command to a shard."""

    rank: int
    deadline: Deadline


class ShardCommand(Generic[Reply, Result]):
    """A call to all shards, or to the one that has a key. A subclass is a frozen dataclass.

    A command may be repeated, since a reply may be lost: a repeat changes nothing.
    """

    gate: ClassVar[Gate]
    kinds: ClassVar[dict[str, type["ShardCommand[Any, Any]"]]] = {}
    """All commands, by name."""

    def __init_subclass__(cls) -> None:
        if "gate" in vars(cls):
            ShardCommand.kinds[cls.__name__] = cls

    def key(self) -> int | None:
        """The key whose shard alone gets the command; None: all shards do."""
        return None

    def check(self) -> None:
        """Raise InvalidShardCall for fields that no trainer sends."""

    def apply(self, host: Any, call: CommandCall) -> Reply:
        """Act on one shard, a pserver.server.shard_host.ShardHost. Its return type tells how the reply is decoded.

        A command of ANY_TIME returns None while the shard still works on it: it is sent again later, and not to shards
        that have replied."""
        raise NotImplementedError

    def combine(self, replies: Sequence[Reply]) -> Result:
        """The result, from the replies of all shards in their order."""
        raise NotImplementedError


class PlainCommand(ShardCommand[None, None]):
    """A command without a result."""

    def combine(self, replies: Sequence[None]) -> None:
        """Nothing."""


def reply_from(command: ShardCommand[Reply, Any], data: bytes) -> Reply:
    """The reply of a shard to a command."""
    reply: Reply = codec.unpacked(
        get_type_hints(command.apply)["return"], data, f"the reply to {type(command).__name__}"
    )
    return reply
