"""Write a pipe command in Python: subclass DataGenerator, define one of three methods, call `run()`.

    class Clicks(DataGenerator):
        def generate(self, event: bytes):
            click = json.loads(event)
            yield {"user": [click["user"]], "click": [click["clicked"]]}

    if __name__ == "__main__":
        Clicks().run()

`run()` speaks the protocol of the pipe that started it; in a shell it prints MultiSlot text:
`head -5 events.jsonl | python my_generator.py --spec job.toml`. An event whose generation raises an error is rejected
with the error's text; the others go on. `dataset.answers` does the formats. `dataset.paddle` has Paddle's classes.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from dataset.answers import (
    ColumnsOfSamples,
    SlotShape,
    answer_of,
    answer_schema,
    error_line,
    error_text,
    line_of,
    samples_of,
    slots_of_job,
    with_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa

Sample = Mapping[str, Any]
PaddleSample = Iterable[tuple[str, Sequence[Any]]]

TEXT_BATCH_EVENTS = 1024
"""Events that `generate_columns` gets at once in the text protocol."""

log = logging.getLogger(__name__)


class DataGenerator:
    """Define one of `generate_columns` (fastest), `generate` (simplest) or `generate_sample` (Paddle's)."""

    request: "pa.RecordBatch | None" = None
    """Arrow protocol: the request at hand; also with key, topic, partition, offset, timestamp_ms and headers."""

    def __init__(self) -> None:
        self._slots: tuple[SlotShape, ...] | None = None
        self._batch_size = 32

    # -- for you to define

    def generate(self, event: bytes) -> Iterable[Sample]:
        """The samples of one event: for each its values by slot, a sequence or a lone value.

        A sparse slot that is left out is empty; a dense slot must be there; a label that is left out is absent.
        """
        raise NotImplementedError("define generate, generate_columns or generate_sample")

    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        """The samples of many events as columns of B rows, in order of events.

        "event": (B,) integers, the index in `events` that each sample is of, never falling; and for every slot
        - one value each: a NumPy array or list of B (sparse: one sign; meta; dense of size 1),
        - a fixed number each: a NumPy array (B, n) (dense: n is its size; sparse: n signs),
        - any number each (sparse): a tuple (values, lengths), B lengths that add up to the number of values,
        - or a pyarrow array of the protocol's type.
        Strings come in lists. Weights of a weighted slot are a column "<slot>.weight" of the same counts. Where the
        call raises, each event is tried alone, and only those that raise again are rejected.
        """
        raise NotImplementedError

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[PaddleSample]]:
        """Paddle's: a function that yields lists of (name, values) for a line, which ends with its line feed."""
        raise NotImplementedError

    def generate_batch(self, samples: list[Any]) -> Callable[[], Iterable[Any]]:
        """Paddle's: a function that yields the samples of a group of `set_batch`, reordered or fewer."""

        def local_iter() -> Iterator[Any]:
            yield from samples

        return local_iter

    # -- to run it

    def set_batch(self, batch_size: int) -> None:
        """Paddle's: how many samples `generate_batch` gets at once."""
        self._batch_size = batch_size

    def run(self) -> None:
        """Read events from stdin, write samples to stdout, in the protocol we are started in.

        What the process prints by other means goes to stderr, so that it cannot spoil the samples.
        """
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        self._slots = slots_of_job(_argument("--spec"))
        if os.environ.get("MILLRACE_PROTOCOL") == "arrow":
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
        """Paddle's: lines from stdin, MultiSlot lines to stdout; `run()` where a pipe speaks Arrow."""
        if os.environ.get("MILLRACE_PROTOCOL") == "arrow":
            self.run()
            return
        self._write_groups(line.decode(errors="surrogateescape") for line in sys.stdin.buffer)

    def run_from_memory(self) -> None:
        """Paddle's: the samples of `generate_sample(None)` to stdout."""
        self._write_groups([None])

    def _defines(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(DataGenerator, method)

    def _known_slots(self) -> tuple[SlotShape, ...]:
        if self._slots is None:
            raise SystemExit("error: which slots? Say --spec job.toml, or set MILLRACE_SPEC")
        return self._slots

    # -- Paddle's lines

    def _gen_str(self, sample: PaddleSample) -> str:
        """A sample as a line, with its line feed."""
        return line_of(self._known_slots(), dict(sample)) + "\n"

    def _write_groups(self, lines: Iterable[str | None]) -> None:
        group: list[Any] = []
        for line in lines:
            for sample in self._paddle_samples(line):
                group.append(sample)
                if len(group) == self._batch_size:
                    self._write_group(group)
                    group = []
        self._write_group(group)
        sys.stdout.flush()

    def _paddle_samples(self, line: str | None) -> list[PaddleSample]:
        try:
            if line is not None:
                line.encode()  # an undecodable byte was kept as a surrogate
            return [sample for sample in self.generate_sample(line)() if sample is not None]
        except UnicodeEncodeError as error:
            raw = line.encode(errors="surrogateescape") if line is not None else b""
            sys.stdout.write(error_line(f"not UTF-8: byte {error.start + 1} of {raw[:40]!r}") + "\n")
        except Exception as error:
            log.exception("an event is rejected")
            sys.stdout.write(error_line(error_text(error)) + "\n")
        return []

    def _write_group(self, group: list[Any]) -> None:
        if group:
            for sample in self.generate_batch(group)():
                sys.stdout.write(self._gen_str(sample))

    # -- MultiSlot text

    def _run_text(self, lines: IO[bytes], out: IO[bytes]) -> None:
        slots = self._known_slots()
        if self._defines("generate_columns"):
            schema = answer_schema(slots)
            while events := [line.rstrip(b"\n") for line in islice(lines, TEXT_BATCH_EVENTS)]:
                for _, error, sample in samples_of(slots, self._answer(events, schema)):
                    line = line_of(slots, sample) if error is None else error_line(error)
                    out.write(line.encode() + b"\n")
            return
        for event in lines:
            out.write(self._text_of_event(event.rstrip(b"\n"), slots).encode())

    def _text_of_event(self, event: bytes, slots: Sequence[SlotShape]) -> str:
        """Lines of an event: all its samples, or its error."""
        try:
            return "".join([line_of(slots, sample) + "\n" for sample in self.generate(event)])
        except Exception as error:
            log.exception("an event is rejected")
            return error_line(error_text(error)) + "\n"

    # -- Arrow

    def _run_arrow(self, requests: IO[bytes], out: IO[bytes]) -> None:
        """One IPC stream after the other, each answered by one."""
        import pyarrow as pa

        if self._defines("generate_batch"):
            raise SystemExit('error: generate_batch works with protocol = "multislot" only')
        schema = answer_schema(self._known_slots())
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
        """The answer to a request: samples, and errors of events."""
        errors: dict[int, str] = {}
        answers = list(self._answers(events, 0, schema, errors))
        return answers[0] if len(answers) == 1 and not errors else with_errors(answers, errors, schema)

    def _answers(
        self, events: Sequence[bytes], first: int, schema: "pa.Schema", errors: dict[int, str]
    ) -> Iterator["pa.RecordBatch"]:
        """Answers to `events`, whose indexes begin at `first`; where that fails, to its halves, down to one event."""
        whole = self.request
        try:
            columns = dict(self._columns(events, first, errors))
            answer = answer_of(self._known_slots(), columns, schema)
        except Exception as error:
            if len(events) == 1:
                log.exception("event %d of a request is rejected", first)
                errors[first] = error_text(error)
                return
            log.debug("a request is tried in halves", exc_info=True)
        else:
            yield answer
            return
        middle = len(events) // 2
        for begin, end in ((0, middle), (middle, len(events))):
            self.request = None if whole is None else whole.slice(begin, end - begin)
            yield from self._answers(events[begin:end], first + begin, schema, errors)
        self.request = whole

    def _columns(self, events: Sequence[bytes], first: int, errors: dict[int, str]) -> Mapping[str, Any]:
        """Columns of some events; with `generate`, events that raise are put into `errors` at once."""
        if self._defines("generate_columns"):
            columns = dict(self.generate_columns(events))
            columns["event"] = [index + first for index in columns["event"]] if first else columns["event"]
            return columns
        collected = ColumnsOfSamples(self._known_slots())
        for index, event in enumerate(events, first):
            try:
                collected.add(index, self._samples(event))
            except Exception as error:
                log.exception("event %d of a request is rejected", index)
                errors[index] = error_text(error)
        return collected.columns()

    def _samples(self, event: bytes) -> Iterable[Sample]:
        if not self._defines("generate_sample"):
            return self.generate(event)
        return (dict(sample) for sample in self.generate_sample(event.decode() + "\n")() if sample is not None)


class _Unclosed:
    """A file that pyarrow may close without effect: the next stream comes through it too."""

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
        """Some bytes without taking them; b"" at the end."""
        return self._file.peek(1)  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None:
        pass


def _own_stdout() -> IO[bytes]:
    """Stdout for samples alone: what else is printed goes to stderr from here on."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    return own


def _argument(name: str) -> str | None:
    """The value behind `name` on the command line; other arguments are the generator's own."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            if index + 1 == len(words):
                raise SystemExit(f"error: {name} needs a value")
            return words[index + 1]
    return None
