"""The stream that a file belongs to, and the time in its path: pure functions of patterns and paths.

The fields of a pattern, from left to right, are its time, except the field that partitions files. Patterns with the
same fields are one listing; otherwise the files of a pattern come after those of the pattern before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.dataset.spec.path_pattern import Pattern

ONE_STREAM = "files"
"""The stream of all files if there are no parallel partitions."""


@dataclass(frozen=True)
class FileOrder:
    """The streams of a source of files."""

    patterns: Sequence[Pattern]
    partition_by: str | None
    """Name of a field that is in every pattern."""

    def stream(self, number: int, path: str) -> str:
        """The stream of a path that matches pattern `number`."""
        if self.partition_by is None:
            return ONE_STREAM
        return f"{self.partition_by}={self._values(number, path)[self.partition_by]}"

    def period(self, number: int, path: str) -> tuple[str, ...]:
        """The first sort key of files in a stream; their name is the second."""
        values = self._values(number, path)
        times = tuple(values[field] for field in self.patterns[number].fields if field != self.partition_by)
        return times if self._one_listing else (str(number), *times)

    @property
    def _one_listing(self) -> bool:
        fields = {pattern.fields for pattern in self.patterns}
        return len(self.patterns) == 1 or (len(fields) == 1 and fields != {()})

    def _values(self, number: int, path: str) -> dict[str, str]:
        pattern = self.patterns[number]
        return (pattern.values(path) or {}) if pattern.fields else {}
