"""What happens to a job beside learning: the chief logs operations, which act at closes in the log's order.

A replay repeats what was logged. Who wishes for operations of his own accord is a Decider: trainer.shrinking,
trainer.exports.exporting; what he must log at another time than a close goes through `Operator.note(body)`, from any
thread. What tables do with an operation is pserver.operations' and the tables' work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.errors import MillraceError
from pserver.client import TableStats

Body = Mapping[str, Any]
"""An operation as it is logged: JSON-able, with "op" and, where somebody asked for it, "id"."""


class NotYet(MillraceError):
    """What was asked for cannot be answered yet (rows are being counted); the same question may be asked again soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """A pass at its close: tables have closed it and ticked, nothing of it is logged."""

    version: int
    """The pass's number, and the version that it makes."""
    day: int
    """The job's day from here on, until an operation moves it."""
    ticks: int
    """Days that event time advanced at this close."""
    event_time_s: float | None
    """Highest event time of all passes up to here, unix seconds; None without event time."""
    pass_times_s: tuple[float, float] | None
    """Lowest and highest event time of this pass; None where it has none."""
    wall_s: float
    """Now, unix seconds: alike in no replay."""
    stats: Mapping[str, TableStats]
    """By table, taken at this close."""
    positions: Mapping[str, int]
    """Where each partition stands after this pass."""
    metrics: Mapping[str, Any]
    """The report of trainer.metrics.meter: "window", "life", "pass"."""
    num_samples: int
    """Of this pass, over all ranks; 0 for a pass of no events."""
    ended: bool
    """Whether the stream is at its end: only passes of no events can follow."""


class Decider(Protocol):
    """Who logs operations of his own accord, and follows those of others. The chief's; its state is in commits.

    At a close, in this order: `saw`; not at a replayed one, `due`; the close is logged; tables act; `acted` for each
    operation of the close in log order, whoever asked for it. All on one thread at a time, while no pass is open.
    """

    def asked(self, body: Body) -> dict[str, Any] | None:
        """What to log for a person's wish, which acts at the next close; None where it is not for this decider.

        From any thread, at any time. Raises SpecError where it cannot be, NotYet where it must be asked again.
        """
        ...

    def saw(self, close: Closing) -> None:
        """A pass closes, perhaps again in a replay."""
        ...

    def due(self, close: Closing, ordered: Sequence[Body]) -> list[dict[str, Any]]:
        """What to log now, to act at this close. `ordered`: what is logged and acts here anyhow, in order.

        After a crash before the close was logged, what was given then is among these. Never called in a replay.
        """
        ...

    def acted(self, version: int, body: Body, replaying: bool) -> None:
        """An operation of the close of `version` has acted on tables and trainers."""
        ...

    def wants_pass(self, ended: bool) -> bool:
        """Whether a job to which nothing comes should make a pass of no events, so that `due` is asked.

        `ended`: the stream has ended, and it ends with it unless this is true; asked again after each such pass.
        Else from the planner's thread, now and then.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a commit holds, as JSON-able data; between passes."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a commit: before any replay."""
        ...

    def status(self) -> dict[str, Any]:
        """For people, as JSON-able data; from any thread."""
        ...
