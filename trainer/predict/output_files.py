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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import documents
from headrace.done_markers import DONE, MARKERS, SUCCESS
from headrace.durable import writing
from headrace.errors import SpecError
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import hash_of
from headrace.trainer.predict.output_place import DEAD_LETTERS, WORK, FolderPlace, open_place

METRICS, MANIFEST = "_metrics.json", "_manifest.json"
READERS = 16
"""Marks that are read at once: an object store answers each after some milliseconds."""


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
    own: Mapping[str, Mapping[str, Any]] | None = None
    """Vectors of the job's own metrics by task and name; None in marks of an older Headrace."""


class PredictionOutput:
    """The files of one output; several processes may each write parts of their own."""

    def __init__(self, place: Path | str, scratch: Path | None = None) -> None:
        """`place`: a folder, or the address of an object store, whose unfinished files are in `scratch`.

        Raises BlobUnavailable where the bucket cannot be seen.
        """
        self.place = open_place(place, scratch)
        self.work = self.place.work

    @property
    def holds_another(self) -> str:
        """In words: its place holds another prediction."""
        return f"{self.place.address} holds another prediction; choose another place, or remove it"

    @property
    def holds_none(self) -> str:
        """In words: its place holds something that is no prediction."""
        return f"{self.place.address} is not empty and holds no prediction; choose another"

    def check_place(self, at: str = "output") -> None:
        """Raise SpecError at the key `at` where a file stands in place of the folder or of one above it."""
        if not isinstance(self.place, FolderPlace):
            return
        folder = self.place.folder
        above = next(path for path in (folder, *folder.parents) if path.exists())
        if not above.is_dir():
            what = "" if above == folder else f"{folder} cannot be made: "
            raise SpecError(f"{what}{above} is a file; choose another", at)

    def observed(self, number: int) -> AbstractContextManager[Path]:
        """A local file with the inputs of metrics of a part."""
        return self.place.local(f"{WORK}/{observed_name(number)}")

    def clicks(self, number: int) -> AbstractContextManager[Path]:
        """A local file with the clicks of a part, of a job with a join."""
        return self.place.local(f"{WORK}/{clicks_name(number)}")

    def mark(self, number: int) -> PartMark | None:
        """The mark of a finished part whose file exists; None for any other part."""
        return self.marks([number]).get(number)

    def marks(self, numbers: Iterable[int]) -> dict[int, PartMark]:
        """The marks of those of these parts that are finished, and whose files exist."""
        marked, sizes = self.place.sizes(WORK), self.place.sizes()
        there = [each for each in numbers if _mark(each) in marked and part_name(each) in sizes]
        with ThreadPoolExecutor(READERS) as pool:
            found = dict(zip(there, pool.map(self._read_mark, there), strict=True))
        return {
            number: mark
            for number, mark in found.items()
            if mark is not None and mark.num_bytes == sizes[part_name(number)]
        }

    def num_finished(self) -> int:
        """Number of parts with a mark."""
        return sum(name.startswith("mark-") and name.endswith(".json") for name in self.place.names(WORK))

    def finish(self, number: int, written: "PartWriter", facts: Mapping[str, Any], letters: Path | None = None) -> None:
        """Complete a part whose files are written. Raises Unwritable, BlobUnavailable.

        1. Inputs of metrics, clicks, and its dead `letters`. 2. The part itself. 3. Its mark.
        """
        self.place.take(written.observed, f"{WORK}/{observed_name(number)}")  # 1
        if written.clicks is not None:
            self.place.take(written.clicks, f"{WORK}/{clicks_name(number)}")
        if letters is not None:
            self.place.take(letters, f"{DEAD_LETTERS}/{letters.name}")
        stored = self.place.take(written.part, part_name(number))  # 2
        mark = PartMark(stored.sha256, stored.num_bytes, **facts)
        self.place.put(f"{WORK}/{_mark(number)}", json.dumps(asdict(mark)).encode())  # 3

    def remove_unmarked(self) -> None:
        """Remove the parts of a plan that is forgotten: they have no mark. Raises Unwritable, BlobUnavailable."""
        for name in self.place.names():
            if name.startswith("part-"):
                self.place.remove(name)

    def remove_unfinished(self) -> None:
        """Remove the files that workers of this machine had begun when they were killed. Raises Unwritable."""
        begun = (each for name in (part_name, observed_name, clicks_name) for each in self.work.glob(_begun(name)))
        for path in begun:
            with writing(path):
                path.unlink()

    def _read_mark(self, number: int) -> PartMark | None:
        try:
            content = self.place.get(f"{WORK}/{_mark(number)}")
            return None if content is None else PartMark(**documents.parse_object(content, "a mark"))
        except (documents.InvalidDocument, TypeError):  # damaged: the part is made again
            return None

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all. Raises Unwritable, BlobUnavailable."""
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        self.place.put(name, text.encode())

    def end(self, manifest: Mapping[str, Any]) -> None:
        """Complete the output: 1. manifest, 2. _SUCCESS, 3. _DONE, 4. remove the work folder.

        Raises Unwritable, BlobUnavailable.
        """
        self.put(MANIFEST, manifest)  # 1
        for name in (SUCCESS, DONE):
            self.place.put(name, b"")  # 2, 3
        self.place.remove_work()  # 4

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of a complete output; None for any other."""
        return self._read(MANIFEST) if any(self.place.get(name) is not None for name in MARKERS) else None

    def metrics(self) -> dict[str, Any] | None:
        """Metrics over all parts; None where there are none."""
        return self._read(METRICS)

    def remove(self) -> None:
        """Remove the whole output. Raises BlobUnavailable."""
        self.place.remove_all()

    def others(self) -> dict[str, StoredFile]:
        """Hash and size of each file of dead letters and of the metrics, by name."""
        letters = [f"{DEAD_LETTERS}/{name}" for name in self.place.names(DEAD_LETTERS) if name.endswith(".jsonl")]
        names = [*letters, *(name for name in self.place.names() if name == METRICS)]
        return {name: self._stored(name) for name in sorted(names)}

    def _stored(self, name: str) -> StoredFile:
        with self.place.local(name) as path:
            return hash_of(path)

    def rename_old(self) -> None:
        """Rename files that an older Headrace began to write in a folder. Raises Unwritable."""
        if not isinstance(self.place, FolderPlace):
            return
        for name in (METRICS, MANIFEST, DEAD_LETTERS):
            old = self.place.folder / _old(name)
            with writing(old):
                if old.exists() and not (self.place.folder / name).exists():
                    old.rename(self.place.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        for each in (name, _old(name)):
            if (content := self.place.get(each)) is not None:
                return documents.parse_object(content, self.place.named(each))
        return None


def observed_name(number: int) -> str:
    """File name of the inputs of metrics of a part."""
    return f"observed-{number:06d}.arrow"


def clicks_name(number: int) -> str:
    """File name of the clicks of a part."""
    return f"clicks-{number:06d}.arrow"


def _mark(number: int) -> str:
    return f"mark-{number:06d}.json"


def _begun(name: Callable[[int], str]) -> str:
    """A pattern of the temporary names of PartWriter."""
    return name(0).replace("000000", "*") + ".*"


def _old(name: str) -> str:
    """Name of a file in an output of an older Headrace."""
    return name.removeprefix("_")


class PartWriter:
    """A part that is written block by block, under temporary names of its own."""

    def __init__(
        self,
        output: PredictionOutput,
        number: int,
        part: pa.Schema,
        observed: pa.Schema,
        clicks: pa.Schema | None = None,
    ) -> None:
        mine = uuid4().hex  # workers of several machines may share the folder
        self.part = output.work / f"{part_name(number)}.{mine}"
        self.observed = output.work / f"{observed_name(number)}.{mine}"
        self.clicks = None if clicks is None else output.work / f"{clicks_name(number)}.{mine}"
        self._parquet = pq.ParquetWriter(self.part, part)
        self._arrow = pa.ipc.new_file(str(self.observed), observed)
        self._clicks = None if self.clicks is None else pa.ipc.new_file(str(self.clicks), clicks)

    def add(self, part: pa.Table, observed: pa.Table, clicks: pa.Table | None = None) -> None:
        """Append the rows of one block."""
        self._parquet.write_table(part)
        self._arrow.write_table(observed)
        if self._clicks is not None and clicks is not None:
            self._clicks.write_table(clicks)

    def close(self) -> None:
        """Finish the files."""
        self._parquet.close()
        self._arrow.close()
        if self._clicks is not None:
            self._clicks.close()

    def remove(self) -> None:
        """Remove the files."""
        for path in (self.part, self.observed, self.clicks):
            if path is not None:
                path.unlink(missing_ok=True)


@contextmanager
def writing_part(
    output: PredictionOutput, number: int, part: pa.Schema, observed: pa.Schema, clicks: pa.Schema | None = None
) -> Iterator[PartWriter]:
    """Open a part's files; close them at the end, remove them after an error. Raises Unwritable."""
    with writing(output.work / part_name(number)):
        written = PartWriter(output, number, part, observed, clicks)
        try:
            yield written
            written.close()
        except BaseException:
            written.remove()
            raise
