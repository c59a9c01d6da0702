"""Decides what a call means at this moment on a shard: the open pass, the last version, the one snapshot in flight.

Pure: no lock, no wait, no rows. A pass opens when the first rank asks and closes when every rank has asked. Between
passes a snapshot may be taken; it is in flight until it is settled. Repeats are harmless; every other call out of turn
is refused. The order of pushes inside a pass is the work of a consistency policy (pserver.consistency).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.pserver.consistency.policy import Consistency, StepOrder
from headrace.pserver.consistency.sync import names
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.parts import MAX_PARTS


class CallVerdict(Enum):
    """The decision about a call."""

    ACT = auto()
    """Act now: open or close the pass, or apply pushes. Then call the method that records it."""
    WAIT = auto()
    """The call counts; calls of other ranks are missing."""
    REPEAT = auto()
    """The call was acted on before: answer, and change nothing."""


@dataclass(slots=True)
class PassState:
    """The state of a shard as its callers see it."""

    num_ranks: int
    policy: Consistency
    pass_number: int = 0
    """The open pass, or the last one closed."""
    is_open: bool = False
    steps: StepOrder = field(init=False)
    """The pushes of the open pass."""
    parts: dict[int, StepOrder] = field(default_factory=dict)
    """Those of further parts of its exchanges, by number (pserver.protocol.parts)."""
    left: set[int] = field(default_factory=set)
    """Ranks that push no more in the open pass."""
    closing: dict[int, int] = field(default_factory=dict)
    """Ranks that asked for the close, with the day they gave."""
    version: int = 0
    """The last pass closed, or the version restored."""
    restored: int | None = None
    """The version restored before the first pass."""
    operated: int | None = None
    """The version at whose close operations acted last."""
    in_flight: int | None = None
    """The version whose snapshot is taken and not settled."""

    def __post_init__(self) -> None:
        self.steps = self.policy.steps(0, self.num_ranks)

    def open_pass(self, pass_number: int) -> CallVerdict:
        """A rank asks to open a pass. ACT: it is open; prepare for its steps."""
        if self.is_open and pass_number == self.pass_number:
            return CallVerdict.REPEAT
        if self.is_open:
            raise InvalidShardCall(f"pass {pass_number} cannot open: pass {self.pass_number} is not closed")
        if pass_number <= self.pass_number:
            raise InvalidShardCall(f"pass {pass_number} cannot open: pass {self.pass_number} was closed before")
        self.pass_number, self.is_open = pass_number, True
        self.steps = self.policy.steps(pass_number, self.num_ranks)
        self.parts.clear()
        self.left.clear()
        return CallVerdict.ACT

    def order(self, part: int) -> StepOrder:
        """The pushes of one part of the exchanges of the open pass."""
        if not part:
            return self.steps
        if part not in self.parts:
            if part > MAX_PARTS:
                raise InvalidShardCall(f"part {part} of an exchange; there are {MAX_PARTS} at most")
            self.parts[part] = self.policy.steps(self.pass_number, self.num_ranks)
            for rank in self.left:
                self.parts[part].leave(rank)
        return self.parts[part]

    def leave(self, pass_number: int, rank: int) -> None:
        """A rank pushes no more in the open pass."""
        self.check_open(pass_number, rank)
        self.left.add(rank)
        for order in self._orders():
            order.leave(rank)

    def push(self, pass_number: int, step: int, rank: int, part: int = 0) -> CallVerdict:
        """A rank pushes a part of a step. After ACT: apply the pushes of `order(part).due`, then call its `applied`."""
        self.check_open(pass_number, rank)
        order = self.order(part)
        if not order.push(step, rank):
            return CallVerdict.REPEAT
        return CallVerdict.ACT if order.due() else CallVerdict.WAIT

    def close_pass(self, pass_number: int, rank: int, day: int) -> CallVerdict:
        """A rank asks to close a pass. After ACT: close it, then call `closed`."""
        if not self.is_open and pass_number == self.pass_number:
            return CallVerdict.REPEAT
        self.check_open(pass_number, rank)
        for order in self._orders():
            order.close(rank)
        self.closing[rank] = day
        if len(set(self.closing.values())) > 1:
            raise InvalidShardCall(f"ranks disagree on the day of pass {pass_number}: {self.closing}")
        return CallVerdict.ACT if len(self.closing) == self.num_ranks else CallVerdict.WAIT

    def closed(self) -> None:
        """The open pass is closed."""
        self.is_open, self.version = False, self.pass_number
        self.closing.clear()

    def may_answer(self, pass_number: int, step: int, rank: int, part: int = 0) -> bool:
        """Whether a rank that pushed a part of a step may read these rows of its next step, or the pass is over."""
        return self.pass_number > pass_number or self.order(part).may_answer(step, rank)

    def has_closed(self, pass_number: int) -> bool:
        """Whether a pass is closed."""
        return self.pass_number > pass_number or (self.pass_number == pass_number and not self.is_open)

    def restore(self, version: int) -> CallVerdict:
        """Rank 0 asks to begin at `version`. After ACT: restore it, then call `has_restored`."""
        if self.restored == version == self.pass_number and not self.is_open:
            return CallVerdict.REPEAT
        if self.restored is not None or self.is_open or self.pass_number:
            raise InvalidShardCall(f"version {version} cannot be restored: {self._place()}")
        return CallVerdict.ACT

    def has_restored(self, version: int) -> None:
        """Rows are those of `version`."""
        self.restored = self.version = self.pass_number = version

    def advance(self, version: int) -> CallVerdict:
        """Rank 0 asks to go on to the later `version`, before the first pass. After ACT: do it, then `has_restored`."""
        if self.restored is None or self.restored != self.pass_number or self.is_open or self.operated is not None:
            raise InvalidShardCall(f"version {version} cannot follow a restore now: {self._place()}")
        if version < self.restored:
            raise InvalidShardCall(f"version {version} is older than version {self.restored}, which is restored")
        return CallVerdict.REPEAT if version == self.restored else CallVerdict.ACT

    def operate(self, version: int) -> CallVerdict:
        """Rank 0 asks for operations at the close of `version`. After ACT: apply them, then call `has_operated`."""
        if self.operated == version:
            return CallVerdict.REPEAT
        if version != self.version or self.is_open:
            raise InvalidShardCall(f"no operation at the close of version {version}: {self._place()}")
        return CallVerdict.ACT

    def has_operated(self, version: int) -> None:
        """Operations acted at the close of `version`."""
        self.operated = version

    def snapshot(self, version: int) -> CallVerdict:
        """Rank 0 asks for a snapshot of `version`. After ACT: take it, then call `taken`.

        Other ranks may have opened the next pass by then. Rows do not change before its first step is applied.
        """
        if self.in_flight == version:
            return CallVerdict.REPEAT
        if self.in_flight is not None:
            raise InvalidShardCall(f"no snapshot of version {version}: that of {self.in_flight} is not settled")
        if version != self.version:
            raise InvalidShardCall(f"no snapshot of version {version}: version {self.version} is the last one closed")
        if self._has_applied():
            raise InvalidShardCall(f"no snapshot of version {version}: steps of pass {self.pass_number} are applied")
        return CallVerdict.ACT

    def taken(self, version: int) -> None:
        """The snapshot of `version` is taken."""
        self.in_flight = version

    def settled(self) -> None:
        """The commit of the snapshot in flight is complete, or given up."""
        self.in_flight = None

    def publish(self, version: int) -> None:
        """Rank 0 publishes `version` to subscribers. It may do so more than once."""
        if version != self.version or self._has_applied():
            raise InvalidShardCall(f"version {version} cannot be published: {self._place()}")

    def _orders(self) -> Sequence[StepOrder]:
        return [self.steps, *self.parts.values()]

    def _has_applied(self) -> bool:
        """Whether rows are not as the last close left them."""
        return self.is_open and any(order.num_applied for order in self._orders())

    def _place(self) -> str:
        return f"pass {self.pass_number} is {'open' if self.is_open else 'closed'}"

    def missing(self) -> str:
        """The ranks that a waiting call waits for, in words."""
        return f"rank {names(self._absent())}"

    def _absent(self) -> Sequence[int]:
        if not self.closing:
            return sorted({rank for order in self._orders() for rank in order.missing()})
        return [rank for rank in range(self.num_ranks) if rank not in self.closing]

    def check_open(self, pass_number: int, rank: int) -> None:
        """Raise InvalidShardCall unless this pass is open, and there is such a rank."""
        if not self.is_open or pass_number != self.pass_number:
            raise InvalidShardCall(f"a call for pass {pass_number} while {self._place()}")
        if not 0 <= rank < self.num_ranks:
            raise InvalidShardCall(f"rank {rank} of {self.num_ranks} ranks")
