"""Names of partitions by epoch: a source that is read several times has each partition once for each epoch. Pure.

The first epoch has the source's own names, so a job without epochs has the names that it always had.
dataset.sources.repeated reads them; the order of epochs is decided by trainer.rank0.turns.
"""

import re

MARK = "#epoch="
"""Between the name of a partition and the number of its epoch, from the second one on."""
OF_EPOCH = re.compile(rf"(.+){MARK}([1-9][0-9]{{0,8}})", re.DOTALL)


def in_epoch(name: str, epoch: int) -> str:
    """The name, in an epoch, of the partition that is called `name` in the first."""
    return name if epoch == 1 else f"{name}{MARK}{epoch}"


def split_epoch(name: str) -> tuple[str, int]:
    """The inverse of `in_epoch`."""
    match = OF_EPOCH.fullmatch(name)
    return (name, 1) if match is None else (match[1], int(match[2]))
