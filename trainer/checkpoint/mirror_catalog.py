"""The manifests of a mirror: checked, parsed, sorted, and what may be removed. Pure, no network."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.blob.signature import Signature, WrongSignature
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged, order_of, parse_manifest, to_prune


@dataclass(frozen=True, slots=True)
class MirroredCommit(Commit):
    """One commit of a mirror; its folder is only its name."""

    text: bytes
    """Content of its manifest.json."""


def read_manifest(name: str, text: bytes) -> MirroredCommit:
    """The commit `name` whose manifest is `text`. Raises CommitDamaged, and NewerFormat."""
    return MirroredCommit(Path(name), parse_manifest(name, text), text)


def opened(signature: Signature, key: str, name: str, blob: bytes) -> bytes:
    """The text of the manifest of the commit `name` in the blob at `key`. Raises CommitDamaged."""
    try:
        return signature.opened(key, blob)
    except WrongSignature as error:
        raise CommitDamaged(f"{name}: {error}") from error


def newest_first(commits: Iterable[MirroredCommit]) -> list[MirroredCommit]:
    """Commits by timeline, version and generation, newest first."""
    return sorted(commits, key=lambda commit: order_of(commit.name), reverse=True)


def commits_to_remove(names: Iterable[str], keep: int, pinned: Collection[str]) -> list[str]:
    """Names of commits that are neither among the newest `keep` nor pinned, oldest first."""
    return to_prune(sorted(names, key=order_of), keep, pinned)


def unreferenced_contents(contents: Iterable[str], commits: Iterable[MirroredCommit]) -> list[str]:
    """Hashes of contents that no commit names."""
    named = {file.sha256 for commit in commits for file in commit.files.values()}
    return sorted(set(contents) - named)


def old_logs(names: Iterable[str], commits: Sequence[MirroredCommit], oldest_here: str) -> list[str]:
    """Files of the log, `<generation>-<part>.log`, that no commit needs.

    They are older than the oldest file in the store (`oldest_here`), and not of a generation after the oldest commit's.
    """
    oldest = min((order_of(commit.name)[2] for commit in commits), default=0)
    generations = {name: name.partition("-")[0] for name in names if name < oldest_here}
    return sorted(name for name, number in generations.items() if number.isdigit() and int(number) <= oldest)
