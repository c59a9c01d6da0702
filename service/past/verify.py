"""Whether a commit is what was written: every byte is read back, every shard's tables are opened and counted.

Opening goes by way of a restore: RocksDB writes to a folder that it opens, and a commit's must not change.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace import documents
from pserver.client import ShardPart
from pserver.errors import PserverError
from pserver.store.rocks import HEADER, RocksRows
from trainer.commits import Commit, problems_of


def damage_of(commit: Commit, scratch: Path) -> dict[str, str]:
    """What is wrong with `commit`, by file or table; empty where it is sound.

    `scratch`, on the disk of the commit, is made and removed: tables are opened there.
    """
    found = problems_of(commit)
    for part in commit.shards:
        for table, facts in part.tables.items():
            below = f"{part.folder}/{table}"
            if not any(file.startswith(f"{below}/") for file in found):
                problem = _problem_of_table(commit.folder / below, int(facts["rows"]), part, scratch)
                if problem is not None:
                    found[below] = problem
    return found


def _problem_of_table(folder: Path, num_rows: int, part: ShardPart, scratch: Path) -> str | None:
    try:
        num_words = documents.read_object(folder / HEADER)["words"]
        rows = RocksRows.open(scratch, folder, num_words=num_words)
        try:
            counted = sum(len(keys_U) for keys_U, _ in rows.scan())
            inside = sum(len(keys_U) for keys_U, _ in rows.scan(*part.buckets))
        finally:
            rows.close()
    except (PserverError, OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be opened: {error}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if counted != num_rows:
        return f"holds {counted:,} rows, and the manifest says {num_rows:,}"
    return None if inside == counted else f"holds {counted - inside:,} rows of buckets that are not this shard's"


def sharing(commit: Commit, file: str, others: Iterable[Commit]) -> Iterator[str]:
    """Names of the `others` whose commits hold the very same file on disk, and so its damage."""
    ours = _inode(commit.folder / file)
    for other in others:
        wanted = commit.files.get(file)
        candidates = [name for name, stored in other.files.items() if stored == wanted]
        if ours is not None and any(_inode(other.folder / name) == ours for name in candidates):
            yield other.name


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
