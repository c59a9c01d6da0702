"""Markers of a complete folder: an empty file that is written last, in exports and in the output of predictions.

The name begins with "_": readers of Parquet (pyarrow, Spark, Hive) ignore files with such names, so they can read a
folder of parts as one table.
"""

from collections.abc import Collection
from pathlib import Path

DONE = "_DONE"
"""The marker of new folders."""
OLD_DONE = "DONE"
"""The marker of older releases; a folder with it is complete, too."""
SUCCESS = "_SUCCESS"
"""Written before DONE into an output of parts: schedulers of batch jobs wait for this marker."""
MARKERS = (DONE, OLD_DONE)


def has_done(names: Collection[str]) -> bool:
    """True if a folder with files of these names is complete."""
    return any(name in names for name in MARKERS)


def is_done(folder: Path) -> bool:
    """True if a local folder is complete."""
    return any((folder / name).exists() for name in MARKERS)
