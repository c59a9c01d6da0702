"""`headrace import`: gives a job with an empty store the rows and dense tensors of another model.

trainer.importing makes the commit; this module claims the store and prints the result.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cluster.fetched_commits import check_fresh, source_of
from headrace.service.cluster.store import RUN, claimed, clear_run, remove
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports.row_chunks import OnRows
from headrace.trainer.importing.first_commit import ImportResult, make_first_commit
from headrace.trainer.importing.model_shapes import shapes_of
from headrace.trainer.importing.selection import ImportSelection, TensorSelection, choose_tensors, parse_slots
from headrace.trainer.importing.source import ImportSource, SourceRows
from headrace.trainer.importing.source_kinds import open_source
from headrace.trainer.journal.log_file import newest_generation

MIRROR_S = 600.0
"""Longest time to list the mirror."""
MAX_NAMED = 20
"""Most tensors named on a line; the line counts the others."""


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """The arguments of an import."""

    source: str
    tables: Sequence[str] = ()
    slots: str | None = None
    dense: str = "*"
    dry_run: bool = False
    fresh: bool = False
    """Whether a run in the store is removed, once the import is known to succeed."""


class CountedSource:
    """A source whose rows are counted as they are read."""

    def __init__(self, source: ImportSource, on_rows: OnRows) -> None:
        self._source, self._on_rows = source, on_rows

    def batches(self) -> Iterator[SourceRows]:
        done = 0
        for batch in self._source.batches():
            yield batch
            done += len(batch.slot_R)
            self._on_rows(done, None)

    def dense(self) -> Mapping[str, NDArray[Any]]:
        return self._source.dense()

    def facts(self) -> Mapping[str, Any]:
        return self._source.facts()


def _ignore(_done: int, _most: int | None) -> None:
    """Rows that nobody counts."""


def import_into(
    job: LoadedJob,
    asked: ImportRequest,
    *,
    as_json: bool = False,
    counting: AbstractContextManager[OnRows] = nullcontext(_ignore),  # noqa: B008  # it holds nothing
) -> ImportResult:
    """Make the first commit of `job` from a source, and print what was done.

    `counting`: entered while rows are read; it is told how many.

    Raises SpecError if the store is not empty, BadInput if the source is wrong. After an error all is as before.
    """
    slots = None if asked.slots is None else parse_slots(asked.slots)

    def selection() -> ImportSelection:
        return ImportSelection.of(Schema.of(job.spec.slots), job.spec.tables, asked.tables, slots)

    with counting as on_rows, tempfile.TemporaryDirectory(prefix="headrace-import-") as scratch:
        opened = open_source(asked.source, job.spec.tables, selection(), Path(scratch) / "fetched")
        source = CountedSource(opened, on_rows)
        tensors = _choose_tensors(job, source, asked.dense)
        _check_empty(job, fresh=asked.fresh)
        if asked.dry_run or (asked.fresh and (job.store / RUN).exists()):  # no run is removed for a source that fails
            store = Path(scratch) / "store"
            store.mkdir()
            done = make_first_commit(store, job.spec, job.full, source, selection(), tensors)
        if not asked.dry_run:
            with _claimed(job, fresh=asked.fresh) as store:
                done = make_first_commit(store, job.spec, job.full, source, selection(), tensors)
    if as_json:
        print(json.dumps(import_message(done, asked, job.store), indent=2))
        return done
    for line in format_import(done, asked, job.store):
        print_printable(line)
    if "optimizer" in source.facts():
        print_printable('optimizer: its state begins anew; kind = "paddle_adagrad" would go on with that of the save')
    return done


def _choose_tensors(job: LoadedJob, source: ImportSource, glob: str) -> TensorSelection:
    theirs = {name: tuple(tensor.shape) for name, tensor in source.dense().items()}
    return choose_tensors(glob, theirs, shapes_of(job.full, job.folder) if theirs else {})


def _check_empty(job: LoadedJob, *, fresh: bool) -> None:
    """Raise SpecError if the store contains parts of a run, unless that is removed (`fresh`), or if its mirror does."""
    if fresh:
        check_fresh(job)
    elif Commits(job.store).names() or newest_generation(job.store / "log"):
        raise SpecError(
            f"{job.store} already contains a run, and an import needs an empty store; choose another store.path, or "
            "give --fresh to remove that run",
            "store.path",
        )
    deadline = Deadline.after(MIRROR_S)
    if source_of(job, deadline).catalog(deadline).commits:
        raise SpecError(
            f"{job.spec.store.mirror} contains commits, and a run would mix the two; choose another prefix",
            "store.mirror",
        )


@contextmanager
def _claimed(job: LoadedJob, *, fresh: bool) -> Iterator[Path]:
    """Claim the store, without its run if `fresh`. After an error it is as before, or gone if it was not there."""
    there, begun = job.store.exists(), (job.store / RUN).exists() and not fresh
    try:
        with claimed(job.store, job.spec.name, fresh=fresh) as store:
            _check_empty(job, fresh=False)
            try:
                yield store
            except BaseException:
                if not begun:
                    clear_run(store)
                raise
    except BaseException:
        if not there:
            remove(job.store, job.spec.name)
        raise


def import_message(done: ImportResult, asked: ImportRequest, store: Path) -> dict[str, Any]:
    """The result of an import, or of a dry run, as JSON."""
    return {
        "store": str(store),
        "commit": None if asked.dry_run else done.commit.name,
        "tables": dict(done.rows),
        "slots": dict(done.choice.loaded),
        "ignored": dict(done.choice.ignored),
        "dense": asdict(done.tensors),
    }


def format_import(done: ImportResult, asked: ImportRequest, store: Path) -> Iterator[str]:
    """The result of an import, or of a dry run, as lines of text."""
    choice = done.choice
    for table, rows in done.rows.items():
        yield f"table {table}: {count(rows)} rows loaded"
    for slot in choice.schema.sparse:
        if rows := choice.loaded.get(slot.name, 0):
            yield f"  slot {slot.name}: {count(rows)} rows"
    if bare := [slot.name for slot in choice.schema.sparse if not choice.loaded.get(slot.name)]:
        yield f"  no rows of: {_listed(bare)}"
    for theirs, rows in choice.ignored.items():
        yield f"ignored: {count(rows)} rows of slot {theirs}: {choice.why_ignored(theirs)}"
    yield from _format_tensors(done.tensors)
    if asked.dry_run:
        yield f"nothing was written; without --dry-run {store} would begin like this"
    else:
        yield f"{store} begins with commit {done.commit.name}; `headrace run` continues from it"


def _format_tensors(tensors: TensorSelection) -> Iterator[str]:
    if not tensors.loaded and not tensors.initialised and not tensors.ignored:
        yield "dense: all initialised; the source has no tensors"
        return
    yield f"dense: loaded {_listed(tensors.loaded)}"
    reasons: dict[str, list[str]] = {}
    for name, why in tensors.initialised.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"dense: initialised {_listed(names)}: {why}"
    if tensors.ignored:
        yield f"dense: ignored {_listed(tensors.ignored)}: the model has none of this name"


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more]) or "nothing"
