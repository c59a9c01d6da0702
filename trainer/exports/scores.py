"""Scores of the evaluator: for each version that it evaluated a line in the store, which is appended once.

Only the evaluator's process writes (service.predict.evaluator); gates of exports, the launcher and people read. Imports
no torch.
"""

import json
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.codec import NotUnderstood, plain, typed
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.trainer.checkpoint.commits import order_of

EVALUATOR, FILE = "evaluator", "scores.jsonl"
"""The name of the evaluator's section, of its process, and of its folder in a store; and the scores in that."""
KEPT = 1000
"""Lines that stay when there are twice as many; those of commits that exist stay, too."""
POLL_S = 0.25
"""Interval at which a wait reads the file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One version, evaluated."""

    version: int
    """Its version."""
    commit: str
    """The name of its commit, which tells it from the same version of another timeline."""
    at: str
    """When it was scored, in UTC."""
    events: int = 0
    """Events of the input."""
    samples: int = 0
    """Samples that they gave."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """As `headrace evaluate` prints them."""
    error: str = ""
    """Why it cannot be scored, in words; "" where it was."""

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """Its measures by task."""
        found: Mapping[str, Mapping[str, Any]] = self.metrics.get("tasks", {})
        return found


class Scores:
    """The scores in one store. One thread; one process at a time adds."""

    def __init__(self, store: Path) -> None:
        self.folder = store / EVALUATOR
        self._path = self.folder / FILE
        self._read: tuple[tuple[int, int, int] | None, dict[str, Score]] = (None, {})

    def by_commit(self) -> Mapping[str, Score]:
        """All scores by the name of the commit, in the order of their lines."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return {}
        state = found.st_ino, found.st_mtime_ns, found.st_size
        if self._read[0] != state:
            self._read = state, self._parsed()
        return self._read[1]

    def newest(self) -> Score | None:
        """The score of the newest version, on the newest timeline."""
        return max(self.by_commit().values(), key=lambda score: order_of(score.commit), default=None)

    def wait_for(self, commit: str, deadline: Deadline) -> Score | None:
        """The score of a commit, once it is there; None where the deadline passes before."""
        while (found := self.by_commit().get(commit)) is None and not deadline.passed():
            time.sleep(POLL_S)
        return found

    def add(self, score: Score, commits: Collection[str]) -> None:
        """Append a score, durably and whole or not at all. `commits`: those in the store. Raises Unwritable.

        1. Drop the beginning of a line that a killed process wrote. 2. Write the line. 3. Drop old lines.
        """
        assert score.commit not in self.by_commit(), "a version is scored once"
        with writing(self._path):
            self.folder.mkdir(exist_ok=True)
            with self._path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # 1
                file.write(_line(score))  # 2
                file.flush()
                os.fsync(file.fileno())
            REAL.sync_folder(self.folder)
            found = self.by_commit()
            if len(found) >= 2 * KEPT:  # 3
                newest = {*sorted(found, key=order_of)[-KEPT:], *commits}
                kept = [_line(each) for name, each in found.items() if name in newest]
                write_whole(REAL, self._path, b"".join(kept))

    def _parsed(self) -> dict[str, Score]:
        """A line without its end is not there yet; one that is damaged is left out."""
        found = dict[str, Score]()
        *lines, _ = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                score = typed(Score, documents.parse_object(line, f"{self._path}, line {number}"), f"line {number}")
                order_of(score.commit)
            except (documents.InvalidDocument, NotUnderstood, ValueError) as error:
                log.warning("%s: a score is left out: %s", self._path, error)
                continue
            found.setdefault(score.commit, score)
        return found


def _line(score: Score) -> bytes:
    return json.dumps(plain(score), separators=(",", ":"), allow_nan=False).encode() + b"\n"
