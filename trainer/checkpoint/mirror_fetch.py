"""Fetches from a mirror: a whole commit onto an empty machine, or single files to replace damaged ones."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.blob.blob_store import UNFINISHED
from headrace.blob.signature import UNSIGNED, Signature
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.errors import Unwritable
from headrace.pserver.commit.part_objects import run_parallel
from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import InvalidName, path_below
from headrace.trainer.checkpoint.commits import FOLDER, MANIFEST, Commit, CommitDamaged
from headrace.trainer.checkpoint.mirror import FILES, CommitPresent, Mirror, MirrorCatalog, MirrorEmpty
from headrace.trainer.checkpoint.mirror_catalog import MirroredCommit


@dataclass(frozen=True, slots=True)
class FetchedCommit:
    """A commit that was fetched."""

    name: str
    passed_over: tuple[str, ...]
    """Errors of newer commits that are damaged in the mirror, for people."""
    timeline: int
    generation: int
    """Highest timeline and generation in the mirror, also in damaged commits and the log: new ones must be above."""


def fetch(uri: str, store: Path, job: str, deadline: Deadline, signature: Signature = UNSIGNED) -> FetchedCommit:
    """Fetch the newest commit of `job` whose files are complete and right, to `store`/commits/<name>.

    Raises MirrorEmpty where there is none, SpecError where the mirror is another job's, NewerFormat, CommitPresent,
    BlobUnavailable, Unwritable; then nothing of the commit is left.
    """
    mirror = Mirror.open(uri, deadline, signature)
    catalog = mirror.catalog(deadline)
    catalog.refuse_newer()
    catalog.refuse_others(job)
    passed_over = [str(error) for error in catalog.damaged.values()]
    for commit in catalog.commits:
        try:
            _fetch(mirror, commit, store / FOLDER, deadline)
        except CommitDamaged as error:
            passed_over.append(str(error))
        else:
            return FetchedCommit(commit.name, tuple(passed_over), *_highest(catalog, mirror.generations(deadline)))
    if passed_over:
        raise MirrorEmpty(f"mirror {uri}: no commit in it is whole: {'; '.join(passed_over)}")
    raise MirrorEmpty(f"mirror {uri}: there is no commit in it; check store.mirror, or start without it")


def repair(uri: str, commit: Commit, bad: Sequence[str], deadline: Deadline) -> None:
    """Replace the files `bad` of a commit by the mirror's contents with their hashes.

    A file is renamed over the damaged one once it is whole, right and synced. Other commits that share the damaged file
    by a hard link keep it: repair them, too.

    Raises CommitDamaged where the mirror lacks the right content; BlobUnavailable, Unwritable.
    """
    mirror = Mirror.open(uri, deadline)

    def mend(path: str) -> None:
        target = _target(commit.folder, path)
        unfinished = target.with_name(f"{target.name}{UNFINISHED}")
        try:
            _make_folder(target.parent)
            _download(mirror, commit.files[path], path, unfinished, deadline)
            REAL.rename(unfinished, target)
            REAL.sync_folder(target.parent)
        except OSError as error:
            raise Unwritable(target, error) from error
        finally:
            unfinished.unlink(missing_ok=True)

    run_parallel(mend, bad)


def newest_generation_in(uri: str, deadline: Deadline) -> int:
    """The newest generation of workers in the mirror; workers that continue from it must have a higher one."""
    mirror = Mirror.open(uri, deadline)
    return _highest(mirror.catalog(deadline), mirror.generations(deadline))[1]


def _highest(catalog: MirrorCatalog, generations: Sequence[int]) -> tuple[int, int]:
    """Highest timeline and generation."""
    orders = catalog.orders
    return max([0, *(order[0] for order in orders)]), max([0, *generations, *(order[2] for order in orders)])


def _fetch(mirror: Mirror, commit: MirroredCommit, commits: Path, deadline: Deadline) -> None:
    """Fetch one commit, whole or not at all.

    1. Its files, under an unfinished name. 2. Sync their folders. 3. The manifest. 4. The commit gets its name.
    """
    if missing := mirror.missing(commit, deadline):
        raise CommitDamaged(f"{commit.name}: {len(missing)} of its files are not in the mirror, {missing[0]} for one")
    folder = commits / f"{commit.name}{UNFINISHED}"
    if (commits / commit.name).exists():
        raise CommitPresent(commits / commit.name)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        targets = {path: _target(folder, path) for path in commit.files}
        for parent in {folder, *(target.parent for target in targets.values())}:
            _make_folder(parent)
        run_parallel(lambda path: _download(mirror, commit.files[path], path, targets[path], deadline), targets)  # 1
        for parent in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            REAL.sync_folder(parent)  # 2
        write_whole(REAL, folder / MANIFEST, commit.text)  # 3
        REAL.rename(folder, commits / commit.name)  # 4
        REAL.sync_folder(commits)
    except OSError as error:
        raise Unwritable(folder, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _target(folder: Path, path: str) -> Path:
    try:
        return path_below(folder, path)
    except InvalidName as error:
        raise CommitDamaged(str(error)) from error


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _download(mirror: Mirror, file: StoredFile, path: str, target: Path, deadline: Deadline) -> None:
    try:
        found = mirror.blobs.download(f"{FILES}/{file.sha256}", target, deadline)
    except FileNotFoundError:
        raise CommitDamaged(f"{path}: its content {file.sha256} is not in the mirror") from None
    if found != (file.sha256, file.num_bytes):
        raise CommitDamaged(f"{path}: the mirror has other bytes under {file.sha256}")
