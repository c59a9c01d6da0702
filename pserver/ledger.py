"""Decides what a call means where a shard stands: passes, steps, which ranks are in, and the one commit in flight.

Pure: no lock, no wait, no rows. A pass opens when the first rank asks, its step t is applied when every rank's push
for t is in, it closes when every rank asked; between passes a snapshot may be taken, which is in flight until it is
settled. Repeats are harmless, everything else out of turn is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pserver.errors import BadRequest


class Verdict(Enum):
    """What to do with a call."""

    ACT = auto()
    """It is the last that was missing: apply the step, or open or close the pass, then call `acted`."""
    WAIT = auto()
    """It counts; others are missing."""
    REPEAT = auto()
    """It was acted upon before: answer, change nothing."""


@dataclass(slots=True)
class Ledger:
    """Where a shard stands."""

    num_ranks: int
    pass_number: int = 0
    """The open pass, or the last one closed."""
    is_open: bool = False
    next_step: int = 0
    """Step of the open pass whose pushes are awaited."""
    arrived: set[int] = field(default_factory=set)
    """Ranks whose push of `next_step` is in."""
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

    def open_pass(self, pass_number: int) -> Verdict:
        """A rank asks to open a pass."""
        if self.is_open and pass_number == self.pass_number:
            return Verdict.REPEAT
        if self.is_open:
            raise BadRequest(f"pass {pass_number} cannot open: pass {self.pass_number} is not closed")
        if pass_number <= self.pass_number:
            raise BadRequest(f"pass {pass_number} cannot open: pass {self.pass_number} was closed before")
        self.pass_number, self.is_open, self.next_step = pass_number, True, 0
        return Verdict.ACT

    def push(self, pass_number: int, step: int, rank: int) -> Verdict:
        """A rank pushes a step. After ACT: apply it, then call `applied`."""
        self._check(pass_number, rank)
        if step == self.next_step - 1:
            return Verdict.REPEAT
        if step != self.next_step:
            raise BadRequest(f"push of step {step} of pass {pass_number} while step {self.next_step} is awaited")
        if self.closing:
            raise BadRequest(
                f"push of step {step} of pass {pass_number} after ranks {self._names(self.closing)} closed it"
            )
        self.arrived.add(rank)
        return Verdict.ACT if len(self.arrived) == self.num_ranks else Verdict.WAIT

    def applied(self) -> None:
        """The awaited step is applied."""
        self.next_step += 1
        self.arrived.clear()

    def close_pass(self, pass_number: int, rank: int, day: int) -> Verdict:
        """A rank asks to close a pass. After ACT: close it, then call `closed`."""
        if not self.is_open and pass_number == self.pass_number:
            return Verdict.REPEAT
        self._check(pass_number, rank)
        if self.arrived:
            raise BadRequest(f"pass {pass_number} cannot close: step {self.next_step} lacks {self.missing()}")
        self.closing[rank] = day
        if len(set(self.closing.values())) > 1:
            raise BadRequest(f"ranks disagree on the day of pass {pass_number}: {self.closing}")
        return Verdict.ACT if len(self.closing) == self.num_ranks else Verdict.WAIT

    def closed(self) -> None:
        """The open pass is closed."""
        self.is_open, self.version = False, self.pass_number
        self.closing.clear()

    def has_applied(self, pass_number: int, step: int) -> bool:
        """Whether a step is applied, or its pass long over."""
        return self.pass_number > pass_number or (self.pass_number == pass_number and self.next_step > step)

    def has_closed(self, pass_number: int) -> bool:
        """Whether a pass is closed."""
        return self.pass_number > pass_number or (self.pass_number == pass_number and not self.is_open)

    def restore(self, version: int) -> Verdict:
        """The chief asks to begin at `version`. After ACT: restore it, then call `has_restored`."""
        if self.restored == version == self.pass_number and not self.is_open:
            return Verdict.REPEAT
        if self.restored is not None or self.is_open or self.pass_number:
            raise BadRequest(f"version {version} cannot be restored: {self._place()}")
        return Verdict.ACT

    def has_restored(self, version: int) -> None:
        """Rows are those of `version`."""
        self.restored = self.version = self.pass_number = version

    def operate(self, version: int) -> Verdict:
        """The chief has operations act at the close of `version`. After ACT: let them, then call `has_operated`."""
        if self.operated == version:
            return Verdict.REPEAT
        if version != self.version or self.is_open:
            raise BadRequest(f"no operation at the close of version {version}: {self._place()}")
        return Verdict.ACT

    def has_operated(self, version: int) -> None:
        """Operations acted at the close of `version`."""
        self.operated = version

    def snapshot(self, version: int) -> Verdict:
        """The chief asks for a snapshot of `version`. After ACT: take it, then call `taken`.

        Other ranks may have opened the next pass by then: rows are as they were until its first step is applied, for
        which the chief's own push is needed.
        """
        if self.in_flight == version:
            return Verdict.REPEAT
        if self.in_flight is not None:
            raise BadRequest(f"no snapshot of version {version}: that of {self.in_flight} is not settled")
        if version != self.version:
            raise BadRequest(f"no snapshot of version {version}: version {self.version} is the last one closed")
        if self.is_open and self.next_step:
            raise BadRequest(f"no snapshot of version {version}: steps of pass {self.pass_number} are applied")
        return Verdict.ACT

    def taken(self, version: int) -> None:
        """The snapshot of `version` is taken."""
        self.in_flight = version

    def settled(self) -> None:
        """The commit of the snapshot in flight is made, or given up."""
        self.in_flight = None

    def publish(self, version: int) -> None:
        """The chief has subscribers told of `version`; as often as it likes."""
        if version != self.version or (self.is_open and self.next_step):
            raise BadRequest(f"version {version} cannot be told of: {self._place()}")

    def _place(self) -> str:
        return f"pass {self.pass_number} is {'open' if self.is_open else 'closed'}"

    def missing(self) -> str:
        """The ranks that a waiting call waits for, in words."""
        seen = self.closing or self.arrived
        return f"rank {self._names([rank for rank in range(self.num_ranks) if rank not in seen])}"

    def _names(self, ranks: Sequence[int] | dict[int, int]) -> str:
        return ", ".join(str(rank) for rank in sorted(ranks))

    def _check(self, pass_number: int, rank: int) -> None:
        if not self.is_open or pass_number != self.pass_number:
            raise BadRequest(f"a call for pass {pass_number} while {self._place()}")
        if not 0 <= rank < self.num_ranks:
            raise BadRequest(f"rank {rank} of {self.num_ranks} ranks")
