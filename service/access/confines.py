"""Which folders and object stores a spec may read and write: below the allowed roots, or in its job's own folder.

Links are followed before the answer, so that none leads out of a root. Who may write below a root could make one later,
so the same is asked again whenever a job's workers are started.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from millrace.errors import SpecError
from trainer.mirror.address import Address, Kind, parse

MAX_LOOKED = 1000
"""Of the files that a pattern matches now, so many are looked at."""
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
WILD = re.compile(r"[*?\[{]")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Confines:
    """Where a job may read and write."""

    own: Path
    """The job's own folder, always allowed."""
    roots: tuple[Address, ...]
    private: tuple[Path, ...] = ()
    """Folders and files that no spec may reach, be they below a root: the service's records, its key."""

    @classmethod
    def of(cls, roots: Sequence[str], own: Path, private: Sequence[Path] = ()) -> "Confines":
        """From texts as in `allow.roots`, which are absolute."""
        return cls(_resolved(own), tuple(parse(root) for root in roots), tuple(_resolved(path) for path in private))

    def check_base(self, folder: Path, at: str) -> None:
        """The folder where relative paths start. Raises SpecError at the key `at`."""
        self._check_path(_plain(str(folder), at), folder, at, below=False)

    def check_folder(self, text: str, folder: Path, at: str) -> None:
        """The folder or file `text`, relative to `folder`. Raises SpecError at the key `at`."""
        self._check_path(_plain(text, at), folder, at)

    def check_place(self, text: str, folder: Path, at: str) -> None:
        """A folder, "file:///folder" or "s3://bucket/prefix". Raises SpecError at the key `at`."""
        try:
            address = parse(_plain(text, at), folder)
        except ValueError as error:
            raise SpecError(str(error), at) from None
        root = _plain(address.root, at)  # again: it may have been written with %2e
        if address.kind is Kind.S3:
            self._check_object_store(address, at)
        else:
            self._check_path(root, folder, at)

    def check_pattern(self, text: str, folder: Path, at: str) -> None:
        """A glob or template of files, relative to `folder`: what it can match, and what it matches now."""
        parts = Path(_plain(text, at)).parts
        wild = next((number for number, part in enumerate(parts) if WILD.search(part)), len(parts))
        self._check_path(str(Path(*parts[:wild])) if wild else ".", folder, at, below=wild < len(parts))
        for match in islice(glob.iglob(FIELD.sub("*", text), root_dir=folder, recursive=True), MAX_LOOKED):
            self._check_path(match, folder, at)

    def _check_path(self, text: str, folder: Path, at: str, *, below: bool = True) -> None:
        path = Path(os.path.normpath(folder / text))
        real = _resolved(path, at)
        if _within(real, self.own):
            return
        roots = [Path(root.root) for root in self.roots if root.kind is Kind.FOLDER]
        named = any(_within(path, root) or _within(path, _resolved(root)) for root in roots)
        if not named or not any(_within(real, _resolved(root)) for root in roots):
            leads = f" (it leads to {real})" if named else ""
            raise SpecError(f"{text!r} is outside of what is allowed here{leads}; {self._allowed()}", at)
        if any(_within(real, private) or (below and _within(private, real)) for private in self.private):
            raise SpecError(f"{text!r} would reach what is the service's own; name another folder", at)

    def _check_object_store(self, address: Address, at: str) -> None:
        parts = address.root.split("/")
        if "" in parts or "." in parts:
            raise SpecError(f"{address.text!r} has a part that is empty or a dot", at)
        for root in self.roots:
            above = root.root.split("/")
            if root.kind is Kind.S3 and parts[: len(above)] == above:
                if address.options == root.options:
                    return
                raise SpecError(f"{address.text!r} must have the options after '?' that the root has: {root.text}", at)
        raise SpecError(f"{address.text!r} is outside of what is allowed here; {self._allowed()}", at)

    def _allowed(self) -> str:
        roots = ", ".join(root.text for root in self.roots) or "nothing else"
        return f"allowed: the job's own folder, {roots} (allow.roots of the service)"


def _plain(text: str, at: str) -> str:
    """`text`, where it climbs nowhere. Raises SpecError."""
    if not text or CONTROL.search(text):
        raise SpecError("is empty, or holds a control character", at)
    if ".." in PurePosixPath(text).parts:
        raise SpecError(f"{text!r}: '..' is not allowed here; write the path without it", at)
    return text


def _within(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _resolved(path: Path, at: str = "") -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a name no file can have
        raise SpecError(f"{path} leads nowhere: {error}", at) from None
