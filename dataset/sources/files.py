"""Lines or rows of files as a stream: one partition per file, position = number of the line or row.

A partition is named by its path relative to the spec's folder, or to `root`; its identity is what its file begins with,
so copies on several machines are one partition. Partitions are numbered in the order they are found: pattern by
pattern, sorted within one; a file found later comes last. So numbers may differ after a restart; names do not.
dataset.sources.file_order decides in which order files are read and which are parallel, dataset.sources.line_file finds
lines and notices most replaced or truncated files, dataset.spec.path_pattern decides which folders are ready.

Without `follow` the source is bounded: the files of the first look, each up to its end then, until `look_again`. With
`follow`, every `poll` seconds brings new lines and new files; a last line counts once it has its line feed, and a
deleted file is final. The caller names the files known before a restart, so that late files in a folder opened then are
not read, and a bounded source stays the same.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, assert_never

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from headrace.blob.store_address import BUCKET_FORMS, other_scheme, parse_bucket
from headrace.config import Duration
from headrace.dataset.sources.event_file import EventFile
from headrace.dataset.sources.file_order import FileOrder
from headrace.dataset.sources.line_file import LineFile
from headrace.dataset.sources.source_file import FileTree, LocalTree, SourceFile
from headrace.dataset.spec.config import RECORD_CLOCK, Opening, RecordedSource
from headrace.dataset.spec.file_formats import format_of_name
from headrace.dataset.spec.path_pattern import PathPattern, Pattern, open_folders
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Events, Partition, Segment
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.text_kinds import TextKind

if TYPE_CHECKING:
    from headrace.dataset.sources.time_index import TimeIndex

log = logging.getLogger(__name__)

OPEN_S = 60.0
"""Longest time for the first answer of an object store, unless the caller has a deadline."""
MAX_OPEN_FILES = 64
"""Most files kept open; the least recently used one is closed, and opened again when needed."""
MAX_INDEXES = 64
"""Most files whose event times are kept; those of the least recently used one are read again when needed."""


class FileFormat(StrEnum):
    """Content of the files of a source."""

    LINES = "lines"
    PARQUET = "parquet"


class FilesSource(RecordedSource):
    """Lines of files, plain or gzip, or rows of Parquet files. All files are one stream, read one after another,
    ordered by the pattern's fields, then by name."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "paths": TextKind.PATTERNS,
        "root": TextKind.PLACE,
        "columns": TextKind.NAME,
        "partition_by": TextKind.NAME,
        "ready": TextKind.NAME,
    }

    kind: Literal["files"]
    """Files."""
    paths: Annotated[tuple[PathPattern, ...], Field(min_length=1, max_length=10_000)]
    """Globs or templates such as "logs/{day}/{hour}/*.jsonl", relative to `root`. Wildcards skip names that begin with
    "." or "_", such as "_temporary": write these out. "_day=7" is a folder like others."""
    root: str | None = Field(default=None, max_length=4096)
    """Where `paths` begin, if the files are in an object store: its address, with options and credentials as for
    `store.mirror`. Unset: the spec's folder."""
    format: FileFormat = FileFormat.LINES
    """"lines": each line is an event; "parquet": each row is one, as JSON text."""
    columns: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    """Parquet: the columns that events have; others are not read. Unset: all."""
    timestamps: Literal["s", "ms", "us", "iso"] = "ms"
    """Parquet: what a timestamp becomes: a whole number of seconds, milliseconds or microseconds since 1970, rounded
    down, or ISO text."""
    partition_by: str | None = Field(default=None, max_length=256)
    """Field of the paths that separates parallel partitions, for example "{shard}": the files with one value are one
    stream in order, and the streams advance together. Unset: all files are one stream."""
    follow: bool = False
    """Wait for more lines and new files."""
    ready: str | None = None
    """Marker file, for example "_SUCCESS": a folder's files are read, in order, once the marker exists."""
    poll: Duration = 1.0
    """Pause between two looks at followed files."""
    blank_lines: Literal["skip", "read"] = "skip"
    """Lines without a byte: "skip" leaves them out and counts them; "read" makes each an event."""

    no_record_times: ClassVar[str] = "lines of files have no time of their own"
    faster: ClassVar[str] = "plain files are faster to read than gzip"

    @field_validator("root")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and ("://" not in value or value.startswith("file:")):
            raise ValueError(f"is not the address of an object store, one of {BUCKET_FORMS}; write folders in paths")
        if value is not None:
            parse_bucket(value)
        return value

    @field_validator("paths")
    @classmethod
    def _are_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for number, path in enumerate(paths):
            if "://" in path:
                local = path.startswith("file:")
                advice = other_scheme(path) or ("write the path alone" if local else "write its beginning as root")
                raise ValueError(f'{number}, "{path}", is an address, not a path: {advice}')
        return paths

    @model_validator(mode="after")
    def _fits_format(self) -> "FilesSource":
        if self.format is FileFormat.LINES and (self.columns or self.timestamps != "ms"):
            key = "columns" if self.columns else "timestamps"
            raise ValueError(f'{key} has no effect on lines; set format = "parquet", or leave it out')
        if self.root is not None and (bad := next((path for path in self.paths if path.startswith("/")), None)):
            raise ValueError(f'paths are relative to root; "{bad}" begins with a slash')
        return self

    @model_validator(mode="after")
    def _holds_lines(self) -> "FilesSource":
        for number, path in enumerate(self.paths if self.format is FileFormat.LINES else ()):
            if (other := format_of_name(path)) is not None:
                raise ValueError(f'paths.{number}, "{path}", has no lines: it is {other}')
        return self

    @model_validator(mode="after")
    def _has_field(self) -> "FilesSource":
        if self.partition_by is None:
            return self
        if [f"{{{field}}}" for field in Pattern(self.partition_by).fields] != [self.partition_by]:
            raise ValueError(
                f'partition_by = "{self.partition_by}" is not a field; write it as in paths, like "{{shard}}"'
            )
        for number, path in enumerate(self.paths):
            if self.partition_by.strip("{}") not in Pattern(path).fields:
                raise ValueError(f'partition_by = "{self.partition_by}" is not in paths.{number}, "{path}"')
        return self

    @property
    @override
    def ends(self) -> bool:
        return not self.follow

    @property
    @override
    def skips_blank(self) -> bool:
        return self.blank_lines == "skip"

    @property
    @override
    def first_has_all_fields(self) -> bool:
        return self.format is FileFormat.PARQUET

    @override
    def stream(self, partition: str) -> str:
        if self.partition_by is None:
            return ""
        found = (pattern.values(partition) for pattern in map(Pattern, self.paths) if pattern.fields)
        return next((values[self._parting] for values in found if values), partition)

    @property
    def _parting(self) -> str:
        return (self.partition_by or "").strip("{}")

    @override
    def clock(self, *, merged: bool) -> str:
        fields = {Pattern(path).fields for path in self.paths}
        period = "/".join(field for field in next(iter(fields)) if field != self._parting) if len(fields) == 1 else ""
        if self.event_time.field is None:
            return period
        return RECORD_CLOCK if merged else period or RECORD_CLOCK

    @override
    def open(self, opening: Opening) -> "FileStream":
        return FileStream(self, opening.folder, opening.known, opening.deadline)

    @override
    def check_data(self, opening: Opening) -> None:
        if self.ends:
            self.open(opening).close()

    @override
    def local_files(self, folder: Path) -> Iterable[str]:
        return () if self.root is not None else (path for each in self.paths for path in Pattern(each).matches(folder))

    @override
    def not_in_pods(self) -> Iterable[tuple[str, str]]:
        if self.root is None:
            yield "paths", "are not in a pod: set root, to an object store, or put the files on a volume of --pods"


class FileStream:
    """A source of the lines of files."""

    def __init__(
        self,
        config: FilesSource,
        folder: Path,
        known: Collection[str] | None = (),
        deadline: Deadline | None = None,
    ) -> None:
        """Find files under `folder`. `known`: files found before a restart; None: find none, only read segments.

        Raises SpecError if a bounded source has no file.
        """
        self.bounded = not config.follow
        self.num_late_files = 0
        """Number of files that appeared in a folder after it was opened; they are not read."""
        self.missing: Sequence[str] = ()
        """See Source. Replaced, never changed."""
        self._config = config
        self._tree = open_tree(config.root, folder, deadline or Deadline.after(OPEN_S))
        self._patterns = [Pattern(text) for text in config.paths]
        self._order = FileOrder(self._patterns, config.partition_by and config.partition_by.strip("{}"))
        self._pattern_of: dict[str, int] = {}
        self._files: dict[str, EventFile] = {}
        self._deleted: set[str] = set()
        self._known = set(known or ())
        self._opened = {p.folder(name) for p in self._patterns for name in self._known if p.key(name) is not None}
        self._waiting: set[str] = set()
        self._open: OrderedDict[str, EventFile] = OrderedDict()
        self._indexes: OrderedDict[str, TimeIndex] = OrderedDict()
        self._partitions: list[Partition] = []
        self._looked_at_s = -float("inf")
        for name in known or ():
            self._add(name)
        if known is not None and not (self.bounded and known):
            self._find()

    def resume(self, positions: Mapping[str, int]) -> None:
        """Nothing to do, the files exist."""

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """The first call counts the lines of every file, which may take longer than the deadline."""
        self._tree.begin(deadline)
        due = time.monotonic() - self._looked_at_s >= self._config.poll
        if due if self._config.follow else not self._partitions:
            if self._config.follow:
                self._find()
            self._partitions = [self._partition(number, name) for number, name in enumerate(self._files)]
            self._looked_at_s = time.monotonic()
        return self._partitions

    def look_again(self, deadline: Deadline) -> None:
        """A file that was replaced or became shorter is treated as a new file."""
        self._tree.begin(deadline)
        self._tree.forget()
        for name in [name for name in self._files if not self._is_unchanged(name)]:
            self._files.pop(name).close()
            self._open.pop(name, None)
            self._indexes.pop(name, None)
            self._add(name)
        self._find(again=True)
        self._partitions = []

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        """By the events' own times. The first call for a file reads it, which may take longer than the
        deadline."""
        if self._config.event_time.field is None:
            return None
        self._tree.begin(deadline)
        found = ((name, self._times(name).position(time_ms)) for name, time_ms in times_ms.items())
        return {name: position for name, position in found if position is not None}

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        self._tree.begin(deadline)
        name = segment.partition
        if not self._add(name):
            raise SourceGap(f"{name}: no such file in {self._tree}; it was deleted, or never was part of the source")
        self._touch(name)
        yield from self._files[name].read(segment.begin, segment.end, segment.identity)

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Nothing to do, there are no lag tools for files."""

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _times(self, name: str) -> "TimeIndex":
        """The times of a file, up to its present end."""
        from headrace.dataset.sources.time_index import TimeIndex  # late: it reads JSON by pyarrow

        file = self._files[name]
        if (index := self._indexes.get(name)) is None:
            own = self._event_file(self._tree.file(name), self._config.event_time.field)
            index = self._indexes[name] = TimeIndex(own, self._config.event_time)
        self._indexes.move_to_end(name)
        if len(self._indexes) > MAX_INDEXES:
            self._indexes.popitem(last=False)
        index.extend(file.num_events(), file.identity)
        return index

    def _find(self, *, again: bool = False) -> None:
        missing = []
        for number, pattern in enumerate(self._patterns):
            paths: Sequence[str] = self._tree.matches(pattern)
            if self._config.ready is not None:
                paths = self._ready(pattern, paths)
            if self.bounded and not paths:
                if not again:
                    raise SpecError(self._nothing(pattern), f"sources.*.paths.{number}")
                log.warning("now %s", self._nothing(pattern))
            elif not paths and not any(map(pattern.finds, (*self._files, *self._known))):
                missing.append(self._nothing(pattern))
            for path in paths:
                self._pattern_of.setdefault(path, number)
                self._add(path)
        self.missing = missing

    def _is_unchanged(self, name: str) -> bool:
        self._touch(name)
        try:
            self._files[name].count()
        except SourceGap:
            return False
        return True

    def _add(self, name: str) -> bool:
        """Make a file a partition, if it exists and is new; return whether it is one."""
        if name not in self._files and self._tree.has(name):
            self._files[name] = self._event_file(self._tree.file(name))
        return name in self._files

    def _event_file(self, file: SourceFile, only: str | None = None) -> EventFile:
        """`only`: the one field of events that is needed, where fields can be read apart."""
        growing, config = self._config.follow, self._config
        match config.format:
            case FileFormat.LINES:
                return LineFile(file, growing=growing and file.may_grow, max_line_bytes=config.max_event_bytes)
            case FileFormat.PARQUET:
                from headrace.dataset.sources.parquet_file import ParquetRows

                growing = growing and file.may_grow
                columns, times = config.columns, config.timestamps
                most = config.max_event_bytes
                return ParquetRows(
                    file, growing=growing, columns=columns, timestamps=times, only=only, max_row_bytes=most
                )
            case _:
                assert_never(config.format)

    def _nothing(self, pattern: Pattern) -> str:
        if self._config.ready is None:
            skipped = "" if all(part.is_literal for part in pattern.parts) else " (wildcards skip names like _x and .x)"
            return f"no file matches {pattern.text!r} in {self._tree}{skipped}"
        return f"no folder of {pattern.text!r} in {self._tree} has its marker {self._config.ready!r}"

    def _ready(self, pattern: Pattern, paths: Sequence[str]) -> Sequence[str]:
        """The `paths` that may be opened now. Counts and logs late files."""
        ready = self._config.ready or ""
        paths = [path for path in paths if Path(path).name != ready]
        folders = {pattern.folder(path) for path in paths} - self._opened
        marked = set(self._tree.marked(folders, ready))
        opening = open_folders(pattern, paths, marked, self._opened, self._known, in_turn=self._config.follow)
        self._opened.update(pattern.folder(path) for path in opening.files)
        self._known.update(opening.files, opening.late)
        self.num_late_files += len(opening.late)
        for path in opening.late:
            log.warning("late file %s: its folder was opened before, so it is not read", path)
        for folder in opening.waiting:
            if folder not in self._waiting:
                effect = "it and later folders wait" if self._config.follow else "it is not read"
                log.warning("folder %s has no %s: %s", folder, ready, effect)
        self._waiting.update(opening.waiting)
        return opening.files

    def _partition(self, number: int, name: str) -> Partition:
        file = self._files[name]
        is_deleted = self._config.follow and not self._tree.has(name)
        if is_deleted and name not in self._deleted:
            self._deleted.add(name)
            log.warning("%s was deleted; %d events of it were found", name, file.num_events())
        elif not is_deleted:
            self._deleted.discard(name)
            if file.file.may_grow or not file.identity:  # else it was counted, and cannot have more by now
                self._touch(name)
                file.count()
        pattern = self._pattern_of.get(name)  # the log has the order of files known before a restart
        order = () if pattern is None else (self._order.stream(pattern, name), self._order.period(pattern, name))
        return Partition(name, number, 0, 0, file.num_events(), self.bounded or is_deleted, file.identity, *order)

    def _touch(self, name: str) -> None:
        self._open[name] = self._files[name]
        self._open.move_to_end(name)
        if len(self._open) > MAX_OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()


def open_tree(root: str | None, folder: Path, deadline: Deadline) -> FileTree:
    """Where the files of a source are. Raises SourceUnavailable without an answer in time."""
    if root is None:
        return LocalTree(folder)
    from headrace.dataset.sources.bucket_files import BucketTree

    return BucketTree(parse_bucket(root), deadline)
