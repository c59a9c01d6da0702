"""Retrieves items for many users: lines of JSON in, Parquet out, by the vectors of one export.

Parts are cut by position alone, and each is whole or absent, as those of predictions (trainer.predict.output_files); a
rerun makes those that are not there. Any number of threads makes the same bytes. Imports no torch.

Shapes: B users of a block, K items of each.
"""

import hashlib
import io
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace import documents
from headrace.config import Section
from headrace.dataset.stream.source import Segment
from headrace.errors import BadInput
from headrace.trainer.exports.reader import ReadableExport, chain_of
from headrace.trainer.predict.config import LIVE
from headrace.trainer.predict.output_files import PredictionOutput, writing_part
from headrace.trainer.replica.export_updates import CurrentExport, read
from headrace.trainer.replica.inference_messages import RequestReader
from headrace.trainer.replica.item_indexer import ItemIndexer
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.retrieval import MAX_K, RetrievalRequest, request_of

BLOCK_USERS = 256
"""Users whose items are searched at a time."""
MAX_LINE = 1 << 20
"""Longest line of a user, in bytes."""
MAX_THREADS = 256
CHECK_S = 0.2
"""Longest time until a part notices that the work is to end, but for a block of users."""
NOTHING = pa.schema([])


class UsersRefused(BadInput):
    """Lines of users that cannot be read."""


class BatchRetrieval(Section):
    """A request for the items of many users."""

    users: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files with a user in each line: JSON, as in a request to a replica; plain or compressed. A line may be empty."""
    output: str
    """As of a prediction."""
    version: str = LIVE
    """As of a prediction."""
    k: int = Field(default=10, ge=1, le=MAX_K)
    """Most items of each user."""
    segment_users: int = Field(default=20_000, ge=1, le=1_000_000)
    """Users of one output file."""
    threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    """Threads that search."""


@dataclass(frozen=True, slots=True)
class UsersFile:
    """A file of users as it is now."""

    path: str
    lines: int
    sha256: str

    @classmethod
    def of(cls, path: str) -> "UsersFile":
        """Count its lines. Raises UsersRefused."""
        hashed, lines = hashlib.sha256(), 0
        for line in lines_of(path):
            hashed.update(line)
            lines += 1
        return cls(path, lines, hashed.hexdigest())

    def segments(self, number: int, users: int) -> Iterator[Segment]:
        """Parts of at most so many users. `number`: that of the file."""
        for begin in range(0, self.lines, users):
            yield Segment(self.path, number, begin, min(begin + users, self.lines), self.sha256)


def lines_of(path: str) -> Iterator[bytes]:
    """The lines of a file. Raises UsersRefused."""
    try:
        with pa.input_stream(path, compression="detect") as stream, io.BufferedReader(stream) as lines:
            while line := lines.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise UsersRefused(f"{path}: a line has more than {MAX_LINE:,} bytes")
                yield line
    except (OSError, pa.ArrowException) as error:
        raise UsersRefused(f"{path}: cannot be read: {error}") from error


class ItemSearcher:
    """An export with its rows and items in memory. Any thread."""

    def __init__(self, export: ReadableExport) -> None:
        """Raises ExportUnusable, BadInput where its items cannot be searched."""
        chain = [each.check() for each in chain_of(export)]
        newest = chain[-1]
        indexer = ItemIndexer()
        self._state = ReplicaState(1, 0, indexer)
        current = CurrentExport(str(newest.manifest["timeline"]), newest.version, (newest.name,))
        self._state.apply(read(chain, current, whole=True))
        self._model = self._state.model()
        if self._model.described.get("retrieval") is None:
            raise BadInput(f"{export.place.address}: its job file has no section [retrieval]")
        if self._state.items is None:
            why = newest.manifest.get("items", {}).get("why") or indexer.trouble
            raise BadInput(f"{export.place.address}: its items cannot be searched: {why}")
        self._catalogue = self._state.items.index.catalogue
        self.schema = pa.schema(
            [
                pa.field("partition", pa.string()),
                pa.field("offset", pa.int64()),
                pa.field("items", pa.list_(self._catalogue.id_I.type)),
                pa.field("scores", pa.list_(pa.float32())),
            ]
        )
        """Columns of a part: the user's file and line, the best items, and their scores."""

    def table(self, path: str, at: Sequence[int], users: Sequence[Mapping[str, Any]], k: int) -> pa.Table:
        """The items of the users in the lines `at` of a file. Raises BadInput."""
        asked = RetrievalRequest.model_construct(users=list(users), k=k)
        slots = self._model.described["retrieval"]["item_slots"]
        inputs = RequestReader(self._model, BLOCK_USERS).inputs(request_of(asked, self._model, slots))
        done = self._state.users(self._model, inputs)
        assert done is not None, "nobody changes the state"
        _, index, user_BV = done
        assert index is not None
        if not np.isfinite(user_BV).all():
            line = at[int(np.argmin(np.isfinite(user_BV).all(axis=1)))]
            raise UsersRefused(f"{path}, line {line + 1}: the user's vector is not finite")
        found = index.search(user_BV, min(k, len(self._catalogue)), index.there_I)
        ends = np.cumsum([0, *(len(at_K) for _, at_K in found)]).astype(np.int32)
        items = self._catalogue.id_I.take(pa.array(np.concatenate([at_K for _, at_K in found])))
        scores = pa.array(np.concatenate([score_K for score_K, _ in found]))
        columns = [
            pa.array([path] * len(users), pa.string()),
            pa.array(at, pa.int64()),
            pa.ListArray.from_arrays(ends, items),
            pa.ListArray.from_arrays(ends, scores),
        ]
        return pa.table(columns, schema=self.schema)


def retrieve_parts(
    output: PredictionOutput,
    segments: Sequence[Segment],
    searcher: ItemSearcher,
    request: BatchRetrieval,
    on_part: Callable[[], None],
    check: Callable[[], None],
) -> None:
    """Make the parts that are not there; `on_part` is called after each, on this thread.

    `check` is called again and again meanwhile, and raises where the work is to end: then no part goes on for long.
    Raises UsersRefused, BadInput, Unwritable.
    """
    there = output.marks(range(len(segments)))
    with ThreadPoolExecutor(request.threads) as pool:
        running: queue.Queue[Future[None]] = queue.Queue()
        failed = threading.Event()
        try:
            for number, segment, lines in _read(segments):
                if number in there:
                    continue
                running.put(pool.submit(_part, output, number, segment, lines, searcher, request.k, failed))
                if running.qsize() > request.threads:
                    _await(running.get(), check)
                    on_part()
            while not running.empty():
                _await(running.get(), check)
                on_part()
        except BaseException:
            failed.set()
            raise


def _await(part: Future[None], check: Callable[[], None]) -> None:
    check()
    while not wait([part], CHECK_S).done:
        check()
    part.result()


def _read(segments: Sequence[Segment]) -> Iterator[tuple[int, Segment, list[bytes]]]:
    """The lines of each segment. Raises UsersRefused where a file has changed."""
    for _, of_file in groupby(enumerate(segments), lambda each: each[1].number):
        parts = list(of_file)
        path, hashed = parts[0][1].partition, hashlib.sha256()
        lines = lines_of(path)
        for number, segment in parts:
            found = list(islice(lines, segment.end - segment.begin))
            for line in found:
                hashed.update(line)
            if segment is parts[-1][1] and (hashed.hexdigest() != segment.identity or next(lines, None) is not None):
                raise UsersRefused(f"{path}: has changed since its parts were planned; begin with a new output")
            yield number, segment, found


def _part(
    output: PredictionOutput,
    number: int,
    segment: Segment,
    lines: Sequence[bytes],
    searcher: ItemSearcher,
    k: int,
    failed: threading.Event,
) -> None:
    told = [(segment.begin + at, line) for at, line in enumerate(lines) if line.strip()]
    with writing_part(output, number, searcher.schema, NOTHING) as written:
        for place in range(0, len(told), BLOCK_USERS):
            if failed.is_set():
                return
            some = told[place : place + BLOCK_USERS]
            users = [_user(segment.partition, at, line) for at, line in some]
            written.add(_table(searcher, segment.partition, [at for at, _ in some], users, k), pa.table({}))
    facts = {"num_events": len(told), "num_samples": len(told), "num_judged": len(told)}
    output.finish(number, written, facts)


def _table(
    searcher: ItemSearcher, path: str, at: Sequence[int], users: Sequence[Mapping[str, Any]], k: int
) -> pa.Table:
    """As ItemSearcher.table; the error of a block becomes that of its line."""
    try:
        return searcher.table(path, at, users, k)
    except UsersRefused:
        raise
    except BadInput:
        for line, user in zip(at, users, strict=True):
            try:
                searcher.table(path, [line], [user], k)
            except BadInput as error:
                raise UsersRefused(f"{path}, line {line + 1}: {str(error).removeprefix('users[0]: ')}") from error
        raise


def _user(path: str, line: int, text: bytes) -> Mapping[str, Any]:
    try:
        return documents.parse_object(text, f"{path}, line {line + 1}")
    except documents.InvalidDocument as error:
        raise UsersRefused(str(error)) from error


def fingerprint_of_users(files: Sequence[UsersFile], request: BatchRetrieval) -> str:
    """Hash of all that the output depends on, except the version."""
    what = {
        "format": 1,
        "users": [[each.path, each.lines, each.sha256] for each in files],
        **request.model_dump(mode="json", include={"version", "k", "segment_users"}),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def plan_segments(files: Sequence[UsersFile], users: int) -> tuple[Segment, ...]:
    """The parts of all files, in order."""
    return tuple(each for number, file in enumerate(files) for each in file.segments(number, users))
