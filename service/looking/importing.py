"""`millrace import`: a job with an empty store begins with rows and dense tensors of another model.

The commit is made by trainer.importing; here the store is taken, and what was done is told.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dataset.schema import Schema
from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.printable import say
from service.lines import count
from service.spec import LoadedJob
from service.store import RUN, claimed
from trainer.commits import Commits
from trainer.importing.choice import Choice, Tensors, choose_tensors, renamed
from trainer.importing.commit import Imported, make
from trainer.importing.opening import open_source
from trainer.importing.source import Source
from trainer.importing.tensors import shapes_of
from trainer.log import newest_generation
from trainer.mirror.address import parse
from trainer.mirror.content import lookup

MIRROR_S = 600.0
"""How long looking into the mirror may take."""
MAX_NAMED = 20
"""Tensors named on a line; of the others it says how many."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user wants imported."""

    source: str
    tables: Sequence[str] = ()
    slots: str | None = None
    dense: str = "*"
    dry_run: bool = False


def import_into(job: LoadedJob, asked: Asked) -> Imported:
    """Make the first commit of `job` of a source, and say what was done.

    Raises SpecError where the store is not empty, BadInput for what is wrong with the source. Nothing is left then.
    """
    slots = None if asked.slots is None else renamed(asked.slots)
    choice = Choice.of(Schema.of(job.spec.slots), job.spec.tables, asked.tables, slots)
    with tempfile.TemporaryDirectory(prefix="millrace-import-") as scratch:
        source = open_source(asked.source, job.spec.tables, choice, Path(scratch) / "fetched")
        tensors = _choose_tensors(job, source, asked.dense)
        if asked.dry_run:
            _check_empty(job)
            store = Path(scratch) / "store"
            store.mkdir()
            done = make(store, job.spec, job.full, source, choice, tensors)
        else:
            with _taken(job) as store:
                done = make(store, job.spec, job.full, source, choice, tensors)
    for line in told(done, asked, job.store):
        say(line)
    return done


def _choose_tensors(job: LoadedJob, source: Source, glob: str) -> Tensors:
    theirs = {name: tuple(tensor.shape) for name, tensor in source.dense().items()}
    return choose_tensors(glob, theirs, shapes_of(job.full, job.folder) if theirs else {})


def _check_empty(job: LoadedJob) -> None:
    """Raises SpecError where the store, or its mirror, holds something of a run."""
    if Commits(job.store).names() or newest_generation(job.store / "log"):
        raise SpecError(
            f"{job.store} holds a run already, and a warm start is for an empty store; choose another store.path, or "
            "remove that folder",
            "store.path",
        )
    mirror = job.spec.store.mirror
    if mirror is not None and lookup(parse(mirror, job.folder).text, Deadline.after(MIRROR_S)).commits:
        raise SpecError(f"{mirror} holds commits, and a run would mix the two; choose another prefix", "store.mirror")


@contextmanager
def _taken(job: LoadedJob) -> Iterator[Path]:
    """The empty store, held; after an error it is as it was, but for the folder itself."""
    _check_empty(job)
    begun = (job.store / RUN).exists()
    with claimed(job.store, job.spec.name, fresh=False) as store:
        _check_empty(job)
        try:
            yield store
        except BaseException:
            if not begun:
                commits = Commits(store).folder
                if commits.is_dir() and not any(commits.iterdir()):
                    commits.rmdir()
                (store / RUN).unlink(missing_ok=True)
            raise


def told(done: Imported, asked: Asked, store: Path) -> Iterator[str]:
    """What an import did, or would do, in lines."""
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
    yield from _told_tensors(done.tensors)
    if asked.dry_run:
        yield f"nothing was written; without --dry-run {store} would begin so"
    else:
        yield f"{store} begins with commit {done.commit.name}; `millrace run` goes on from it"


def _told_tensors(tensors: Tensors) -> Iterator[str]:
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
