"""Lines of files as a stream: one partition a file, position = line number.

A partition is named by its path relative to the spec's folder, its identity is "device:inode". Partitions are numbered
as they are first seen: pattern by pattern, sorted within one; a file found later comes last. Numbers may so differ
after a restart, names do not. In which order they are read, and which are parallel, is file_order's to say. Finding
lines in a file, and that it was replaced or truncated as far as that can be told, is line_file's work, readiness of
folders is paths'.

Without `follow` the source is bounded: the files of the first look, each up to the end it then had, until it is asked
to look again. With `follow`, every `poll` seconds brings new lines and new files; a last line counts once its line feed
is there, and a file that was deleted is final. Which files were met before a restart is told to us, so that a folder
opened then is not opened again for files that came too late, and a bounded source stays what it was.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from dataset.config import FilesSource
from dataset.errors import SourceGap
from dataset.file_order import FileOrder
from dataset.line_file import LineFile
from dataset.paths import Pattern, listed_markers, open_folders
from dataset.source import Events, Partition, Segment
from millrace.deadline import Deadline
from millrace.errors import SpecError

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 64
"""Files kept open; one used longest ago is closed, and opened again when it is needed."""


class Files:
    """See module docstring."""

    def __init__(self, config: FilesSource, folder: Path, known: Collection[str] | None = ()) -> None:
        """Look for files under `folder`; `known` were met before. None: only segments are read, nothing is looked for.

        Raises SpecError where a bounded source has no file.
        """
        self.bounded = not config.follow
        self.num_late_files = 0
        """Files that appeared in a folder after it was opened; they are not read."""
        self._config, self._folder = config, folder
        self._patterns = [Pattern(text) for text in config.paths]
        self._order = FileOrder(self._patterns, config.partition_by and config.partition_by.strip("{}"))
        self._pattern_of: dict[str, int] = {}
        self._files: dict[str, LineFile] = {}
        self._gone: set[str] = set()
        self._known = set(known or ())
        self._opened = {p.folder(name) for p in self._patterns for name in self._known if p.key(name) is not None}
        self._waiting: set[str] = set()
        self._open: OrderedDict[str, LineFile] = OrderedDict()
        self._partitions: list[Partition] = []
        self._looked_at_s = -float("inf")
        for name in known or ():
            self._add(name)
        if known is not None and not (self.bounded and known):
            self._find()

    def resume(self, positions: Mapping[str, int]) -> None:
        """See Source: what has arrived is there."""

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """See Source. The first call counts the lines of every file, however long that takes."""
        due = time.monotonic() - self._looked_at_s >= self._config.poll
        if due if self._config.follow else not self._partitions:
            if self._config.follow:
                self._find()
            self._partitions = [self._partition(number, name) for number, name in enumerate(self._files)]
            self._looked_at_s = time.monotonic()
        return self._partitions

    def look_again(self, deadline: Deadline) -> None:
        """See Source. A file that is no longer what it was is told as what it is now."""
        for name in [name for name in self._files if not self._is_as_it_was(name)]:
            self._files.pop(name).close()
            self._open.pop(name, None)
            self._add(name)
        self._find(again=True)
        self._partitions = []

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> None:
        """See Source: lines have no time stamps of their own."""

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """See Source."""
        name = segment.partition
        if not self._add(name):
            raise SourceGap(f"{name}: no such file in {self._folder}; the file is gone, or was none of ours")
        self._touch(name)
        yield from self._files[name].read(segment.begin, segment.end, segment.identity)

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """See Source: nobody watches files."""

    def close(self) -> None:
        """See Source."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _find(self, *, again: bool = False) -> None:
        for number, pattern in enumerate(self._patterns):
            paths: Sequence[str] = pattern.matches(self._folder)
            if self._config.ready is not None:
                paths = self._ready(pattern, paths)
            if self.bounded and not paths:
                if not again:
                    raise SpecError(self._nothing(pattern), f"sources.*.paths.{number}")
                log.warning("%s any more", self._nothing(pattern))
            for path in paths:
                self._pattern_of.setdefault(path, number)
                self._add(path)

    def _is_as_it_was(self, name: str) -> bool:
        self._touch(name)
        try:
            self._files[name].count()
        except SourceGap:
            return False
        return True

    def _add(self, name: str) -> bool:
        """Whether there is, or was while we looked, a file of that name; from now on it is a partition."""
        if name not in self._files and (self._folder / name).is_file():
            growing, max_bytes = self._config.follow, self._config.max_event_bytes
            self._files[name] = LineFile(self._folder / name, growing=growing, max_line_bytes=max_bytes)
        return name in self._files

    def _nothing(self, pattern: Pattern) -> str:
        if self._config.ready is None:
            return f"no file matches {pattern.text!r} in {self._folder}"
        return f"no folder of {pattern.text!r} in {self._folder} has its marker {self._config.ready!r}"

    def _ready(self, pattern: Pattern, paths: Sequence[str]) -> Sequence[str]:
        """Those of `paths` that may be opened now; counts and reports late files."""
        ready = self._config.ready or ""
        paths = [path for path in paths if Path(path).name != ready]
        folders = {pattern.folder(path) for path in paths} - self._opened
        marked = set(listed_markers(self._folder, folders, ready))
        opening = open_folders(pattern, paths, marked, self._opened, self._known, in_turn=self._config.follow)
        self._opened.update(pattern.folder(path) for path in opening.files)
        self._known.update(opening.files, opening.late)
        self.num_late_files += len(opening.late)
        for path in opening.late:
            log.warning("late file %s: its folder was already opened, so it is not read", path)
        for folder in opening.waiting:
            if folder not in self._waiting:
                effect = "it and those after it wait" if self._config.follow else "it is left out"
                log.warning("folder %s has no %s: %s", folder, ready, effect)
        self._waiting.update(opening.waiting)
        return opening.files

    def _partition(self, number: int, name: str) -> Partition:
        file = self._files[name]
        gone = self._config.follow and not file.path.exists()
        if gone and name not in self._gone:
            self._gone.add(name)
            log.warning("%s is gone; %d lines of it were seen", name, file.num_lines())
        elif not gone:
            self._gone.discard(name)
            self._touch(name)
            file.count()
        pattern = self._pattern_of.get(name)  # of those met before a restart the log says the rest
        order = () if pattern is None else (self._order.stream(pattern, name), self._order.period(pattern, name))
        return Partition(name, number, 0, 0, file.num_lines(), self.bounded or gone, file.identity, *order)

    def _touch(self, name: str) -> None:
        self._open[name] = self._files[name]
        self._open.move_to_end(name)
        if len(self._open) > MAX_OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
