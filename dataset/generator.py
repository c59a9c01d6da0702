"""Write a pipe command in Python: subclass DataGenerator, define one of three methods, call `run()`.

    class Clicks(DataGenerator):
        def generate_columns(self, events: Sequence[bytes]):
            clicks = [json.loads(event) for event in events]
            return {
                "event": np.arange(len(clicks)),
                "user": [click["user"] for click in clicks],
                "click": [click["clicked"] for click in clicks],
            }

    if __name__ == "__main__":
        Clicks().run()

`generate_columns` takes many events at once and is several times as fast as `generate`, which takes one; use it for
large streams. `run()` speaks the protocol of the pipe that started it; in a shell it prints MultiSlot text:
`head -5 events.jsonl | python my_generator.py --spec job.toml`. An event whose generation raises an error is rejected
with the error's text; the other events are not affected. `dataset.formats.generator_columns` and
`dataset.formats.generator_answers` implement the formats; `dataset.paddle` has Paddle's classes.
"""

import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import IO, TYPE_CHECKING, Any

from headrace.dataset.formats.generator_answers import answer_of, answer_schema, rows_of, with_errors
from headrace.dataset.formats.generator_columns import (
    RESERVED_COLUMNS,
    GeneratorSlot,
    JobSlots,
    Row,
    SampleReader,
    columns_of,
    error_line,
    lines_of,
    slots_of_job,
    without_extra,
)
from headrace.dataset.formats.generator_errors import ErrorLog

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Sample = Mapping[str, Any]
PaddleSample = Iterable[tuple[str, Sequence[Any]]]
ColumnsOf = Callable[[int, int], Mapping[str, Any]]
"""Columns of a request's events, from one index to another."""

TEXT_BATCH_EVENTS = 1024
"""Events passed to `generate_columns` at once in the text protocol."""

log = logging.getLogger(__name__)


class DataGenerator:
    """Define one of `generate_columns` (fastest), `generate` (simplest) or `generate_sample` (Paddle's).

    `job_slots` are the slots of the spec, so that one generator can serve several feature sets.
    """

    request: "pa.RecordBatch | None" = None
    """Arrow protocol: the present request, with event, key, topic, partition, offset, timestamp_ms and headers."""

    def __init__(self) -> None:
        self._slots: JobSlots | None = None
        self._batch_size = 32
        self._errors = ErrorLog()

    # -- for you to define

    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        """The samples of many events as columns of B rows, in order of events.

        "event": (B,) integers, the index in `events` that each sample is of, never falling; and for every slot
        - one value each: a NumPy array or list of B (sparse: one sign; meta; dense of size 1),
        - a fixed number each: a NumPy array (B, n) (dense: n is its size; sparse: n signs),
        - any number each (sparse): a tuple (values, lengths), B lengths that add up to the number of values,
        - or a pyarrow array of the protocol's type.
        Strings come in lists. Weights of a weighted slot are a column "<slot>.weight" with the same counts. If the
        call raises, the events are tried in smaller groups, and only those that raise alone are rejected.
        """
        raise NotImplementedError

    def generate(self, event: bytes) -> Iterable[Sample]:
        """The samples of one event: a mapping from slot to values each, a sequence or a single value.

        A sparse slot that is left out is empty; a dense slot is required; a label that is left out is absent.
        """
        raise NotImplementedError("define generate_columns, generate or generate_sample")

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[PaddleSample]]:
        """Paddle's: return a function that yields lists of (name, values) for a line with its line feed."""
        raise NotImplementedError

    def generate_batch(self, samples: list[Any]) -> Callable[[], Iterable[Any]]:
        """Paddle's: return a function that yields the samples of a group, which it may reorder or drop."""

        def local_iter() -> Iterator[Any]:
            yield from samples

        return local_iter

    # -- to ask, and to run it

    @property
    def job_slots(self) -> tuple[GeneratorSlot, ...]:
        """The slots of the spec in its order: name, kind ("sparse", "dense", "meta"), type and size of each.

        The spec is that of the job that started the generator; in a shell, that of `--spec job.toml`. With
        pipe.extra = "drop" a generator may also return other columns, which are ignored.
        """
        return self._job().slots

    def set_batch(self, batch_size: int) -> None:
        """Paddle's: set the number of samples that `generate_batch` gets at once."""
        self._batch_size = batch_size

    def run(self) -> None:
        """Read events from stdin and write samples to stdout, in the protocol that the pipe asks for.

        What your code prints meanwhile goes to stderr, so that it cannot corrupt the samples.
        """
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        if os.environ.get("HEADRACE_PROTOCOL") == "arrow":
            out = _own_stdout()
            self._run_arrow(sys.stdin.buffer, out)
        elif self._defines("generate_sample"):
            self.run_from_stdin()
            return
        else:
            out = _own_stdout()
            self._run_text(sys.stdin.buffer, out)
        out.close()

    def run_from_stdin(self) -> None:
        """Paddle's: lines from stdin, MultiSlot lines to stdout; the same as `run()` if the pipe speaks Arrow."""
        if os.environ.get("HEADRACE_PROTOCOL") == "arrow":
            self.run()
            return
        with _samples_alone() as out:
            self._write_groups(out, (line.decode(errors="surrogateescape") for line in _lines(sys.stdin.buffer)))

    def run_from_memory(self) -> None:
        """Paddle's: write the samples of `generate_sample(None)` to stdout."""
        with _samples_alone() as out:
            self._write_groups(out, [None])

    def _defines(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(DataGenerator, method)

    def _job(self) -> JobSlots:
        if self._slots is None:
            self._slots = slots_of_job(_argument("--spec"))
        if self._slots is None:
            raise SystemExit("error: no slots given; use --spec job.toml, or set HEADRACE_SPEC")
        return self._slots

    def _answer_schema(self) -> "pa.Schema":
        """The schema of answers. Ends the process for a slot with the name of another column."""
        for name in (slot.name for slot in self.job_slots if slot.name in RESERVED_COLUMNS):
            raise SystemExit(f"error: slot {name!r}: answers in columns reserve this name; rename the slot")
        return answer_schema(self.job_slots)

    def _kept_names(self) -> frozenset[str] | None:
        """Names of the slots if other columns are dropped; None if they are not, or if there is no spec."""
        job = self._slots or slots_of_job(_argument("--spec"))
        return frozenset(slot.name for slot in job.slots) if job is not None and job.drop else None

    # -- Paddle's lines

    def _gen_str(self, sample: PaddleSample) -> str:
        """A sample as a line with its line feed."""
        return lines_of(self.job_slots, [SampleReader(*self._job())(dict(sample))])[0] + "\n"

    def _write_groups(self, out: IO[str], lines: Iterable[str | None]) -> None:
        group: list[Any] = []
        for line in lines:
            for sample in self._paddle_samples(out, line):
                group.append(sample)
                if len(group) == self._batch_size:
                    self._write_group(out, group)
                    group = []
        self._write_group(out, group)

    def _paddle_samples(self, out: IO[str], line: str | None) -> list[PaddleSample]:
        """The samples of a line; if it raises, none, and the line of its error is written."""
        errors: dict[int, str] = {}
        with self._errors.rejecting(errors, 0):
            if line is not None:
                line.encode(
                    errors="surrogateescape"
                ).decode()  # raises for a byte that is not UTF-8, which came as a surrogate
            return [sample for sample in self.generate_sample(line)() if sample is not None]
        out.write(error_line(errors[0]) + "\n")
        return []

    def _write_group(self, out: IO[str], group: list[Any]) -> None:
        if group:
            for number, sample in enumerate(self.generate_batch(group)()):
                out.write(self._written(number, sample))

    def _written(self, number: int, sample: PaddleSample) -> str:
        """A sample as a line; the line of its error if text cannot carry it. `number`: its place in its group."""
        errors: dict[int, str] = {}
        with self._errors.rejecting(errors, number):
            line = self._gen_str(sample)
            line.encode()  # raises for half a surrogate pair
            return line
        return error_line(errors[number]) + "\n"

    # -- MultiSlot text

    def _run_text(self, lines: IO[bytes], out: IO[bytes]) -> None:
        self._job()
        in_columns = self._defines("generate_columns")
        rest = _lines(lines)
        while events := [line.rstrip(b"\n") for line in islice(rest, TEXT_BATCH_EVENTS)]:
            errors: dict[int, str] = {}
            of, rows = self._gather_columns(events, errors) if in_columns else self._gather(events, errors)
            out.write("".join(self._texts(len(events), of, rows, errors)).encode())

    def _gather_columns(self, events: Sequence[bytes], errors: dict[int, str]) -> tuple[list[int], list[Row]]:
        """Like `_gather`, with `generate_columns`."""
        of, rows = list[int](), list[Row]()
        for event, error, row in rows_of(self.job_slots, self._answer(events, self._answer_schema())):
            if error is None:
                of.append(event)
                rows.append(row)
            else:
                errors[event] = error
        return of, rows

    def _texts(self, num_events: int, of: list[int], rows: list[Row], errors: dict[int, str]) -> list[str]:
        """For each event its lines, or the line of its error. `of`: the event of each row."""
        try:
            lines = lines_of(self.job_slots, rows)
        except Exception:  # noqa: BLE001  # text cannot carry a value: try each event alone to find it
            for event, group in groupby(zip(of, rows, strict=True), key=itemgetter(0)):
                with self._errors.rejecting(errors, event):
                    lines_of(self.job_slots, [row for _, row in group])
            kept = [n for n, event in enumerate(of) if event not in errors]
            of = [of[n] for n in kept]
            lines = lines_of(self.job_slots, [rows[n] for n in kept])
        texts = [f"{error_line(errors[event])}\n" if event in errors else "" for event in range(num_events)]
        for event, line in zip(of, lines, strict=True):
            texts[event] += f"{line}\n"
        return texts

    # -- Arrow

    def _run_arrow(self, requests: IO[bytes], out: IO[bytes]) -> None:
        """Answer one IPC stream after the other, each by a stream."""
        import pyarrow as pa

        if self._defines("generate_batch"):
            raise SystemExit('error: generate_batch works only with protocol = "multislot"')
        schema = self._answer_schema()
        stream = _Unclosed(requests)
        while stream.peek():
            with pa.ipc.open_stream(pa.PythonFile(stream, mode="r")) as reader:
                with pa.ipc.new_stream(pa.PythonFile(_Unclosed(out), mode="w"), schema) as writer:
                    for request in reader:
                        self.request = request
                        writer.write_batch(self._answer(request.column("event").to_pylist(), schema))
                        out.flush()
            out.flush()

    def _answer(self, events: Sequence[bytes], schema: "pa.Schema") -> "pa.RecordBatch":
        """The answer to a request: its samples, and the errors of its events."""
        errors: dict[int, str] = {}
        if self._defines("generate_columns"):
            columns: ColumnsOf = partial(self._called, self.request, events)
        else:
            columns = partial(self._between, *self._gather(events, errors))
        answers = self._answers(columns, 0, len(events), schema, errors)
        return answers[0] if len(answers) == 1 and not errors else with_errors(answers, errors, schema)

    def _answers(
        self, columns: ColumnsOf, begin: int, end: int, schema: "pa.Schema", errors: dict[int, str]
    ) -> list["pa.RecordBatch"]:
        """Answers to the events from `begin` to `end`; if that fails, to each half of them, down to one event."""
        alone = end - begin == 1
        with self._errors.rejecting(errors, begin) if alone else suppress(Exception):
            return [answer_of(self.job_slots, columns(begin, end), schema)]
        if alone:
            return []
        middle = (begin + end) // 2
        halves = (begin, middle), (middle, end)
        return [answer for half in halves for answer in self._answers(columns, *half, schema, errors)]

    def _called(
        self, request: "pa.RecordBatch | None", events: Sequence[bytes], begin: int, end: int
    ) -> Mapping[str, Any]:
        """Columns of the events from `begin` to `end`, from `generate_columns`."""
        self.request = None if request is None else request.slice(begin, end - begin)
        columns = dict(self.generate_columns(events[begin:end]))
        columns["event"] = [index + begin for index in columns["event"]] if begin else columns["event"]
        slots, drop = self._job()
        return without_extra(columns, slots) if drop else columns

    def _between(self, of: list[int], rows: list[Row], begin: int, end: int) -> Mapping[str, Any]:
        """Columns of the rows that belong to events from `begin` to `end`."""
        first, last = bisect_left(of, begin), bisect_left(of, end)
        return columns_of(self.job_slots, rows[first:last], of[first:last])

    def _gather(self, events: Sequence[bytes], errors: dict[int, str]) -> tuple[list[int], list[Row]]:
        """The event of each row, and the rows, generated event by event. Errors go to `errors` by event."""
        read, generate = SampleReader(*self._job()), self._generate()
        of, rows = list[int](), list[Row]()
        for index, event in enumerate(events):
            try:
                found = list(map(read, generate(event)))
            except Exception as error:  # noqa: BLE001  # a user's generator may raise anything
                self._errors.reject(errors, index, error)
            else:
                rows += found
                of += [index] * len(found)
        return of, rows

    def _generate(self) -> Callable[[bytes], Iterable[Sample]]:
        """`generate`, or `generate_sample` in its form."""
        return self._paddle_generate if self._defines("generate_sample") else self.generate

    def _paddle_generate(self, event: bytes) -> Iterable[Sample]:
        return (dict(sample) for sample in self.generate_sample(event.decode() + "\n")() if sample is not None)


class _Unclosed:
    """A file that pyarrow cannot close, because the next stream uses it too."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, num_bytes: int = -1) -> bytes:
        return self._file.read(num_bytes)

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def peek(self) -> bytes:
        """Some bytes, without consuming them; b"" at the end."""
        return self._file.peek(1)  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None:
        pass


def signs(values: Iterable[int]) -> "NDArray[np.uint64]":
    """Signs (feature ids) as an array. Raises ValueError for values that are not whole numbers from 0 to 2^64 - 1."""
    import numpy as np

    listed = list(values)
    if strange := [kind for kind in set(map(type, listed)) if not issubclass(kind, int | np.integer)]:
        value = next(value for value in listed if type(value) in strange)
        hint = '; return text as it is, and set values = "string" in its slot' if isinstance(value, str) else ""
        raise ValueError(f"{value!r} is not a sign: signs are whole numbers from 0 to 2^64 - 1{hint}")
    try:
        return np.array(listed, np.uint64)
    except OverflowError as error:
        raise ValueError(f"not all are signs: {error}") from None


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of stdin; in a shell, without the byte order mark of a file. In a pipe, the job has dropped it."""
    lines = iter(file)
    if "HEADRACE_PROTOCOL" not in os.environ and (first := next(lines, None)) is not None:
        yield first.removeprefix(b"\xef\xbb\xbf")
    yield from lines


def _own_stdout() -> IO[bytes]:
    """Stdout for the samples only; from now on, everything else printed goes to stderr."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    return own


@contextmanager
def _samples_alone() -> Iterator[IO[str]]:
    """Stdout for the samples only: what is printed inside goes to stderr, also by C code and child processes."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8", newline="") as own:
        os.dup2(2, 1)
        try:
            yield own
        finally:
            try:
                sys.stdout.flush()
            finally:
                os.dup2(own.fileno(), 1)


def _argument(name: str) -> str | None:
    """The value of option `name` on the command line. Other arguments belong to the generator."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            if index + 1 == len(words):
                raise SystemExit(f"error: {name} needs a value")
            return words[index + 1]
    return None
