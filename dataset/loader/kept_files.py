"""Segments kept in a folder as Arrow files, for later epochs and for other jobs: one for each segment, several for one
that was read in parts.

A file is found by the segment and by what the job file says about sources and pipe; of its slots a job takes those that
it has. A file that cannot be read, or lacks a slot, counts as absent. Of rejected events a file has place and reason,
never their bytes. dataset.loader.kept_segments keeps in memory.

While a file is written it has a temporary name, and a lock: without the lock it is left from a process that died.
"""

import base64
import fcntl
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from headrace import documents
from headrace.dataset.loader.kept_segments import KeptSegment
from headrace.dataset.pipe.segment_work import PipeOutput
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.samples.sample_columns import columns_of, file_of, samples_of
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import AnyPipe
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Segment
from headrace.durable import REAL, is_locked

FORMAT = 1
"""Number of the files' layout; a file with another one counts as absent."""
SUFFIX = ".arrow"
UNFINISHED = re.compile(r"[0-9a-f]{40}\.(?!arrow$).+")
"""Names of files that are being written, or were, also by earlier programs."""
FACTS = b"headrace"
"""Key, in a file's schema, of the JSON beside its columns."""
OLD_FACTS = b"millrace"
"""That key in files of before version 0.2."""
WITHOUT_EFFECT = {"processes", "on_bad_event", "max_bad_fraction", "dead_letters", "tries", "deadline", "extra"}
"""Keys of a pipe that do not change its samples."""
OF_SOURCES = ("event_time", "max_event_bytes", "since", "until", "null_values", "blank_lines")
"""Keys of sources that change what the pipe gets, or the samples' times."""
OF_MODELS = {"name", "names", "table", "pooling", "share", "group"}
"""Keys of slots that do not change their values."""

log = logging.getLogger(__name__)


class KeptFiles:
    """Kept in `folder`, which is made; see KeptSegments. Several jobs may use it at a time.

    The bound counts all files of the folder when the job starts, and those that it adds. At the bound, or when the disk
    is full, no file is added.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        pipe: AnyPipe,
        schema: Schema,
        sources: SourceSet,
        masks: Mapping[str, str],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in filter(lambda each: UNFINISHED.fullmatch(each.name), folder.iterdir()):
            with suppress(OSError):  # of another user
                if not is_locked(path):
                    path.unlink(missing_ok=True)
        self._folder, self._max_bytes, self._schema = folder, max_bytes, schema
        self._num_bytes = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
        self._slots = {slot.name: described(slot, schema) for slot in schema.slots}
        sections = {
            name: section.model_dump(mode="json", include=set(OF_SOURCES)) for name, section in sources.sections.items()
        }
        made = {"pipe": pipe.model_dump(mode="json", exclude=WITHOUT_EFFECT), "sources": sections, "masks": masks}
        self._made = json.dumps(made, sort_keys=True)
        self._full = False

    def find(self, segment: Segment, *, again: bool) -> KeptSegment | None:
        whole = self._path(segment, whole=True)
        path = whole if whole.exists() else self._path(segment, whole=False)
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                batch = reader.get_batch(0)
                batch.validate(full=True)  # kernels trust its offsets
                return self._loaded(segment, reader.schema.metadata, batch)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, ValueError, KeyError, documents.InvalidDocument) as error:
            log.warning("%s cannot be used, so its segment goes through the pipe: %s", path, error)
            return None

    def keep(self, segment: Segment, part: KeptSegment, *, again: bool) -> None:
        if self._full:
            return
        data = self._file(part)
        if self._num_bytes + len(data) > self._max_bytes:
            self._stop(f"passes.keep is reached: {self._num_bytes} bytes are kept")
            return
        path = self._path(segment, whole=part.end == segment.end)
        try:
            _write(path, data)
        except OSError as error:
            self._stop(str(error))
            return
        self._num_bytes += len(data)

    def _stop(self, why: str) -> None:
        log.warning("%s: %s; the segments that are not there go through the pipe each time", self._folder, why)
        self._full = True

    def _path(self, segment: Segment, *, whole: bool) -> Path:
        what = [FORMAT, self._made, segment.partition, segment.identity, segment.begin, segment.end]
        what += [] if whole else ["beginning"]  # earlier programs, which know no beginnings, must not find one
        return self._folder / (hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40] + SUFFIX)

    def _file(self, part: KeptSegment) -> bytes:
        outcome = part.outcome
        facts = {
            "format": FORMAT,
            "end": part.end,
            "slots": self._slots,
            "num_events": part.num_events,
            "left_out": dict(part.left_out),
            "num_judged": outcome.num_judged,
            "rejections": [_rejection_message(each) for each in outcome.rejections],
            "counters": [_text(outcome.counters.sums_SK.tobytes()), _text(outcome.counters.registers_SR.tobytes())],
        }
        blocks = [block for block in outcome.blocks if len(block)]
        columns = columns_of(Samples.concat(blocks)) if blocks else {}
        return file_of(columns, {FACTS: json.dumps(facts).encode()})

    def _loaded(self, segment: Segment, metadata: Mapping[bytes, bytes], batch: pa.RecordBatch) -> KeptSegment | None:
        facts = _facts(metadata)
        end = facts.get("end", segment.end)  # earlier programs kept whole segments
        if (
            facts["format"] != FORMAT
            or not segment.begin < end <= segment.end
            or _has_events(facts)
            or any(facts["slots"].get(name) != each for name, each in self._slots.items())
        ):
            return None
        blocks = [samples_of(batch, self._schema)] if batch.num_rows else []
        rejections = [_rejection_of(each) for each in facts["rejections"]]
        outcome = PipeOutput(_counters(facts, self._schema, blocks), blocks, rejections, facts["num_judged"])
        return KeptSegment(end, facts["num_events"], facts["left_out"], outcome, bare=True)


def described(slot: Slot, schema: Schema) -> str:
    """All that the values of a slot depend on, as text; for a cross with the slots that it crosses."""
    entry = slot.entry.model_dump(mode="json", exclude=OF_MODELS)
    crossed = [described(schema.by_name[name], schema) for name in slot.entry.cross if name in schema.by_name]
    return json.dumps([entry, crossed], sort_keys=True)


def _counters(facts: Mapping[str, Any], schema: Schema, blocks: Sequence[Samples]) -> SlotCounters:
    """The counters of the slots of `schema`, among those of the file; values by hash are counted again."""
    found, names = SlotCounters(schema), list(facts["slots"])
    for block in blocks:
        found.observe(block)
    rows = [names.index(slot.name) for slot in schema.slots]
    sums, registers = (base64.b64decode(each) for each in facts["counters"])
    found.sums_SK[:] = np.frombuffer(sums, np.int64).reshape(len(names), -1)[rows]
    found.registers_SR[:] = np.frombuffer(registers, np.uint8).reshape(len(names), -1)[rows]
    return found


def _rejection_message(each: Rejection) -> list[Any]:
    """A rejection without its event, which the detail may quote."""
    return [each.partition, each.offset, each.reason.value, "", None, each.line]


def _rejection_of(message: list[Any]) -> Rejection:
    partition, offset, reason, _, _, line = message
    return Rejection(partition, offset, Reason(reason), line=line)


def _has_events(facts: Mapping[str, Any]) -> bool:
    """Whether a file, of an earlier program, has details or bytes of rejected events."""
    return any(detail or data is not None for _, _, _, detail, data, _ in facts["rejections"])


def _write(path: Path, data: bytes) -> None:
    """1. Write under a temporary name, locked, and sync. 2. Rename, and sync the folder. Raises OSError."""
    own = path.with_suffix(f".{secrets.token_hex(4)}")  # two jobs may keep a segment at a time
    try:
        with REAL.create(own) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            REAL.append(file, data)
            REAL.sync(file)  # 1
            REAL.rename(own, path)
    except OSError:
        REAL.remove(own)
        raise
    REAL.sync_folder(path.parent)  # 2


def drop_kept(folder: Path, value: str, sign: int) -> int:
    """Delete the files of `folder` whose samples contain a sign in any slot, or a value in a meta slot; return how
    many. A file that cannot be read may contain it."""
    found = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _contains(path, value, sign)]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _contains(path: Path, value: str, sign: int) -> bool:
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            batch = reader.get_batch(0)
            batch.validate(full=True)
            facts = _facts(reader.schema.metadata)
            columns = zip(batch.schema.names, batch.columns, strict=True)
            return _has_events(facts) or any(_column_has(name, column, value, sign) for name, column in columns)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, documents.InvalidDocument):
        return True


def _facts(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    found = metadata[FACTS] if FACTS in metadata else metadata[OLD_FACTS]
    return documents.parse_object(found.decode(), "kept samples")


def _column_has(name: str, column: pa.Array, value: str, sign: int) -> bool:
    kind, _, _ = name.partition("/")
    if kind == "sparse":
        return bool((column.values.to_numpy() == np.uint64(sign)).any())
    if kind != "meta":
        return False
    texts = column if pa.types.is_string(column.type) else column.cast(pa.utf8())
    return bool(pa.compute.any(pa.compute.equal(texts, value)).as_py())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
