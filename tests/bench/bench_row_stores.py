"""What RocksDB costs as the store of rows: writing dirty rows, checkpoints, scans, random reads from disk and memory.

`python -m tests.bench.bench_row_stores [rows_1M | rows_10M | rows_20M] [--folder F]` prints JSON. Figures are of the
machine and the minute: quote them together.

How the options of pserver.store.rocks_store were chosen (2 cores, local disk, rows of 24 words, other work beside):
    compaction   8 M rows, then 30 writes of 200,000 of them: GB written, most and middle ms of a checkpoint, B a row
                 level, 4 files of level 0, base 256 MB     3.7    2,680   330   144
                 level, 8 files, base 512 MB                2.8      910    91   152   taken: its room is bounded
                 universal, 4 files                         2.5      930   306   191
                 universal, 8 files                         1.8      170    50   178   at times rewrites it all at once
    block        1.5 M rows of 23 words, all in the page cache: microseconds of CPU a key found by our kernels, bytes a
                 row held in memory: 4 KiB 2.2, 1.8; 2 KiB 1.7, 2.4; 1 KiB 1.4, 3.5
    bloom        thousands of missing keys a second, bytes a row held: none 310, 0.4; 10 bits 1,440 and more, 1.7;
                 14 bits 3,450, 2.2
    compression  lz4 saves nothing of random floats (115 B a row either way) and costs a third more CPU to write
    threads      20,000 keys not in memory, of 6 M: 11,000/s by one thread, 16,000 by 2, 36,000 by 4, 50,000 by 8
    sync         taking in a file of 1 M rows: 570 ms with the interpreter held, 5 ms when we synced it before
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.pserver.store.rocks_store import RocksRowStore

WORDS = 24
"""Of a row of dim 16, optimizer by row, and statistics: 19 floats and 5 words."""
DIRTY, ASKED, BATCH = 200_000, 20_000, 1_000_000


def _timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _put_out_of_memory(folder: Path) -> None:
    for path in folder.glob("*.sst"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _reads(store: RocksRowStore, live: Path, keys_R: np.ndarray, draw: np.random.Generator) -> dict[str, float]:
    def asked() -> np.ndarray:
        return keys_R[draw.choice(len(keys_R), ASKED, replace=False)]

    _put_out_of_memory(live)
    cold_s = np.median([_timed(lambda: store.get(asked())) for _ in range(3)])
    _put_out_of_memory(live)
    scan_s = _timed(lambda: [None for _ in store.scan()])
    again_s = _timed(lambda: [None for _ in store.scan()])
    warm_s = np.median([_timed(lambda: store.get(asked())) for _ in range(9)])
    never = draw.integers(0, 1 << 64, ASKED, dtype=np.uint64)
    missing_s = np.median([_timed(lambda: store.get(never)) for _ in range(9)])
    return {
        "get_cold_k_keys_s": ASKED / cold_s / 1e3,
        "get_warm_k_keys_s": ASKED / warm_s / 1e3,
        "get_missing_k_keys_s": ASKED / missing_s / 1e3,
        "scan_cold_M_rows_s": len(keys_R) / scan_s / 1e6,
        "scan_warm_M_rows_s": len(keys_R) / again_s / 1e6,
        "memory_bytes_per_row": store.memory_bytes() / len(keys_R),
    }


def rows(num_rows: int, root: Path, commits: int = 10) -> dict[str, float]:
    """Make a store of `num_rows`, commit 200,000 dirty rows some times, read."""
    draw = np.random.default_rng(1)
    keys_R = draw.integers(0, 1 << 64, num_rows, dtype=np.uint64)
    rows_UW = draw.random((min(BATCH, num_rows), WORDS), np.float32).view(np.uint32)
    store = RocksRowStore.open(root / "live", None, num_words=WORDS)
    make_s = sum(
        _timed(lambda: store.write(keys, rows_UW[: len(keys)]))  # noqa: B023
        for keys in np.array_split(keys_R, -(-num_rows // BATCH))
    )
    first_s = _timed(lambda: store.checkpoint(root / "first"))
    writes, checkpoints = [], []
    for number in range(commits):
        dirty = keys_R[draw.choice(num_rows, DIRTY, replace=False)]
        writes.append(_timed(lambda: store.write(dirty, rows_UW[:DIRTY])))  # noqa: B023
        checkpoints.append(_timed(lambda: store.checkpoint(root / f"{number}")))  # noqa: B023
    size = sum(path.stat().st_size for path in (root / "live").glob("*.sst"))
    store.close()
    opening_s = _timed(lambda: RocksRowStore.open(root / "other", root / f"{commits - 1}", num_words=WORDS).close())
    store = RocksRowStore.open(root / "again", root / f"{commits - 1}", num_words=WORDS)
    figures = {
        "make_k_rows_s": num_rows / make_s / 1e3,
        "first_checkpoint_ms": 1e3 * first_s,
        "write_200k_ms": 1e3 * float(np.median(writes)),
        "write_200k_ms_most": 1e3 * max(writes),
        "checkpoint_ms": 1e3 * float(np.median(checkpoints)),
        "checkpoint_ms_most": 1e3 * max(checkpoints),
        "commit_k_rows_s": commits * DIRTY / (sum(writes) + sum(checkpoints)) / 1e3,
        "open_ms": 1e3 * opening_s,
        "disk_bytes_per_row": size / num_rows,
    } | _reads(store, root / "again", keys_R, draw)
    store.close()
    return {name: round(float(value), 2) for name, value in figures.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["rows_1M", "rows_10M"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    given = parser.parse_args()
    for size in given.sizes:
        root = Path(tempfile.mkdtemp(prefix="rows-", dir=given.folder))
        try:
            print(size, json.dumps(rows(int(size.removeprefix("rows_").removesuffix("M")) * 1_000_000, root), indent=2))
            sys.stdout.flush()
        finally:
            shutil.rmtree(root)
