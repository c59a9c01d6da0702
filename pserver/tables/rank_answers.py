"""Answers that one shard gives to every rank in a pass, once all ranks have sent what it needs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

Sent = TypeVar("Sent")
Answer = TypeVar("Answer")


class RankAnswers(ABC, Generic[Sent, Answer]):
    """The answers of the open pass. One call at a time."""

    def __init__(self) -> None:
        self._sent: dict[int, Sent] = {}
        self._answers: dict[int, Answer] = {}

    def open_pass(self) -> None:
        """Begin a pass: no rank has asked."""
        self._sent, self._answers = {}, {}

    def ask(self, rank: int, sent: Sent, num_ranks: int) -> bool:
        """Add what a rank sends; True once all ranks have sent theirs, and answers are there.

        A repeat changes nothing. Raises InvalidShardCall for what this shard cannot answer.
        """
        self._check(sent)
        self._sent.setdefault(rank, sent)
        if len(self._sent) == num_ranks and not self._answers:
            self._answers = self._answers_to(self._sent)
        return bool(self._answers)

    def answers(self, rank: int) -> Answer | None:
        """The answer to a rank; None before all ranks have sent theirs."""
        return self._answers.get(rank)

    def missing(self, num_ranks: int) -> list[int]:
        """The ranks that have not asked."""
        return [rank for rank in range(num_ranks) if rank not in self._sent]

    @abstractmethod
    def _check(self, sent: Sent) -> None: ...

    @abstractmethod
    def _answers_to(self, sent: Mapping[int, Sent]) -> dict[int, Answer]: ...
