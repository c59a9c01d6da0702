"""The Role of a trainer that stood by: that of `Standby` first, and from the claim on that of the trainer."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import NotYet
from headrace.trainer.job_status import Status
from headrace.trainer.rank0.resize_messages import STANDBY, encode_message
from headrace.trainer.rank0.resizing import Standby
from headrace.trainer.train.assembly import Trainer


class StandbyRole:
    """Any thread."""

    def __init__(self, standby: Standby, generation: int) -> None:
        self._standby, self._generation = standby, generation
        self._trainer: Trainer | None = None
        self._draining = False

    def begin(self, trainer: Trainer) -> None:
        """The trainer is restored."""
        self._trainer = trainer
        if self._draining:
            trainer.loop.drain()

    def end(self) -> None:
        """The trainer ends: nothing is answered any more."""
        self._trainer = None

    def status(self) -> Status:
        if self._trainer is not None:
            return self._trainer.parts.progress.status()
        return Status(state=STANDBY, generation=self._generation)

    def exchange(self, message: bytes) -> bytes:
        """Tell the launcher how far the shards are; from the claim on, as RankZero.exchange."""
        if self._trainer is None or self._trainer.rank0 is None:
            return encode_message(self._standby.moved)
        return self._trainer.rank0.exchange(message)

    def drain(self) -> None:
        """End after the present pass; without one, at once, but not before what was handed over is committed."""
        self._draining = True
        self._standby.end()
        if self._trainer is not None:
            self._trainer.loop.drain()

    def commit(self) -> None:
        """Ask for a commit."""
        if self._trainer is not None and self._trainer.committer is not None:
            self._trainer.committer.ask()

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a request. Raises NotYet before the trainer is restored, and as RankZero.answer."""
        if self._trainer is None or self._trainer.answer is None:
            raise NotYet("the new workers stand by; the job is not theirs yet")
        return self._trainer.answer(request)
