"""Makes commits on disk without a trainer, and reads a mirror in a folder."""

from pathlib import Path

from headrace.blob.signature import UNSIGNED
from headrace.trainer.checkpoint.commits import FORMAT, Commit, hash_of, name_of, read_commit, write_manifest
from headrace.trainer.checkpoint.mirror import FetchedCommit, Mirror, MirrorCatalog
from tests.fakes.manifests import manifest_of


class LocalCommit(Commit):
    """A commit with the bytes of its manifest.json."""

    @property
    def text(self) -> bytes:
        return (self.folder / "manifest.json").read_bytes()


def make_commit(store: Path, version, files, *, job="job", timeline="t1", generation=1) -> LocalCommit:
    name = name_of(timeline, version, generation)
    folder = store / "commits" / name
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    manifest = manifest_of(name, format=FORMAT, job=job, files={path: hash_of(folder / path) for path in files})
    write_manifest(folder, manifest)
    return LocalCommit(folder, read_commit(folder).manifest)


def read_catalog(uri, deadline, signature=UNSIGNED) -> MirrorCatalog:
    return Mirror.open(uri, deadline, signature).catalog(deadline)


def fetch(uri, store, job, deadline, signature=UNSIGNED) -> FetchedCommit:
    return Mirror.open(uri, deadline, signature).fetch(store, job, deadline)


def repair(uri, commit, bad, deadline) -> None:
    Mirror.open(uri, deadline).repair(commit, bad, deadline)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept_in_mirror(root: Path) -> set[str]:
    return {path.stem for path in (root / "commits").iterdir()}
