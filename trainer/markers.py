"""Markers of a complete folder: an empty file that is written last, in an export and in the output of a prediction.

The name begins with "_": readers of Parquet (pyarrow, Spark, Hive) pass over files and folders of such names, so they
can read a folder of parts as one table.
"""

from collections.abc import Collection
from pathlib import Path

DONE = "_DONE"
"""What is written."""
OLD_DONE = "DONE"
"""What was written before; a folder with it is complete, too."""
SUCCESS = "_SUCCESS"
"""Written before DONE into an output of parts: the marker that schedulers of batch jobs wait for."""
MARKERS = (DONE, OLD_DONE)


def has_done(names: Collection[str]) -> bool:
    """Whether a folder with files of these names is complete."""
    return any(name in names for name in MARKERS)


def is_done(folder: Path) -> bool:
    """Whether a folder of this machine is complete."""
    return any((folder / name).exists() for name in MARKERS)
