"""A job's mirror and object store, read before the job starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.blob.signature import Signature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.trainer.checkpoint.mirror import read_catalog
from headrace.trainer.checkpoint.mirror_fetch import FetchedCommit, fetch, newest_generation_in
from headrace.trainer.checkpoint.object_store import ObjectStore, PreparedStore
from headrace.trainer.config import StoreSection


@dataclass(frozen=True, slots=True)
class MirrorReader:
    """A job's mirror, read before the job starts. Each method raises BlobUnavailable after the deadline."""

    uri: str
    signature: Signature
    deadline: Deadline

    @classmethod
    def of(cls, store: StoreSection, job: str, folder: Path, deadline: Deadline) -> Self:
        """The mirror of the job with this name and section; relative paths start at `folder`. Raises SpecError."""
        return cls(_address(store, folder), Signature.of(store.key, job, folder), deadline)

    def commit_names(self) -> list[str]:
        """Names of the readable commits, newest first."""
        return [commit.name for commit in read_catalog(self.uri, self.deadline, self.signature).commits]

    def is_empty(self) -> bool:
        """Whether it holds no commit, not even a damaged one."""
        catalog = read_catalog(self.uri, self.deadline, self.signature)
        return not catalog.commits and not catalog.damaged

    def fetch(self, store: Path, job: str) -> FetchedCommit:
        """Fetch the newest sound commit of `job` to `store`. Raises MirrorEmpty, SpecError, NewerFormat, Unwritable."""
        return fetch(self.uri, store, job, self.deadline, self.signature)

    def newest_generation(self) -> int:
        """The highest generation in it, also in damaged commits and in its copy of the log."""
        return newest_generation_in(self.uri, self.deadline)


@dataclass(frozen=True, slots=True)
class ObjectStoreReader:
    """A job's object store, with `store.parts = "object"`. Methods raise BlobUnavailable, and SpecError."""

    store: ObjectStore
    deadline: Deadline

    @classmethod
    def of(cls, store: StoreSection, job: str, folder: Path, deadline: Deadline) -> Self:
        """The store of the job with this name and section; relative paths start at `folder`."""
        signature = Signature.of(store.key, job, folder)
        return cls(ObjectStore.open(_address(store, folder), deadline, signature), deadline)

    def prepare(self, store: Path, job: str) -> PreparedStore:
        """Make the log and the commits in `store` those of the object store."""
        return self.store.prepare(store, job, self.store.sequence().catch_up(self.deadline), self.deadline)

    def newest_generation(self) -> int:
        """The newest generation that has claimed the job; 0 if none has."""
        return self.store.sequence().catch_up(self.deadline).generation


def _address(store: StoreSection, folder: Path) -> str:
    assert store.mirror is not None, "the spec has a mirror"
    return parse(store.mirror, folder).text
