"""Damaged input of every format: it is rejected event by event, or refused as bad input; nothing else is ever raised.

Valid input is mutated: bytes are flipped, cut out, doubled, and tokens put in that parsers trip over.
HEADRACE_FUZZ_EXAMPLES=5000 tries so many, other ones at every run.
"""

import base64
import gzip
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.dataset.features.feature_plan import FeaturePlan
from headrace.dataset.features.format_kinds import AvroFormat, ProtobufFormat, SchemaFormat
from headrace.dataset.features.json_decoder import JsonDecoder
from headrace.dataset.features.registry_events import RegistryDecoder
from headrace.dataset.features.schema_registry import RegisteredSchema, UnknownSchema
from headrace.dataset.formats.arrow_columns import AnswerReader
from headrace.dataset.formats.multislot_parser import MultiSlotParser
from headrace.dataset.pipe import arrow_runner
from headrace.dataset.pipe.arrow_runner import ArrowRunner
from headrace.dataset.pipe.process import PipeProcessFailed
from headrace.dataset.pipe.segment_work import reject_early
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.samples.trim import trim
from headrace.dataset.sources.event_time import event_times
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import ColumnsPipe, DenseSlot, EventTime, MetaSlot, Opening, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Events, Segment
from headrace.deadline import Deadline
from headrace.errors import BadInput
from tests.unit import test_event_formats as formats

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ASKED = int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", 0))
"""Examples of each test, other ones at every run; 0: those of the profile."""
fuzzed = settings(
    max_examples=ASKED or 5 * settings().max_examples,
    derandomize=settings().derandomize and not ASKED,
    suppress_health_check=list(HealthCheck),
)

TOKENS = (
    [
        b"\xff",
        b"\xed\xa0\xbd",
        b"\xef\xbb\xbf",
        b"\0",
        b"\n",
        b"\r\n",
        b"\\ud83d",
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"\\",
    ]
    + [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-0",
        b"9" * 25,
        b"9" * 5000,
        b"[" * 120,
        b"null",
        b"true",
        b"0.5",
        b'"a"',
        b"!",
    ]
    + [
        b"\x80" * 10,
        b"\xff" * 9 + b"\x01",
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        struct.pack("<q", -1),
        b"\x02" * 8,
    ]
)
"""What parsers trip over: broken text, numbers beyond every type, lengths that lie."""


@st.composite
def damages(draw, count=3):
    """A function that damages bytes at up to `count` places."""
    edits = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "cut", "double", "put", "end"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(1, 24),
                st.sampled_from(TOKENS),
            ),
            min_size=1,
            max_size=count,
        )
    )

    def damage(data: bytes) -> bytes:
        for kind, part, size, token in edits:
            at = int(part * max(1, len(data)))
            match kind:
                case "flip":
                    data = data[:at] + bytes(each ^ (1 << size % 8) for each in data[at : at + 1]) + data[at + 1 :]
                case "cut":
                    data = data[:at] + data[at + size :]
                case "double":
                    data = data[:at] + data[at : at + size] + data[at:]
                case "put":
                    data = data[:at] + token + data[at + (size % 4) * len(token) :]
                case _:
                    data = data[:at]
        return data

    return damage


SCHEMA = Schema.of(
    [
        SparseSlot(name="id"),
        SparseSlot(name="title", values="string"),
        SparseSlot(name="tags", values="string", max_len=2),
        SparseSlot(name="colour", values="string"),
        SparseSlot.model_validate({"name": "user", "from": "user.id"}),
        DenseSlot(name="price", kind="dense"),
        MetaSlot(name="sale", kind="meta"),
        MetaSlot.model_validate({"name": "at", "kind": "meta", "type": "int64", "from": "id"}),
        MetaSlot.model_validate({"name": "name", "kind": "meta", "type": "string", "from": "title"}),
    ]
)
GOOD = {
    "id": 5,
    "price": 0.25,
    "title": "Füße",
    "sale": True,
    "colour": "RED",
    "tags": ["a", "b", "c"],
    "user": {"id": 7},
    "items": [{"id": 1, "price": 2.0}],
    "counts": {"a": 3},
}


class Texts:
    """A registry with one schema of each format; ids 1 and 2."""

    def schema(self, number: int) -> RegisteredSchema:
        if number == 1:
            return RegisteredSchema("AVRO", json.dumps(formats.AVRO))
        if number == 2:
            return RegisteredSchema("PROTOBUF", base64.b64encode(formats.FILE.SerializeToString()).decode())
        raise UnknownSchema(f"no schema {number}")

    def name(self, number: int) -> str:
        return f"schema {number}"


def registry(kind: SchemaFormat) -> Callable[..., RegistryDecoder]:
    return lambda fields: RegistryDecoder(Texts(), fields, kind, patience_s=0.0)


def as_json(event):
    return json.dumps(event, ensure_ascii=False).encode()


DECODERS = {
    "json": (JsonDecoder, as_json),
    "avro": (formats.avro_decoder, formats.as_avro),
    "protobuf": (formats.protobuf_decoder, formats.as_protobuf),
    "registry of avro": (registry(AvroFormat()), lambda event: b"\0\0\0\0\x01" + formats.as_avro(event)),
    "registry of protobuf": (registry(ProtobufFormat()), lambda event: b"\0\0\0\0\x02\0" + formats.as_protobuf(event)),
}


@pytest.mark.parametrize("name", DECODERS)
@fuzzed
@given(damage=damages(), other=formats.events)
def test_a_damaged_event_is_read_or_rejected_alone(name, damage, other):
    make, encode = DECODERS[name]
    pipe = ColumnsPipe(kind="columns")
    fields = FeaturePlan(pipe, SCHEMA).fields
    plan = FeaturePlan(pipe, SCHEMA, decoder=make(fields))
    good = encode(GOOD)
    events = [
        good,
        damage(good),
        damage(encode({**other, "title": other["title"] or "", "price": other["price"] or 0.0})),
        good,
    ]
    answer = plan.apply(pa.array(events, pa.binary()))
    answer.validate(full=True)
    samples, bad = AnswerReader(SCHEMA, {}, Reason.of_field).read(answer, np.arange(4), np.full(4, np.nan))
    counters = SlotCounters(SCHEMA)
    counters.observe(trim(samples, SCHEMA, counters))
    assert {each.event for each in bad} <= {1, 2}
    assert {0, 3} <= set(samples.event_B.tolist())
    for number, event in enumerate(events):
        alone = plan.apply(pa.array([event], pa.binary())).to_pylist()[0]
        assert repr({**alone, "event": number}) == repr(answer.slice(number, 1).to_pylist()[0])


@fuzzed
@given(damage=damages(4))
def test_the_time_of_a_damaged_event_is_read_or_absent(damage):
    good = as_json(GOOD)
    lines = [*damage(b"\n".join([good, b"null"])).split(b"\n"), good]
    assert timed([good]) == [0.005]
    for events in (lines, lines[::-1], [*lines, b"\xff"]):
        assert repr(timed(events)) == repr([timed([line])[0] for line in events])


def timed(events: list[bytes]) -> list[float]:
    """The times of some events."""
    return event_times(EventTime(field="id", unit="ms"), Events.of(events, range(len(events)))).tolist()


LINES = [b"1 7 1 a 2 a b 1 RED 1 9 1 0.5 1 1 1 5 1 hello", b"0 0 0 0 0 1 -1e3 1 0 1 -7 1 x"]


@fuzzed
@given(damage=damages(6))
def test_damaged_text_is_parsed_or_rejected_line_by_line(damage):
    parser, counters = MultiSlotParser(SCHEMA, {}), SlotCounters(SCHEMA)
    text = LINES[0] + b"\n" + damage(b"\n".join(LINES * 2)) + b"\n" + LINES[1] + b"\n"
    samples, bad = parser.parse(text)
    assert len(samples) + len(bad) == text.count(b"\n")
    assert samples.event_B[0] == 0 and samples.event_B[-1] == text.count(b"\n") - 1
    counters.observe(trim(samples, SCHEMA, counters))


class Child:
    """A pipe command that has answered."""

    waited_s = 0.0

    def __init__(self, answer: bytes) -> None:
        self._parts = [answer[at : at + 97] for at in range(0, len(answer), 97)]

    def send(self, chunks, *, max_output_bytes, close):
        assert not close

    def read(self) -> bytes:
        return self._parts.pop(0) if self._parts else b""

    def finish(self) -> None: ...

    def ends_within(self, seconds: float) -> bool:
        return True

    def failure(self, what: str) -> PipeProcessFailed:
        return PipeProcessFailed(what, 0, "")


ANSWER_SCHEMA = Schema.of(
    [
        SparseSlot(name="s", weighted=True),
        SparseSlot(name="word", values="string"),
        DenseSlot(name="d", kind="dense", size=2),
        MetaSlot(name="click", kind="meta"),
        MetaSlot(name="title", kind="meta", type="string"),
    ]
)


def answer_stream() -> bytes:
    lists = pa.array([[1, 2], [], None], pa.list_(pa.uint64()))
    answer = pa.RecordBatch.from_arrays(
        [
            pa.array([0, 1, 2], pa.int32()),
            pa.array([None, None, "an error"], pa.utf8()),
            lists,
            pa.array([[0.5, 1.0], [], None], pa.list_(pa.float32())),
            pa.array([["a"], ["b", "c"], None], pa.list_(pa.utf8())),
            pa.array([[1, 2], [3, 4], None], pa.list_(pa.float32(), 2)),
            pa.array([1.0, 0.0, None], pa.float32()),
            pa.array(["x", "y", None], pa.utf8()),
        ],
        names=["event", "error", "s", "s.weight", "word", "d", "click", "title"],
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, answer.schema) as writer:
        writer.write_batch(answer)
    return sink.getvalue().to_pybytes()


STREAM = answer_stream()
WORK = reject_early(Segment("t/0", 0, 0, 3), [Events.of([b"a", b"b", b"c"], range(3))], 9, lines=False)


def answered(stream: bytes) -> list[Samples]:
    runner = ArrowRunner(None, 1.0, ANSWER_SCHEMA, EventTime(kind="none"), {"click": ""}, 1024)  # type: ignore[arg-type]
    runner._child = Child(stream)  # type: ignore[assignment]
    return runner.run(WORK).blocks


def test_the_answer_that_is_damaged_below_is_good():
    assert arrow_runner.CONTINUATION == STREAM[:4]
    assert [samples.event_B.tolist() for samples in answered(STREAM)] == [[0, 1]]


@fuzzed
@given(damage=damages())
def test_a_damaged_answer_of_a_generator_is_read_or_fails_its_try(damage):
    try:
        answered(damage(STREAM))
    except (PipeProcessFailed, BadInput):
        pass


PLACES = ("id", "text", "at", "day", "tags.list.element", "user.id", "user.x", "bytes")


def parquet() -> bytes:
    table = pa.table(
        {
            "id": list(range(40)),
            "text": [None, "a", 'b"', "é"] * 10,
            "at": pa.array(range(40), pa.timestamp("us")),
            "day": pa.array(range(40), pa.date32()),
            "tags": pa.array([["a"], [], None, ["b", "c"]] * 10, pa.list_(pa.string())),
            "user": pa.array([{"id": 1, "x": 0.5}, None] * 20),
            "bytes": pa.array([b"a", None] * 20, pa.binary()),
        }
    )
    out = io.BytesIO()
    codecs = {"text": "zstd", "tags.list.element": "snappy"}
    pq.write_table(table, out, row_group_size=16, compression={name: codecs.get(name, "none") for name in PLACES})
    return out.getvalue()


PARQUET = parquet()


def read_files(folder: Path, **keys) -> None:
    """All events of a source of files, and a second read from the middle."""
    config = FilesSource.model_validate({"kind": "files", "paths": ("x.*",), **keys})
    source = open_source(config, Opening(folder=folder, job="j", seed=1, deadline=Deadline.after(60)))
    try:
        for partition in source.partitions(Deadline.after(60)):
            for begin in (0, partition.end // 2):
                segment = Segment(partition.name, 0, begin, partition.end, partition.identity)
                blocks = list(source.read(segment, Deadline.after(60)))
                reject_early(segment, blocks, 100, lines=True)
    finally:
        source.close()


@fuzzed
@given(damage=damages(), timestamps=st.sampled_from(["ms", "iso"]))
def test_a_damaged_parquet_file_is_read_or_refused_by_its_name(tmp_path_factory, damage, timestamps):
    folder = tmp_path_factory.mktemp("parquet")
    (folder / "x.parquet").write_bytes(damage(PARQUET))
    try:
        read_files(folder, format="parquet", timestamps=timestamps)
    except BadInput as error:
        assert "x.parquet" in str(error)


@fuzzed
@given(damage=damages(), packed=st.booleans())
def test_a_damaged_file_of_lines_is_read_or_refused_by_its_name(tmp_path_factory, damage, packed):
    folder = tmp_path_factory.mktemp("lines")
    text = b"\n".join([as_json(GOOD)] * 9)
    (folder / "x.gz").write_bytes(damage(gzip.compress(text, mtime=0) if packed else text))
    try:
        read_files(folder)
    except BadInput as error:
        assert "x.gz" in str(error)
