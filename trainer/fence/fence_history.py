"""The meaning of the fence's records together, and the decision after a number is lost. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from headrace.trainer.fence.fence_records import (
    FenceClaim,
    FenceCommit,
    FenceContent,
    FenceLine,
    FenceRecord,
    FenceRetirement,
    LogMode,
)


class Verdict(StrEnum):
    """The outcome of a put, by the record that has the number."""

    WON = "won"
    """It is ours."""
    BEHIND = "behind"
    """A record of an older generation came before our claim: take it in, and decide again."""
    SUPERSEDED = "superseded"
    """Another head has the job."""


def judge(ours: FenceRecord, found: FenceRecord) -> Verdict:
    """Decide by the record that is found under the number where we put `ours`."""
    if found.nonce == ours.nonce:
        return Verdict.WON
    if isinstance(ours.content, FenceClaim) and found.generation < ours.generation:
        return Verdict.BEHIND
    return Verdict.SUPERSEDED


@dataclass(slots=True)
class FencedFile:
    """A file of the log, as far as the fence has it."""

    first: int
    """Number of the first record with a line of it."""
    lines: list[str]

    def content(self) -> bytes:
        """The file's bytes."""
        return "".join(self.lines).encode()


@dataclass(slots=True)
class FenceHistory:
    """The state after a number of records."""

    number: int = 0
    """Number of the last record."""
    generation: int = 0
    """The newest generation that has claimed the job; 0: none."""
    log_id: str = ""
    timeline: str = ""
    highest: int = 0
    """Highest number of a timeline."""
    mode: LogMode = LogMode.ASYNC
    commits: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each commit's manifest, by name. Only these count."""
    retired: dict[str, float] = field(default_factory=dict)
    """When commits were retired whose parts may still be in the store."""
    files: dict[str, FencedFile] = field(default_factory=dict)
    """Files of the log, by name."""

    def take(self, number: int, record: FenceRecord) -> None:
        """Take in the next record."""
        assert number == self.number + 1, f"record {number} after {self.number}"
        self.number = number
        content = record.content
        match content:
            case FenceClaim():
                self.generation, self.mode = record.generation, content.mode
                self._at(content.log_id, content.timeline)
                self.take_lines(number, content)
            case FenceLine():
                self.take_lines(number, content)
            case FenceCommit():
                self.generation, self.mode = content.claimed, content.mode
                self._at(content.log_id, content.timeline)
                self.highest = max(self.highest, content.highest)
                self.commits, self.retired = dict(content.live), dict(content.retired)
            case FenceRetirement():
                self.retired |= content.retired
                self.commits = {name: each for name, each in self.commits.items() if name not in content.retired}
            case _:
                assert_never(content)

    def take_lines(self, number: int, content: FenceContent) -> None:
        """Take in the lines of the log alone, of a record before the last commit."""
        match content:
            case FenceClaim(log=log):
                for name, text in log.items():
                    self._add_line(number, name, text)
            case FenceLine(file=name, line=line):
                self._add_line(number, name, line)
            case FenceCommit() | FenceRetirement():
                pass
            case _:
                assert_never(content)

    def commit_of(self, name: str, manifest: str, kept_files: Collection[str]) -> FenceCommit:
        """The record of a new commit. `kept_files`: the files of the log that are still needed."""
        return FenceCommit(
            name=name,
            since=min((file.first for each, file in self.files.items() if each in kept_files), default=0),
            live={**self.commits, name: manifest},
            retired=dict(self.retired),
            claimed=self.generation,
            log_id=self.log_id,
            timeline=self.timeline,
            highest=self.highest,
            mode=self.mode,
        )

    def forget_files(self, kept_files: Collection[str]) -> None:
        """Drop the lines of files that were pruned."""
        self.files = {name: file for name, file in self.files.items() if name in kept_files}

    def _at(self, log_id: str, timeline: str) -> None:
        self.log_id, self.timeline = log_id, timeline
        self.highest = max(self.highest, timeline_number(timeline))

    def _add_line(self, number: int, name: str, text: str) -> None:
        self.files.setdefault(name, FencedFile(number, [])).lines.append(text)


def timeline_number(timeline: str) -> int:
    """The number in the name of a timeline, "t3"."""
    digits = timeline.removeprefix("t")
    return int(digits) if digits.isdigit() else 0


def start_of(records: Sequence[tuple[int, FenceRecord]]) -> tuple[FenceHistory, int]:
    """An empty history placed before the newest commit among `records`, and the first number whose lines it needs.

    `records` are the newest ones, in order, from a commit or the very first record on.
    """
    number, first = records[0]
    since = first.content.since if isinstance(first.content, FenceCommit) else 0
    return FenceHistory(number=number - 1), since or number
