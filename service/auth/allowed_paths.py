"""Paths that a spec may read and write: below the allowed roots or in its job's own folder, and in no reserved path.

Reserved are the stores, mirrors and exports of jobs: no spec may lie in the store of another job, and no prediction may
read or write a reserved path, except that it may read an export. Symbolic links are resolved first, so that none leads
out of a root. A user who may write below a root could create a link later, so the check is repeated whenever a job's
workers are started."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.blob.store_address import StoreAddress
from headrace.blob.store_address import parse as parse_store_address
from headrace.dataset.spec.path_part import PathPart
from headrace.dataset.spec.path_pattern import Pattern
from headrace.dataset.spec.path_search import DEEP
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, SpecError
from headrace.service.cluster.store import marker_of
from headrace.trainer.exports.destination import EXPORTS


@dataclass(frozen=True, slots=True)
class ReservedPaths:
    """Reserved paths. Symbolic links are resolved."""

    places: tuple[Path, ...] = ()
    exports: tuple[Path, ...] = ()
    """Folders that jobs export to."""
    objects: tuple[str, ...] = ()
    """Buckets with prefixes that jobs mirror or export to."""
    strict: bool = False
    """Whether a pattern that could match a reserved path is refused, too, and whether every folder with a store's
    marker is reserved, also if no job of the service owns it."""


NONE_RESERVED = ReservedPaths()


def reserved_stores(stores: Iterable[Path]) -> ReservedPaths:
    """Reserve the stores of other jobs."""
    return ReservedPaths(tuple(store.resolve() for store in stores))


def reserved_by_jobs(jobs: Iterable[tuple[str, Mapping[str, Any], Path, Path]]) -> ReservedPaths:
    """Reserve stores, mirrors and exports of jobs, each a name, raw spec, base folder and store."""
    places: list[Path] = []
    exports: list[Path] = []
    objects: list[str] = []
    for name, raw, base, store in jobs:
        section = raw.get("store")
        mirror = section.get("mirror") if isinstance(section, Mapping) else None
        given = [path / name for path in _folders(_export_paths(raw), base)]
        places += [store.resolve(), *_folders([mirror], base), *given]
        exports += [store.resolve() / EXPORTS, *given]
        objects += [*_buckets([mirror]), *(f"{root}/{name}" for root in _buckets(_export_paths(raw)))]
    return ReservedPaths(tuple(places), tuple(exports), tuple(objects), strict=True)


def enclosing_store(real: Path) -> Path | None:
    """The store that `real` is or lies in, by the marker file; None if there is none."""
    for folder in (real, *real.parents):
        try:
            if marker_of(folder).exists():
                return folder
        except OSError:  # a name that no file can have
            continue
    return None


def _export_paths(raw: Mapping[str, Any]) -> Iterator[Any]:
    streams = raw.get("exports")
    for stream in streams.values() if isinstance(streams, Mapping) else ():
        if isinstance(stream, Mapping):
            yield stream.get("path")


def _folders(texts: Iterable[Any], base: Path) -> Iterator[Path]:
    """Those of `texts` that are folders of this machine; a spec that is none any more keeps nothing there."""
    for text in texts:
        try:
            address = parse_store_address(text, base) if isinstance(text, str) else None
            if address is not None and address.is_folder:
                yield Path(address.root).resolve()
        except (ValueError, OSError, RuntimeError):
            continue


def _buckets(texts: Iterable[Any]) -> Iterator[str]:
    """Those of `texts` that are in an object store: see StoreAddress.place."""
    for text in texts:
        try:
            address = parse_store_address(text) if isinstance(text, str) and "://" in text else None
        except ValueError:  # a spec that is none any more
            continue
        if address is not None and not address.is_folder:
            yield address.place


MAX_LOOKED = 1000
"""Files matched by one pattern that are checked."""
LOOK_S = 5.0
"""How long all patterns of a spec may take to be matched."""
WILD = re.compile(r"[*?\[{]")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Below = tuple[str, ...] | None
"""The part of a folder that is named: () all of it; parts of a pattern: what they match there; None: only itself."""


@dataclass(frozen=True, slots=True)
class AllowedPaths:
    """Paths where a job, or a request, may read and write."""

    own: Path | None
    """The job's own folder, which is always allowed; None: it has none."""
    roots: tuple[StoreAddress, ...]
    private: tuple[Path, ...] = ()
    """Folders and files that no spec may reach, even below a root: the service's records, its key."""
    reserved: ReservedPaths = NONE_RESERVED
    """Paths of jobs."""
    deadline: Deadline | None = None
    """Until when patterns may be matched; None: no limit."""

    @classmethod
    def of(
        cls,
        roots: Sequence[str],
        own: Path | None,
        private: Sequence[Path] = (),
        reserved: ReservedPaths = NONE_RESERVED,
    ) -> "AllowedPaths":
        """Of absolute roots as in `allow.roots`. For one check, which ends after LOOK_S."""
        own = None if own is None else _resolved(own)
        places, hidden = tuple(parse_store_address(root) for root in roots), tuple(_resolved(path) for path in private)
        return cls(own, places, hidden, reserved, Deadline.after(LOOK_S))

    def check_base(self, folder: Path, at: str) -> None:
        """Check the folder where relative paths start. Raises SpecError at the key `at`."""
        self._check_path(_plain(str(folder), at), folder, at, below=None)

    def check_folder(self, text: str, folder: Path, at: str) -> None:
        """Check the folder or file `text`, relative to `folder`. Raises SpecError at the key `at`."""
        self._check_path(_plain(text, at), folder, at)

    def check_place(self, text: str, folder: Path, at: str) -> None:
        """Check a folder, or the address of one or of an object store. Raises SpecError at the key `at`."""
        address, root = self._address(text, folder, at)
        if not address.is_folder:
            self._check_object_store(address, at)
        else:
            self._check_path(root, folder, at)

    def check_export(self, text: str, folder: Path, at: str) -> None:
        """As `check_place`, for an export that is read: folders that jobs export to are allowed, too."""
        address, root = self._address(text, folder, at)
        if not address.is_folder:
            self._check_object_store(address, at, export=True)
        elif not any(_within(_resolved(Path(root), at), place) for place in self.reserved.exports):
            self._check_path(root, folder, at, export=True)

    def check_pattern(self, text: str, folder: Path, at: str) -> None:
        """Check a glob or template of files, relative to `folder`: what it can match, and what it matches now."""
        parts = Path(_plain(text, at)).parts
        wild = next((number for number, part in enumerate(parts) if WILD.search(part)), len(parts))
        self._check_path(str(Path(*parts[:wild])) if wild else ".", folder, at, below=parts[wild:])
        try:
            for match in islice(Pattern(text).find(folder, self.deadline), MAX_LOOKED):
                self.check_match(match, folder, at)
        except DeadlineExceeded as error:
            message = f"{text!r} takes longer than {LOOK_S:g} s to match ({error}); name folders nearer to the files"
            raise SpecError(message, at) from None

    def check_match(self, path: str, folder: Path, at: str) -> None:
        """Check a file that a pattern matches. Raises SpecError at the key `at`."""
        self._check_path(path, folder, at, below=None)

    def _check_path(self, text: str, folder: Path, at: str, *, below: Below = (), export: bool = False) -> None:
        path = Path(os.path.normpath(folder / text))
        real = _resolved(path, at)
        own = self.own if self.own is not None and _within(real, self.own) else None
        if own is None:
            self._check_root(path, real, text, at)
        private = [each for each in self.private if own is None or not _within(own, each)]
        if any(_reaches(real, below, each) for each in private):
            raise SpecError(f"{text!r} would reach the service's own files; name another folder", at)
        if (reserved := self._reserved(real, below, export=export)) is not None:
            raise SpecError(f"{text!r} would reach {reserved}, which belongs to a job; name another folder", at)

    def _reserved(self, real: Path, below: Below, *, export: bool) -> Path | None:
        """The reserved path that this would reach; None: none. An export in a store may be read."""
        strict = self.reserved.strict
        for place in self.reserved.places:
            if _reaches(real, below if strict else None, place):
                return place
        store = enclosing_store(real) if strict else None
        return None if store is None or (export and _within(real, store / EXPORTS)) else store

    def _check_root(self, path: Path, real: Path, text: str, at: str) -> None:
        roots = [Path(root.root) for root in self.roots if root.is_folder]
        named = any(_within(path, root) or _within(path, _resolved(root)) for root in roots)
        if not named or not any(_within(real, _resolved(root)) for root in roots):
            leads = f" (it leads to {real})" if named else ""
            raise SpecError(f"{text!r} is outside of the allowed paths{leads}; {self._allowed()}", at)

    def _address(self, text: str, folder: Path, at: str) -> tuple[StoreAddress, str]:
        """The address, and its root. Raises SpecError where the root has a ".."."""
        try:
            address = parse_store_address(_plain(text, at), folder)
        except ValueError as error:
            raise SpecError(str(error), at) from None
        return address, _plain(address.root, at)  # again: it may have been written with %2e

    def _check_object_store(self, address: StoreAddress, at: str, *, export: bool = False) -> None:
        if not {"", "."}.isdisjoint(address.root.split("/")):
            raise SpecError(f"{address.text!r} has a part that is empty or a dot", at)
        parts = address.place.split("/")
        for root in self.roots:
            above = root.place.split("/")
            if not root.is_folder and parts[: len(above)] == above:
                if address.options == root.options:
                    if not export:
                        self._check_reserved_objects(address, at)
                    return
                raise SpecError(f"{address.text!r} must have the options after '?' that the root has: {root.text}", at)
        raise SpecError(f"{address.text!r} is outside of the allowed paths; {self._allowed()}", at)

    def _check_reserved_objects(self, address: StoreAddress, at: str) -> None:
        parts = address.place.split("/")
        for place in self.reserved.objects:
            if all(mine == theirs for mine, theirs in zip(parts, place.split("/"), strict=False)):
                raise SpecError(
                    f"{address.text!r} would reach {place}, which belongs to a job; name another prefix", at
                )

    def _allowed(self) -> str:
        roots = ", ".join(root.text for root in self.roots) or ("nothing" if self.own is None else "nothing else")
        own = "" if self.own is None else "the job's own folder, "
        return f"allowed: {own}{roots} (allow.roots of the service)"


def _plain(text: str, at: str) -> str:
    """`text`. Raises SpecError where it is empty, or has a ".." or a control character."""
    if not text or CONTROL.search(text):
        raise SpecError("is empty, or holds a control character", at)
    if ".." in PurePosixPath(text).parts:
        raise SpecError(f"{text!r}: '..' is not allowed here; write the path without it", at)
    return text


def _within(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _reaches(real: Path, below: Below, private: Path) -> bool:
    """Whether the part `below` of the folder `real` can be `private`, or lie in it."""
    if _within(real, private):
        return True
    if below is None or not _within(private, real):
        return False
    return not below or _can_match(below, private.relative_to(real).parts)


def _can_match(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a pattern, part by part, can match the path `names` or one below it."""
    for part, name in zip(pattern, names, strict=False):
        if part == DEEP:
            return True
        if PathPart(part).match(name, {}) is None:
            return False
    return len(pattern) >= len(names)


def _resolved(path: Path, at: str = "") -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links; a name no file can have
        raise SpecError(f"{path} cannot be resolved: {error}", at) from None
