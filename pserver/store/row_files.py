"""The files of a store at one moment: rows found by key, or all of them in order, without the interpreter's lock.

RocksDB keeps its files in levels. Level 0 has the newest, which overlap; each other level is one sorted sequence, and
older than those above it. A *run* is a file of level 0 or another level: the newest run with a key has its present
value. Merging moves rows between files and changes no value, so a moment's files stay right until the next write; they
are open, and so are readable after RocksDB has deleted them.

Shapes: U keys, F files, R runs, N entries, W words of a row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.store import block_kernels as kernels
from headrace.pserver.store.block_kernels import SOUND
from headrace.pserver.store.row_file import RowFile
from headrace.pserver.store.row_store import U32, U64

FIND_CHUNK = 64
"""Keys for which a thread waits, one after another."""
SCAN_BLOCKS = 2048
"""Blocks of rows read at a time: of 2 KiB each."""
LISTINGS = 20
"""Tries to open all files; RocksDB may delete merged ones meanwhile."""
MIN_ENTRY_BYTES = 12


class RowFiles:
    """Any thread; never changes."""

    def __init__(self, files: Mapping[str, RowFile], runs: Sequence[Sequence[str]], num_words: int) -> None:
        """`runs` name the files of each run, newest run first."""
        self.by_name, self._row_bytes = files, 4 * num_words
        self._files = [files[name] for run in runs for name in run]
        self._files_FC = np.array([file.columns_C for file in self._files], np.uint64)
        self._files_FC = self._files_FC.reshape(-1, kernels.NUM_COLUMNS)
        self._runs_R = np.cumsum([0, *(len(run) for run in runs)])
        self._max_block = max((file.max_block for file in self._files), default=0)

    @classmethod
    def of(
        cls, live: Path, listed: Callable[[], Sequence[Mapping[str, Any]]], before: "RowFiles | None", num_words: int
    ) -> "RowFiles":
        """The files that RocksDB lists now; those open `before` stay open. Raises StoreDamaged and StoreFailed."""
        for _ in range(LISTINGS):
            files, by_level = dict[str, RowFile](), dict[int, list[tuple[bytes, str]]]()
            try:
                for each in listed():
                    name, first, last = each["name"].lstrip("/"), each["start_key"], each["end_key"]
                    old = before.by_name.get(name) if before is not None else None
                    files[name] = old or RowFile(live / name, first, last)
                    by_level.setdefault(each["level"], []).append((first, name))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreFailed(f"{live}: {error}") from error
            newest = [[name] for _, name in by_level.pop(0, [])]
            deeper = [[name for _, name in sorted(by_level[level])] for level in sorted(by_level)]
            return cls(files, [*newest, *deeper], num_words)
        raise StoreDamaged(f"{live}: files that it lists do not exist")

    @property
    def num_bytes(self) -> int:
        """Memory of indexes and filters."""
        return sum(file.num_bytes for file in self._files)

    def get(self, order_U: U64, threads: Executor) -> tuple[NDArray[np.bool_], U32]:
        """Which keys, given by their order, ascending, have a row, (U,), and these rows: (found, W).

        This thread reads what the system's page cache has; `threads` wait for the disk together.
        """
        state_U = np.empty(len(order_U), np.uint8)
        rows_UB = np.empty((len(order_U), self._row_bytes), np.uint8)
        self._find(order_U, 0, len(order_U), state_U, rows_UB, wait=False)
        late_L = np.flatnonzero(state_U == kernels.LATE)
        if len(late_L):
            state_U[late_L], rows_UB[late_L] = self._awaited(order_U[late_L], threads)
        found_U = state_U == kernels.FOUND
        return found_U, rows_UB.view("<u4").astype(np.uint32, copy=False)[found_U]

    def _awaited(self, order_U: U64, threads: Executor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """States and rows of keys that need the disk."""
        state_U = np.empty(len(order_U), np.uint8)
        rows_UB = np.empty((len(order_U), self._row_bytes), np.uint8)

        def find(begin: int) -> None:
            self._find(order_U, begin, min(begin + FIND_CHUNK, len(order_U)), state_U, rows_UB, wait=True)

        deque(threads.map(find, range(0, len(order_U), FIND_CHUNK)), 0)
        return state_U, rows_UB

    def _find(
        self, order_U: U64, begin: int, end: int, state_U: NDArray[np.uint8], rows_UB: NDArray[np.uint8], *, wait: bool
    ) -> None:
        files = self._files_FC, self._runs_R, self._max_block
        how, file = kernels.find(order_U, begin, end, *files, wait, state_U, rows_UB)
        if how != SOUND:
            raise self._files[file].failure(how)

    def scan(self, begin: int, end: int) -> Iterator[tuple[U64, U32]]:
        """Order and rows of all keys from `begin` to before `end` (2^64: all), ascending, in chunks."""
        limits = [file.limits_B for file in self._files]
        limit_B = np.sort(np.concatenate([np.empty(0, np.uint64), *limits]))[SCAN_BLOCKS - 1 :: SCAN_BLOCKS]
        inside = [int(limit) for limit in np.unique(limit_B) if begin < int(limit) < end]
        for low, high in zip([begin, *inside], [*inside, end], strict=True):
            order_U, rows_UW = self._window(low, high)
            if len(order_U):
                yield order_U, rows_UW

    def _window(self, low: int, high: int) -> tuple[U64, U32]:
        parts = [self._decoded(file, low, high) for file in self._files if self._overlaps(file, low, high)]
        order_N = np.concatenate([np.empty(0, np.uint64), *(part[0] for part in parts)])
        rows_VB = np.concatenate([np.empty((0, self._row_bytes), np.uint8), *(part[2] for part in parts)])
        base_P = np.cumsum([0, *(len(part[2]) for part in parts)])
        value_N = np.concatenate(
            [
                np.empty(0, np.int64),
                *(np.where(p[1] < 0, -1, p[1] + base) for p, base in zip(parts, base_P, strict=False)),
            ]
        )
        rows_VW = rows_VB.view("<u4").astype(np.uint32, copy=False)
        if len(parts) == 1 and len(order_N) == len(rows_VW):
            return order_N, rows_VW
        sorted_N = np.argsort(order_N, kind="stable")  # of equal keys the newest run's comes first
        ordered_N = order_N[sorted_N]
        present_N = np.append(True, ordered_N[1:] != ordered_N[:-1])[: len(ordered_N)]
        chosen_U = sorted_N[present_N & (value_N[sorted_N] >= 0)]
        return order_N[chosen_U], np.take(rows_VW, value_N[chosen_U], axis=0)

    def _overlaps(self, file: RowFile, low: int, high: int) -> bool:
        return int(file.columns_C[kernels.FIRST_KEY]) < high and low <= int(file.columns_C[kernels.LAST_KEY])

    def _decoded(self, file: RowFile, low: int, high: int) -> tuple[U64, NDArray[np.int64], NDArray[np.uint8]]:
        """Order, number of the row or -1, and rows of the entries of a file in a range."""
        begin = int(np.searchsorted(file.limits_B, np.uint64(low)))
        end = int(np.searchsorted(file.limits_B, np.uint64(high - 1))) + 1
        end = min(end, len(file.limits_B))
        num_bytes = (end - begin) * self._max_block
        order_N = np.empty(num_bytes // MIN_ENTRY_BYTES, np.uint64)
        value_N = np.empty(len(order_N), np.int64)
        rows_VB = np.empty((num_bytes // (self._row_bytes + MIN_ENTRY_BYTES), self._row_bytes), np.uint8)
        bounds = np.uint64(low), np.uint64(high % (1 << 64))
        how, count, rows = kernels.decode(
            file.columns_C, begin, end, *bounds, self._max_block, order_N, value_N, rows_VB
        )
        if how != SOUND:
            raise file.failure(how)
        return order_N[:count], value_N[:count], rows_VB[:rows]
