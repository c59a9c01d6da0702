"""The files of an output: parts, each whole or absent, and summaries once all parts exist.

    <output>/part-000000.parquet ...      one per segment, in order
    <output>/_dead_letters/               events that gave no sample, where the spec keeps them
    <output>/_metrics.json                over all parts
    <output>/_manifest.json               description of the output, and the sha256 of each file
    <output>/_SUCCESS                     empty; for schedulers that wait for this name
    <output>/_DONE                        empty; written last
    <output>/.prediction/                 work files: plan, marks of parts, inputs of metrics; removed after _DONE

Readers of Parquet skip all names except those of parts: to them the folder is one table. Older outputs have names
without "_" and are read as well. A part is complete once its mark exists: the mark is written after all files of the
part. Imports no torch.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import documents
from headrace.done_markers import DONE, SUCCESS, is_done
from headrace.durable import REAL, write_whole, writing
from headrace.trainer.checkpoint.commits import hash_of

WORK = ".prediction"
"""Folder of work files, until the output is complete."""
METRICS, MANIFEST, DEAD_LETTERS = "_metrics.json", "_manifest.json", "_dead_letters"


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:06d}.parquet"


@dataclass(frozen=True, slots=True)
class PartMark:
    """Facts of a finished part."""

    sha256: str
    num_bytes: int
    num_events: int
    num_samples: int
    num_judged: int
    """Events that could be rejected: the total for `rejected`."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Totals of tensors: see trainer.metrics.tensor_totals."""


class PredictionOutput:
    """The files of one output; several processes may each write parts of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / WORK

    def observed(self, number: int) -> Path:
        """File with the inputs of metrics of a part."""
        return self.work / f"observed-{number:06d}.arrow"

    def mark(self, number: int) -> PartMark | None:
        """The mark of a finished part whose file exists; None for any other part."""
        try:
            mark = PartMark(**documents.read_object(self._mark(number)))
            size = (self.folder / part_name(number)).stat().st_size
        except (FileNotFoundError, documents.InvalidDocument, TypeError):  # missing or damaged: the part is made again
            return None
        return mark if size == mark.num_bytes else None

    def num_finished(self) -> int:
        """Number of parts with a mark. Cheap."""
        return sum(1 for _ in self.work.glob("mark-*.json"))

    def finish(self, number: int, written: "PartWriter", facts: Mapping[str, Any]) -> None:
        """Complete a part whose files are written. Raises Unwritable.

        1. Inputs of metrics. 2. The part itself. 3. Its mark.
        """
        path = self.folder / part_name(number)
        with writing(path):
            os.replace(written.observed, self.observed(number))  # 1
            stored = hash_of(written.part)
            with written.part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(written.part, path)  # 2
            REAL.sync_folder(self.folder)
            mark = PartMark(stored.sha256, stored.num_bytes, **facts)
            write_whole(REAL, self._mark(number), json.dumps(asdict(mark)).encode())  # 3

    def _mark(self, number: int) -> Path:
        return self.work / f"mark-{number:06d}.json"

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all. Raises Unwritable."""
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with writing(self.folder / name):
            write_whole(REAL, self.folder / name, text.encode())

    def end(self, manifest: Mapping[str, Any]) -> None:
        """Complete the output: 1. manifest, 2. _SUCCESS, 3. _DONE, 4. remove the work folder. Raises Unwritable."""
        self.put(MANIFEST, manifest)  # 1
        for name in (SUCCESS, DONE):
            with writing(self.folder / name):
                write_whole(REAL, self.folder / name, b"")  # 2, 3
        shutil.rmtree(self.work, ignore_errors=True)  # 4

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of a complete output; None for any other."""
        return self._read(MANIFEST) if is_done(self.folder) else None

    def metrics(self) -> dict[str, Any] | None:
        """Metrics over all parts; None where there are none."""
        return self._read(METRICS)

    def rename_old(self) -> None:
        """Rename files that an older Headrace began to write. Raises Unwritable."""
        for name in (METRICS, MANIFEST, DEAD_LETTERS):
            old = self.folder / _old(name)
            with writing(old):
                if old.exists() and not (self.folder / name).exists():
                    old.rename(self.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        for path in (self.folder / name, self.folder / _old(name)):
            if path.exists():
                return documents.read_object(path)
        return None


def _old(name: str) -> str:
    """Name of a file in an output of an older Headrace."""
    return name.removeprefix("_")


class PartWriter:
    """A part that is written block by block, under temporary names of this process."""

    def __init__(self, output: PredictionOutput, number: int, part: pa.Schema, observed: pa.Schema) -> None:
        self.part = output.work / f"{part_name(number)}.{os.getpid()}"
        self.observed = output.work / f"{output.observed(number).name}.{os.getpid()}"
        self._parquet = pq.ParquetWriter(self.part, part)
        self._arrow = pa.ipc.new_file(str(self.observed), observed)

    def add(self, part: pa.Table, observed: pa.Table) -> None:
        """Append the rows of one block."""
        self._parquet.write_table(part)
        self._arrow.write_table(observed)

    def close(self) -> None:
        """Finish both files."""
        self._parquet.close()
        self._arrow.close()


@contextmanager
def writing_part(output: PredictionOutput, number: int, part: pa.Schema, observed: pa.Schema) -> Iterator[PartWriter]:
    """Open a part's files; close them at the end, remove them after an error. Raises Unwritable."""
    with writing(output.folder / part_name(number)):
        written = PartWriter(output, number, part, observed)
        try:
            yield written
            written.close()
        except BaseException:
            written.part.unlink(missing_ok=True)
            written.observed.unlink(missing_ok=True)
            raise
