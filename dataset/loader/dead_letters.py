"""Writes dead letters, the files of rejected events, and stops the job if too many events are rejected.

A dead letter is one JSON line: partition, offset, reason, detail, bytes (base64). The letters of a pass and rank are
one file. It has a temporary name while the pass is read, is published at its close, and is replaced if the pass runs
again.
"""

import base64
import json
import re
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.dataset.samples.rejection import Rejection
from headrace.dataset.spec.config import DeadLettersSection
from headrace.dataset.stream.errors import TooManyBadEvents
from headrace.durable import REAL, check_no_link, writing

MAX_EXAMPLE = 500
"""Most characters of a rejection in an error."""


class DeadLetters:
    """Dead letters of one rank in `folder`, which is created for the first one. Any thread may call.

    Raises SymbolicLinkFound if the folder is a symbolic link, Unwritable if the disk is full. `close` deletes
    unpublished letters.
    """

    def __init__(self, folder: Path, rank: int, config: DeadLettersSection) -> None:
        self._folder, self._rank, self._config = folder, rank, config
        self._open: dict[int, tuple[FileIO, int]] = {}
        self._lock = threading.Lock()
        self._mine = secrets.token_hex(4)  # a generation that ends may read the same pass ahead

    @property
    def keeps_bytes(self) -> bool:
        """Whether letters contain their events."""
        return self._config.keep_bytes

    def path(self, pass_number: int) -> Path:
        """Path of the published letters of a pass."""
        return self._folder / f"pass-{pass_number:012d}-rank-{self._rank}.jsonl"

    def begin(self, pass_number: int) -> None:
        """Start a pass, perhaps again: delete the letters of an earlier run of it."""
        with self._lock:
            if pass_number in self._open:
                self._open.pop(pass_number)[0].close()
            check_no_link(self._folder)
            with writing(self._temporary(pass_number)):
                for path in self._folder.glob(f".{self.path(pass_number).stem}.*"):
                    path.unlink(missing_ok=True)

    def add(self, pass_number: int, rejections: Iterable[Rejection]) -> int:
        """Write letters, at most `max_per_pass` for the pass; return how many."""
        with self._lock:
            _, num_before = self._open.get(pass_number, (None, 0))
            chosen = islice(rejections, self._config.max_per_pass - num_before)
            letters = [encode_letter(rejection, keep_bytes=self._config.keep_bytes) for rejection in chosen]
            if letters:
                with writing(self._temporary(pass_number)):
                    file = self._file(pass_number)
                    REAL.append(file, b"".join(letters))
                self._open[pass_number] = file, num_before + len(letters)
        return len(letters)

    def publish(self, pass_number: int) -> Path | None:
        """Publish the letters of a closed pass, and delete old files; return the file, if there is one.

        1. The file is synced. 2. It is renamed; or, if the pass has no letters, an older file of it is removed.
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
        """Delete unpublished letters."""
        with self._lock:
            for pass_number, (file, _) in self._open.items():
                file.close()
                self._temporary(pass_number).unlink(missing_ok=True)
            self._open.clear()

    def _temporary(self, pass_number: int) -> Path:
        return self._folder / f".{self.path(pass_number).stem}.{self._mine}.writing"

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


def encode_letter(rejection: Rejection, *, keep_bytes: bool) -> bytes:
    """The JSON line of a rejection. Without `keep_bytes`, the detail is left out too, since it may quote the event."""
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


def format_example(rejected: Mapping[str, int], first_of: Mapping[str, str]) -> str:
    """The end of a sentence with a rejection for the commonest reason; empty if none is known."""
    commonest = max(sorted(rejected), key=lambda reason: rejected[reason], default="")
    text = first_of.get(commonest, "")
    return f", for example {text[:MAX_EXAMPLE]}" if text else ""


class BadFraction:
    """Stops the job if too many events are rejected. Rank 0 calls it at each close with the sums of all ranks.

    The window is the newest whole passes that together have at least `window_events` events. No error before
    `min_events`.
    """

    def __init__(self, max_fraction: float, window_events: int = 10_000, min_events: int = 1_000) -> None:
        self._max_fraction, self._window_events, self._min_events = max_fraction, window_events, min_events
        self._passes: deque[tuple[int, dict[str, int]]] = deque()
        self._first_of: dict[str, str] = {}

    def add(
        self, num_events: int, num_rejected: Mapping[str, int], first_of: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Add a pass: its number of events, and of rejected events by reason, with the text of the first of each.

        Raises TooManyBadEvents.
        """
        self._first_of |= first_of
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
                f"{commonest}{format_example(reasons, self._first_of)}; look at the dead letters, repair the stream or "
                "the pipe command, or raise the limit"
            )

    def state(self) -> list[list[Any]]:
        """The passes of the window, as JSON-able data for a commit."""
        return [[num_events, rejected] for num_events, rejected in self._passes]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore the result of `state`."""
        self._passes = deque((int(num_events), dict(rejected)) for num_events, rejected in state)

    def _num_events(self) -> int:
        return sum(num for num, _ in self._passes)
