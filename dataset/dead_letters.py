"""What is kept of rejected events, and when so many are rejected that the job must stop.

A dead letter is one JSON line: partition, offset, reason, detail, bytes (base64). Letters of a pass and rank are one
file: written under a temporary name while the pass is read, published at its close, replaced when
the pass is run again.
"""

import base64
import json
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from dataset.config import DeadLettersSection
from dataset.errors import TooManyBadEvents
from dataset.rejection import Rejection
from millrace.durable import REAL, check_no_link, writing


class DeadLetters:
    """Dead letters of one rank in `folder`, which is made when there is a first one. Any thread may call.

    Raises Linked where the folder is a symbolic link, Unwritable where there is no room; what is not published is no
    letter, and goes at `close`.
    """

    def __init__(self, folder: Path, rank: int, config: DeadLettersSection) -> None:
        self._folder, self._rank, self._config = folder, rank, config
        self._open: dict[int, tuple[FileIO, int]] = {}
        self._lock = threading.Lock()

    def path(self, pass_number: int) -> Path:
        """Where the letters of a pass lie once published."""
        return self._folder / f"pass-{pass_number:012d}-rank-{self._rank}.jsonl"

    def begin(self, pass_number: int) -> None:
        """A pass is read from its begin (again): forget what an earlier reading wrote."""
        with self._lock:
            if pass_number in self._open:
                self._open.pop(pass_number)[0].close()
            check_no_link(self._folder)
            with writing(self._temporary(pass_number)):
                self._temporary(pass_number).unlink(missing_ok=True)

    def add(self, pass_number: int, rejections: Iterable[Rejection]) -> int:
        """Write letters; how many: none beyond `max_per_pass`."""
        with self._lock:
            _, num_before = self._open.get(pass_number, (None, 0))
            chosen = islice(rejections, self._config.max_per_pass - num_before)
            letters = [letter(rejection, keep_bytes=self._config.keep_bytes) for rejection in chosen]
            if letters:
                with writing(self._temporary(pass_number)):
                    file = self._file(pass_number)
                    REAL.append(file, b"".join(letters))
                self._open[pass_number] = file, num_before + len(letters)
        return len(letters)

    def publish(self, pass_number: int) -> Path | None:
        """Make the letters of a closed pass visible, and delete old files; the file, if there is one.

        1. The file is synced. 2. It is renamed, or an older one of a pass that now has none is removed.
        3. The folder is synced. 4. Files beyond `keep_passes` are deleted.
        """
        with self._lock:
            file, _ = self._open.pop(pass_number, (None, 0))
        target = self.path(pass_number)
        with writing(target):
            if file is None:
                target.unlink(missing_ok=True)
                return None
            with file:
                REAL.sync(file)  # 1
            REAL.rename(self._temporary(pass_number), target)  # 2
            REAL.sync_folder(self._folder)  # 3
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

    def _file(self, pass_number: int) -> FileIO:
        if pass_number not in self._open:
            check_no_link(self._folder).mkdir(parents=True, exist_ok=True)
            self._open[pass_number] = REAL.create(self._temporary(pass_number)), 0
        return self._open[pass_number][0]

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
