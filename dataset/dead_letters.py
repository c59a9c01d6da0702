"""What is kept of rejected events, and when so many are rejected that the job must stop.

A dead letter is one JSON line: partition, offset, reason, detail, bytes (base64). Letters of a pass and rank are one
file: written under a temporary name while the pass is read, published at its close, replaced when
the pass is run again.
"""

import base64
import json
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dataset.config import DeadLettersSection
from dataset.errors import TooManyBadEvents
from dataset.rejection import Rejection


class DeadLetters:
    """Dead letters of one rank in `folder`, which is made when there is a first one. Any thread may call."""

    def __init__(self, folder: Path, rank: int, config: DeadLettersSection) -> None:
        self._folder, self._rank, self._config = folder, rank, config
        self._open: dict[int, tuple[IO[bytes], int]] = {}
        self._lock = threading.Lock()

    def path(self, pass_number: int) -> Path:
        """Where the letters of a pass lie once published."""
        return self._folder / f"pass-{pass_number:012d}-rank-{self._rank}.jsonl"

    def begin(self, pass_number: int) -> None:
        """A pass is read from its begin (again): forget what an earlier reading wrote."""
        with self._lock:
            if pass_number in self._open:
                self._open.pop(pass_number)[0].close()
            self._temporary(pass_number).unlink(missing_ok=True)

    def add(self, pass_number: int, rejections: Iterable[Rejection]) -> int:
        """Write letters; how many: none beyond `max_per_pass`."""
        num_written = 0
        with self._lock:
            for rejection in rejections:
                file, num_before = self._file(pass_number)
                if num_before >= self._config.max_per_pass:
                    break
                file.write(letter(rejection, keep_bytes=self._config.keep_bytes))
                self._open[pass_number] = file, num_before + 1
                num_written += 1
        return num_written

    def publish(self, pass_number: int) -> Path | None:
        """Make the letters of a closed pass visible, and delete old files; the file, if there is one.

        1. The file is synced. 2. It is renamed, or an older one of a pass that now has none is removed.
        3. The folder is synced. 4. Files beyond `keep_passes` are deleted.
        """
        with self._lock:
            file, _ = self._open.pop(pass_number, (None, 0))
        target = self.path(pass_number)
        if file is None:
            target.unlink(missing_ok=True)
            return None
        with file:  # 1
            file.flush()
            os.fsync(file.fileno())
        self._temporary(pass_number).rename(target)  # 2
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)  # 3
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._retire()  # 4
        return target

    def close(self) -> None:
        """Drop what was not published."""
        with self._lock:
            for pass_number, (file, _) in self._open.items():
                file.close()
                self._temporary(pass_number).unlink(missing_ok=True)
            self._open.clear()

    def _temporary(self, pass_number: int) -> Path:
        return self._folder / f".pass-{pass_number:012d}-rank-{self._rank}.writing"

    def _file(self, pass_number: int) -> tuple[IO[bytes], int]:
        if pass_number not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[pass_number] = self._temporary(pass_number).open("wb"), 0
        return self._open[pass_number]

    def _retire(self) -> None:
        mine = re.compile(rf"pass-\d{{12}}-rank-{self._rank}\.jsonl")
        files = sorted(path for path in self._folder.iterdir() if mine.fullmatch(path.name))
        for path in files[: -self._config.keep_passes]:
            path.unlink(missing_ok=True)


def letter(rejection: Rejection, *, keep_bytes: bool) -> bytes:
    """The JSON line of a rejection. With `keep_bytes` off, the detail, which may quote the event, is left out too."""
    fields: dict[str, object] = {
        "partition": rejection.partition,
        "offset": rejection.offset,
        "reason": rejection.reason.value,
    }
    if rejection.line is not None:
        fields["line"] = rejection.line
    if keep_bytes:
        fields["detail"] = rejection.detail
        fields["bytes"] = None if rejection.data is None else base64.b64encode(rejection.data).decode()
    return json.dumps(fields).encode() + b"\n"


class BadFraction:
    """Stops the job when too much of the stream is rejected: called by the chief at each close, with all ranks' sums.

    Looks at the latest passes that together hold at least `window_events` events (whole passes; the oldest are
    forgotten once the others suffice), and says nothing before it has seen `min_events`.
    """

    def __init__(self, max_fraction: float, window_events: int = 10_000, min_events: int = 1_000) -> None:
        self._max_fraction, self._window_events, self._min_events = max_fraction, window_events, min_events
        self._passes: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, num_events: int, num_rejected: Mapping[str, int]) -> None:
        """Count a pass: its events and, by reason, those rejected. Raises TooManyBadEvents."""
        self._passes.append((num_events, dict(num_rejected)))
        while self._num_events() - self._passes[0][0] >= self._window_events:
            self._passes.popleft()
        total = self._num_events()
        reasons: Counter[str] = Counter()
        for _, rejected in self._passes:
            reasons.update(rejected)
        bad = reasons.total()
        if total >= self._min_events and bad > self._max_fraction * total:
            commonest = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
            raise TooManyBadEvents(
                f"{bad} of the last {total} events were rejected, above pipe.max_bad_fraction = {self._max_fraction}: "
                f"{commonest}; look at the dead letters, mend the stream or the pipe command, or raise the limit"
            )

    def state(self) -> list[list[Any]]:
        """What a commit holds of it: the passes looked at, as JSON-able data."""
        return [[num_events, rejected] for num_events, rejected in self._passes]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """The inverse of `state`."""
        self._passes = deque((int(num_events), dict(rejected)) for num_events, rejected in state)

    def _num_events(self) -> int:
        return sum(num for num, _ in self._passes)
