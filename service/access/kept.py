"""What jobs keep for themselves below an allowed root: stores, mirrors, places of exports.

Nobody else's spec may lie in a store, and no prediction may read or write what is kept; but it may read an export.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.store import MARKER
from trainer.exports.ordering import EXPORTS
from trainer.mirror.address import Kind, parse


@dataclass(frozen=True, slots=True)
class Kept:
    """See module docstring. Paths are without links."""

    places: tuple[Path, ...] = ()
    exports: tuple[Path, ...] = ()
    """Where jobs export to."""
    strict: bool = False
    """Whether what could only reach a place is refused, too, as a pattern; and whether any folder with a store's marker
    is a place, also where no job of the service has it."""


NOTHING = Kept()


def stores_kept(stores: Iterable[Path]) -> Kept:
    """Stores of other jobs, which no spec may reach."""
    return Kept(tuple(store.resolve() for store in stores))


def all_kept(jobs: Iterable[tuple[str, Mapping[str, Any], Path, Path]]) -> Kept:
    """All that these jobs keep, each a name, a raw spec, the folder where its paths start, and its store."""
    places: list[Path] = []
    exports: list[Path] = []
    for name, raw, base, store in jobs:
        section = raw.get("store")
        mirror = section.get("mirror") if isinstance(section, Mapping) else None
        given = [path / name for path in _folders(_export_paths(raw), base)]
        places += [store.resolve(), *_folders([mirror], base), *given]
        exports += [store.resolve() / EXPORTS, *given]
    return Kept(tuple(places), tuple(exports), strict=True)


def store_around(real: Path) -> Path | None:
    """The store that `real` is, or lies in, by its marker; None: it lies in none."""
    for folder in (real, *real.parents):
        try:
            if (folder / MARKER).exists():
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
            address = parse(text, base) if isinstance(text, str) else None
            if address is not None and address.kind is Kind.FOLDER:
                yield Path(address.root).resolve()
        except (ValueError, OSError, RuntimeError):
            continue
