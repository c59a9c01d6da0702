"""Segments kept in a folder as Arrow files, one for each segment, for later epochs and for other jobs.

A file is found by the segment and by what the job file says about sources and pipe; of its slots a job takes those that
it has. A file that cannot be read, or lacks a slot, counts as absent. dataset.loader.kept_segments keeps in memory.
"""

import base64
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataset.loader.kept_segments import KeptSegment
from dataset.pipe.segment_work import PipeOutput
from dataset.samples.batch import Ragged, Samples
from dataset.samples.rejection import Reason, Rejection
from dataset.samples.slot_counters import SlotCounters
from dataset.spec.config import AnyPipe, SlotKind
from dataset.spec.schema import Schema, Slot
from dataset.spec.source_set import SourceSet
from dataset.stream.source import Segment
from millrace import documents
from millrace.durable import REAL, write_whole

FORMAT = 1
"""Number of the files' layout; a file with another one counts as absent."""
SUFFIX = ".arrow"
FACTS = b"millrace"
"""Key, in a file's schema, of the JSON beside its columns."""
WITHOUT_EFFECT = {"processes", "on_bad_event", "max_bad_fraction", "dead_letters", "tries", "deadline", "extra"}
"""Keys of a pipe that do not change its samples."""
OF_SOURCES = ("event_time", "max_event_bytes", "since", "until")
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
        """See KeptSegments."""
        path = self._path(segment)
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                batch = reader.get_batch(0)
                batch.validate(full=True)  # kernels trust its offsets
                return self._loaded(reader.schema.metadata, batch)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, ValueError, KeyError, documents.InvalidDocument) as error:
            log.warning("%s cannot be used, so its segment goes through the pipe: %s", path, error)
            return None

    def keep(self, segment: Segment, part: KeptSegment, *, again: bool) -> None:
        """See KeptSegments."""
        if self._full:
            return
        data = self._file(part)
        if self._num_bytes + len(data) > self._max_bytes:
            self._stop(f"passes.keep is reached: {self._num_bytes} bytes are kept")
            return
        path = self._path(segment)
        try:
            own = path.with_suffix(f".{os.getpid()}")  # two jobs may keep a segment at a time
            write_whole(REAL, own, data)
            REAL.rename(own, path)
        except OSError as error:
            self._stop(str(error))
            return
        self._num_bytes += len(data)

    def _stop(self, why: str) -> None:
        log.warning("%s: %s; the segments that are not there go through the pipe each time", self._folder, why)
        self._full = True

    def _path(self, segment: Segment) -> Path:
        what = [FORMAT, self._made, segment.partition, segment.identity, segment.begin, segment.end]
        return self._folder / (hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40] + SUFFIX)

    def _file(self, part: KeptSegment) -> bytes:
        outcome = part.outcome
        facts = {
            "format": FORMAT,
            "slots": self._slots,
            "num_events": part.num_events,
            "left_out": dict(part.left_out),
            "num_judged": outcome.num_judged,
            "rejections": [_rejection_message(each) for each in outcome.rejections],
            "counters": [_text(outcome.counters.sums_SK.tobytes()), _text(outcome.counters.registers_SR.tobytes())],
        }
        blocks = [block for block in outcome.blocks if len(block)]
        columns = _columns(Samples.concat(blocks)) if blocks else {}
        table = pa.RecordBatch.from_pydict(columns or {"event": pa.array([], pa.int64())})
        table = table.replace_schema_metadata({FACTS: json.dumps(facts).encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_batch(table)
        return bytes(sink.getvalue())

    def _loaded(self, metadata: Mapping[bytes, bytes], batch: pa.RecordBatch) -> KeptSegment | None:
        facts = documents.parse_object(metadata[FACTS].decode(), "kept samples")
        if facts["format"] != FORMAT or any(facts["slots"].get(name) != each for name, each in self._slots.items()):
            return None
        blocks = [_samples(batch, self._schema)] if batch.num_rows else []
        outcome = PipeOutput(
            _counters(facts, self._schema, blocks),
            blocks,
            [_rejection_of(each) for each in facts["rejections"]],
            facts["num_judged"],
        )
        return KeptSegment(facts["num_events"], facts["left_out"], outcome)


def described(slot: Slot, schema: Schema) -> str:
    """All that the values of a slot depend on, as text; for a cross with the slots that it crosses."""
    entry = slot.entry.model_dump(mode="json", exclude=OF_MODELS)
    crossed = [described(schema.by_name[name], schema) for name in slot.entry.cross if name in schema.by_name]
    return json.dumps([entry, crossed], sort_keys=True)


def _columns(samples: Samples) -> dict[str, pa.Array]:
    """The columns of a file: "event", "time", and a prefix before the names of slots."""
    columns = {"event": pa.array(samples.event_B), "time": pa.array(samples.time_s_B)}
    for name, column in samples.sparse.items():
        offsets = pa.array(column.offset_B1)
        columns[f"sparse/{name}"] = pa.LargeListArray.from_arrays(offsets, pa.array(column.values_N))
        if column.weights_N is not None:
            columns[f"weights/{name}"] = pa.LargeListArray.from_arrays(offsets, pa.array(column.weights_N))
    for name, values in samples.dense.items():
        columns[f"dense/{name}"] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    for name, meta in samples.meta.items():
        columns[f"meta/{name}"] = pa.array(meta, pa.utf8()) if meta.dtype == np.object_ else pa.array(meta)
    return columns


def _samples(batch: pa.RecordBatch, schema: Schema) -> Samples:
    """The inverse of `_columns`, with the slots of `schema`."""
    sparse: dict[str, Ragged] = {}
    dense: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for slot in schema.slots:
        match slot.kind:
            case SlotKind.SPARSE:
                lists = batch.column(f"sparse/{slot.name}")
                weights_N = batch.column(f"weights/{slot.name}").values.to_numpy() if slot.sparse.weighted else None
                sparse[slot.name] = Ragged(lists.values.to_numpy(), lists.offsets.to_numpy().copy(), weights_N)
            case SlotKind.DENSE:
                column = batch.column(f"dense/{slot.name}")
                dense[slot.name] = column.values.to_numpy().reshape(len(column), -1)
            case SlotKind.META:
                meta[slot.name] = _meta(batch.column(f"meta/{slot.name}"))
    return Samples(sparse, dense, meta, batch.column("event").to_numpy(), batch.column("time").to_numpy())


def _meta(column: pa.Array) -> Any:
    if not pa.types.is_string(column.type):
        return column.to_numpy()
    texts = np.empty(len(column), object)
    texts[:] = column.to_pylist()
    return texts


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
    data = None if each.data is None else _text(each.data)
    return [each.partition, each.offset, each.reason.value, each.detail, data, each.line]


def _rejection_of(message: list[Any]) -> Rejection:
    partition, offset, reason, detail, data, line = message
    return Rejection(partition, offset, Reason(reason), detail, None if data is None else base64.b64decode(data), line)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
