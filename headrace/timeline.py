"""The timeline of a process: when each thread began and ended each piece of its work, for a number of steps.

`span` measures a piece. A process that records no timeline measures nothing. Times decide nothing, and no digest holds
them. service.cluster.trace_file puts the parts of all processes together.

All processes of a machine read one monotonic clock, so their times compare exactly. Each part also has the wall time,
by which parts of several machines are aligned as well as their clocks agree.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

from pydantic import Field

from headrace import documents
from headrace.config import Section, parse_value, validate
from headrace.durable import REAL, write_whole
from headrace.errors import SpecError

MAX_STEPS = 10_000
"""Most steps of a timeline."""
MAX_SPANS = 1 << 17
"""Most spans that a process keeps; older ones are dropped, and the trace says how many."""
FORMAT = 1
"""Number of the layout of a part."""
LOOK_S = 0.5
"""Time between two looks for a request."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names the machine and its start: processes with the same one read the same clock."""

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Span(StrEnum):
    """A piece of work of a thread."""

    STEP = "step"
    """Trainer: a whole step; the others of its thread lie in it."""
    READING = "reading"
    """Trainer: events from the source."""
    PIPE = "pipe"
    """Trainer: a segment of events through the pipe command, and parsing its output."""
    LOOKUP = "lookup"
    """Unique keys of a batch, its announcement to shards; on a shard: finding its rows."""
    PULL = "pull"
    """Rows of a batch: on a shard reading them, on a trainer putting those of all shards together."""
    FORWARD = "forward"
    """Predictions, and their metrics."""
    BACKWARD = "backward"
    """Gradients, and the update of the dense part."""
    REDUCE = "reduce"
    """Sums of the dense gradients over trainers."""
    PUSH = "push"
    """Gradients of rows: on a trainer sending them, on a shard merging and applying them."""
    WAIT = "wait"
    """Nothing to do: other processes or threads are not ready yet."""
    CLOSE = "close"
    """The close of a pass."""
    COMMIT = "commit"
    """A commit: its snapshot and its files."""


class TraceWindow(Section):
    """The steps that a timeline holds."""

    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    """How many."""
    after: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """How many come before them, counted from the start of the process."""


def parse_window(text: str) -> TraceWindow:
    """The steps that "steps=200" or "steps=200,after=1000" names. Raises SpecError."""
    pairs = [part.partition("=") for part in text.split(",")]
    given = {name.strip(): parse_value(value.strip()) for name, _, value in pairs}
    if not all(value for *_, value in pairs) or len(given) < len(pairs):
        raise SpecError(f"--trace {text!r} is not of the form steps=200 or steps=200,after=1000")
    try:
        return validate(TraceWindow, given)
    except SpecError as error:
        raise SpecError(f"--trace {text}: {error}") from None


class TracePart(Section):
    """Where and what a process records."""

    window: TraceWindow | None = None
    """Its steps; None: those that a request asks for."""
    file: Path
    """The file of this process; its folder is made if absent."""
    request: Path | None = None
    """Where a request for a timeline appears while the process runs."""


class TimelineRecorder:
    """The spans of one process. Any thread adds some; one thread counts the steps."""

    def __init__(self, window: TraceWindow, file: Path) -> None:
        self._file, self._num_steps = file, 0
        self._first, self._end = window.after, window.after + window.steps
        self._spans: deque[tuple[Span, int, int, int, int]] = deque(maxlen=MAX_SPANS)
        self._num_spans = 0
        self._threads: dict[int, str] = {}
        self._writer: threading.Thread | None = None
        self.on = self._first == 0
        """Whether the window is open."""

    def add(self, kind: Span, begin_ns: int, end_ns: int) -> None:
        """Add a span of the calling thread that began in the window."""
        if self._writer is not None:
            return
        thread = threading.get_ident()
        if thread not in self._threads:
            named = threading.current_thread()
            self._threads[thread] = "main" if named is threading.main_thread() else named.name
        self._num_spans += 1
        self._spans.append((kind, thread, begin_ns, end_ns, self._num_steps))

    def stepped(self) -> None:
        """A step has ended. The part is written by a thread of its own when the window ends."""
        self._num_steps += 1
        self.on = self._first <= self._num_steps < self._end
        if self._num_steps == self._end:
            self._writer = threading.Thread(target=self._write, name="timeline", daemon=True)
            self._writer.start()

    @property
    def is_complete(self) -> bool:
        """Whether its window has ended."""
        return self._writer is not None

    def close(self) -> None:
        """Write the part unless that was done."""
        self.on = False
        if self._writer is None:
            self._write()
        else:
            self._writer.join()

    def _write(self) -> None:
        """Write the part, whole or not at all: a process that is killed leaves none."""
        spans = list(self._spans)
        names, threads = list(Span), sorted(self._threads)
        of_name, of_thread = ({each: n for n, each in enumerate(found)} for found in (names, threads))
        content = {
            "format": FORMAT,
            "clock": _clock(),
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "dropped": self._num_spans - len(spans),
            "names": names,
            "threads": [self._threads[thread] for thread in threads],
            "spans": [[of_name[kind], of_thread[thread], *times] for kind, thread, *times in spans],
        }
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(REAL, self._file, json.dumps(content, separators=(",", ":")).encode())
        except OSError as error:
            log.warning("the timeline of this process cannot be written: %s", error)


class TraceRequests:
    """The requests for a timeline of a process that runs. One thread, that which counts the steps."""

    def __init__(self, request: Path, file: Path) -> None:
        self._request, self._file = request, file
        self._seen, self._look_s = self._stamp(), 0.0

    def found(self) -> TimelineRecorder | None:
        """The recorder for a request that is new; looked for at most every LOOK_S."""
        if (now_s := time.monotonic()) < self._look_s:
            return None
        self._look_s, stamp = now_s + LOOK_S, self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            window = validate(TraceWindow, documents.read_object(self._request))
        except (OSError, ValueError, SpecError) as error:
            log.warning("the request for a timeline cannot be read: %s", error)
            return None
        return TimelineRecorder(window, self._file)

    def _stamp(self) -> int:
        try:
            return self._request.stat().st_mtime_ns
        except OSError:  # there is none, or its disk does not answer now
            return 0


class _Timed:
    """A context whose time becomes a span."""

    __slots__ = ("_begin_ns", "_recorder", "_span")

    def __init__(self, recorder: TimelineRecorder, kind: Span) -> None:
        self._recorder, self._span = recorder, kind

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._span, self._begin_ns, time.monotonic_ns())


_NOTHING = nullcontext()
_recorder: TimelineRecorder | None = None
_requests: TraceRequests | None = None


def span(kind: Span) -> AbstractContextManager[None]:
    """A context that is recorded as a piece of the calling thread's work, if this process records now."""
    recorder = _recorder
    return _Timed(recorder, kind) if recorder is not None and recorder.on else _NOTHING


def recorded(kind: Span) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: every call of a function is recorded as a piece of work."""

    def decorated(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def timed(*arguments: P.args, **named: P.kwargs) -> T:
            with span(kind):
                return call(*arguments, **named)

        return timed

    return decorated


def stepped() -> None:
    """Count a step of this process."""
    global _recorder
    recorder = _recorder
    if _requests is not None and (recorder is None or recorder.is_complete):
        _recorder = recorder = _requests.found() or recorder
    if recorder is not None:
        recorder.stepped()


@contextmanager
def recording(part: TracePart | None) -> Iterator[None]:
    """A context in which this process records its timeline, at once or where it is asked to; with None it does not."""
    global _recorder, _requests
    if part is None:
        yield
        return
    _recorder = None if part.window is None else TimelineRecorder(part.window, part.file)
    _requests = None if part.request is None else TraceRequests(part.request, part.file)
    try:
        yield
    finally:
        recorder, _recorder, _requests = _recorder, None, None
        if recorder is not None:
            recorder.close()


def _clock() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
