"""Names of files in the manifest of a commit, or in a message about one, checked before any is joined to a folder."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import SHA256, InvalidName, relative_name, shown

PART_FOLDER = re.compile(r"shard-\d{1,9}", re.ASCII)
"""Folders of the parts of shards."""


def checked_files(message: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Files by their paths in a commit's folder, as JSON lists them. Raises InvalidName."""
    return {
        relative_name(path): StoredFile(relative_name(file["sha256"], SHA256), int(file["bytes"]))
        for path, file in message.items()
    }


def checked_objects(message: Mapping[str, Any]) -> dict[str, int]:
    """The generations that uploaded contents, by SHA-256. Raises InvalidName."""
    for sha256, generation in message.items():
        relative_name(sha256, SHA256)
        if type(generation) is not int or generation < 0:
            raise InvalidName(f"{shown(generation)} is not the number of a generation")
    return dict(message)


def files_of_part(part: Mapping[str, Any]) -> dict[str, StoredFile]:
    """The files of a shard's part, all of them in its folder.

    Raises InvalidName, also for another name in the part: of its folder, a table, a file of changes, an object.
    """
    folder, files = relative_name(part["folder"], PART_FOLDER), checked_files(part["files"])
    if strange := [path for path in files if not path.startswith(f"{folder}/")]:
        raise InvalidName(f"{shown(strange[0])} is not in {folder}")
    for table, facts in part["tables"].items():
        if "/" in relative_name(table):
            raise InvalidName(f"{shown(table)} is not the name of a table")
        for change in facts.get("changes") or ():
            if change["file"] not in files:
                raise InvalidName(f"{shown(change['file'])} is no file of its part")
    checked_objects(part.get("objects", {}))
    return files
