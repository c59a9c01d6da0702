"""Which files of the log a replay may still need: what trainer.log asks before it removes one.

A plan is logged before the close of the pass before it, so a file may end between them: that a file is older than a
commit's close is no reason to remove it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import assert_never

from trainer.log_file import Kind, Record


class Unsettled:
    """Keeps account of plans that are not closed, operations that did not act, and when the last of a file did."""

    def __init__(self) -> None:
        self._timeline = ""
        self._plans: dict[int, Path] = {}
        self._waiting: set[Path] = set()
        self._settled_at: dict[Path, int] = {}

    def add(self, record: Record) -> None:
        """Take in what came next in the log. What was open when a timeline ended is never settled, nor needed."""
        file, number = record.place.path, record.body.get("number", 0)
        match record.kind:
            case Kind.CLAIM:
                if (timeline := record.body.get("timeline", self._timeline)) != self._timeline:
                    self._timeline = timeline
                    self._plans.clear()
                    self._waiting.clear()
            case Kind.PLAN:
                self._plans[number] = file
            case Kind.OPERATION:
                self._waiting.add(file)
            case Kind.VOID:
                self._settle([self._plans.pop(number, file)], record)
            case Kind.CLOSE:
                self._settle([self._plans.pop(number, file), *self._waiting], record)
                self._waiting.clear()
            case _:
                assert_never(record.kind)

    def needed(self, file: Path, since: int) -> bool:
        """Whether going on from a commit whose close is the record number `since` needs a record of this older file."""
        return file in self._waiting or file in self._plans.values() or self._settled_at.get(file, 0) > since

    def _settle(self, files: Iterable[Path], by: Record) -> None:
        self._settled_at |= dict.fromkeys(files, by.number)
