"""The files of an output: parts, each whole or not there, and what is told when all are.

    <output>/part-000000.parquet ...      one a segment, in order
    <output>/_dead_letters/               of events that gave no sample, where the spec keeps them
    <output>/_metrics.json                over all parts
    <output>/_manifest.json               what this is, and the sha256 of each file
    <output>/_SUCCESS                     empty; for schedulers that wait for it
    <output>/_DONE                        empty; last
    <output>/.prediction/                 work: the plan, marks of parts, what metrics need; gone once _DONE is there

All but the parts have names that readers of Parquet pass over: the folder is one table to them. Outputs written before
have the names without "_", and are read as well. A part counts once its mark is there: it is written after all that
belongs to the part. Imports no torch.
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

from millrace import documents
from millrace.durable import REAL, write_whole, writing
from trainer.commits import hash_of
from trainer.markers import DONE, SUCCESS, is_done

WORK = ".prediction"
"""Folder of what is needed until the output is done."""
METRICS, MANIFEST, DEAD_LETTERS = "_metrics.json", "_manifest.json", "_dead_letters"


def part_name(number: int) -> str:
    """The file of a part."""
    return f"part-{number:06d}.parquet"


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of a finished part."""

    sha256: str
    num_bytes: int
    num_events: int
    num_samples: int
    num_judged: int
    """What `rejected` is a part of."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Totals of tensors, see trainer.metrics.tensors."""


class Output:
    """The files of one output; several processes may each write parts of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / WORK

    def observed(self, number: int) -> Path:
        """What metrics need of a part."""
        return self.work / f"observed-{number:06d}.arrow"

    def mark(self, number: int) -> Mark | None:
        """That of a finished part whose file is there; None for any other."""
        try:
            mark = Mark(**documents.read_object(self._mark(number)))
            size = (self.folder / part_name(number)).stat().st_size
        except (FileNotFoundError, documents.NotReadable, TypeError):  # one that is damaged: the part is made again
            return None
        return mark if size == mark.num_bytes else None

    def num_finished(self) -> int:
        """How many parts have their mark. Cheap."""
        return sum(1 for _ in self.work.glob("mark-*.json"))

    def finish(self, number: int, written: "Writing", facts: Mapping[str, Any]) -> None:
        """Make a part whose files are written one that counts. Raises Unwritable.

        1. What metrics need. 2. The part itself. 3. Its mark.
        """
        path = self.folder / part_name(number)
        with writing(path):
            os.replace(written.observed, self.observed(number))  # 1
            stored = hash_of(written.part)
            with written.part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(written.part, path)  # 2
            REAL.sync_folder(self.folder)
            mark = Mark(stored.sha256, stored.num_bytes, **facts)
            write_whole(REAL, self._mark(number), json.dumps(asdict(mark)).encode())  # 3

    def _mark(self, number: int) -> Path:
        return self.work / f"mark-{number:06d}.json"

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """A file of JSON, whole or not there. Raises Unwritable."""
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with writing(self.folder / name):
            write_whole(REAL, self.folder / name, text.encode())

    def end(self, manifest: Mapping[str, Any]) -> None:
        """1. The manifest. 2. _SUCCESS. 3. _DONE. 4. The work folder goes. Raises Unwritable."""
        self.put(MANIFEST, manifest)  # 1
        for name in (SUCCESS, DONE):
            with writing(self.folder / name):
                write_whole(REAL, self.folder / name, b"")  # 2, 3
        shutil.rmtree(self.work, ignore_errors=True)  # 4

    def manifest(self) -> dict[str, Any] | None:
        """Of an output that is done."""
        return self._read(MANIFEST) if is_done(self.folder) else None

    def metrics(self) -> dict[str, Any] | None:
        """Over all parts; None where nothing was measured."""
        return self._read(METRICS)

    def rename_old(self) -> None:
        """Give what an older Millrace began to write its present names. Raises Unwritable."""
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
    """The name of a file in an output that was written before."""
    return name.removeprefix("_")


class Writing:
    """A part being written, block by block, under temporary names of this process."""

    def __init__(self, output: Output, number: int, part: pa.Schema, observed: pa.Schema) -> None:
        self.part = output.work / f"{part_name(number)}.{os.getpid()}"
        self.observed = output.work / f"{output.observed(number).name}.{os.getpid()}"
        self._parquet = pq.ParquetWriter(self.part, part)
        self._arrow = pa.ipc.new_file(str(self.observed), observed)

    def add(self, part: pa.Table, observed: pa.Table) -> None:
        """The rows of one block."""
        self._parquet.write_table(part)
        self._arrow.write_table(observed)

    def close(self) -> None:
        """Both files are whole."""
        self._parquet.close()
        self._arrow.close()


@contextmanager
def writing_part(output: Output, number: int, part: pa.Schema, observed: pa.Schema) -> Iterator[Writing]:
    """A part's files, closed at the end and removed after an error. Raises Unwritable."""
    with writing(output.folder / part_name(number)):
        written = Writing(output, number, part, observed)
        try:
            yield written
            written.close()
        except BaseException:
            written.part.unlink(missing_ok=True)
            written.observed.unlink(missing_ok=True)
            raise
