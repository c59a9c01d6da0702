"""Features without a program: columns against a plain reading of each event, row by row."""

import json
import math
import re
import tomllib
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from headrace.config import validate
from headrace.dataset.features.conversion import BadValue, parse_whole, plain_value
from headrace.dataset.features.feature_kernels import crossed_reference, hashed_reference
from headrace.dataset.features.feature_plan import FeaturePlan
from headrace.dataset.features.json_decoder import JsonDecoder
from headrace.dataset.features.plain_rows import decoded_of, field_of
from headrace.dataset.features.served_events import describe_features
from headrace.dataset.features.slot_rules import check_slot_features, fields_of, source_of
from headrace.dataset.formats.arrow_columns import AnswerReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.spec.config import AnySlot, ColumnsPipe, PipeSection
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.stream.event_values import bytes_of, find_single_objects, is_single_object
from headrace.errors import SpecError
from headrace.keys import sign_of_text
from headrace.service.spec.references import check_references
from headrace.service.tables.row import sign_of
from headrace.trainer.config import TrainerJob

SLOTS: list[dict[str, Any]] = [
    {"name": "item", "from": "shown.id"},
    {"name": "tags", "values": "string", "from": "user.tags", "default": "none"},
    {"name": "words", "values": "string", "split": ","},
    {"name": "numbers", "split": ";"},
    {"name": "age", "from": "user.age", "buckets": [18, 30.5, 60], "default": 9},
    {"name": "hour", "from": "ts", "time": "week_hour"},
    {"name": "month", "from": "when", "time": "month", "unit": "iso"},
    {"name": "many", "from": "user.ids", "hash": 1000},
    {"name": "pair", "cross": ["item", "hour"]},
    {"name": "wide", "cross": ["tags", "many", "words"], "hash": 50},
    {"name": "raw", "cross": ["item", "zone"], "values": "string"},
    {"name": "price", "kind": "dense", "from": "shown.price", "log": True, "scale": 0.5, "default": -1},
    {"name": "place", "kind": "dense", "size": 2, "from": "place"},
    {"name": "length", "kind": "dense", "from": "shown", "count": True, "scale": 0.1},
    {"name": "click", "kind": "meta", "from": "shown.id", "in": "clicked"},
    {"name": "session", "kind": "meta", "type": "string", "default": ""},
    {"name": "at", "kind": "meta", "type": "int64", "from": "ts", "time": "day"},
    {"name": "impression", "kind": "meta", "type": "uint64"},
]


def plan_of(slots: list[dict[str, Any]], explode: str | None = None) -> tuple[FeaturePlan, Schema, ColumnsPipe]:
    entries = TypeAdapter(tuple[AnySlot, ...]).validate_python(slots)
    pipe, schema = ColumnsPipe(kind="columns", explode=explode), Schema.of(entries)
    check_slot_features(pipe, entries)
    return FeaturePlan(pipe, schema), schema, pipe


def samples_of(plan: FeaturePlan, schema: Schema, events: list[bytes]) -> tuple[Samples, set[int]]:
    """The samples of events, and the rejected events."""
    answer = plan.apply(pa.array(events, pa.binary()))
    answer.validate(full=True)
    count = len(events)
    reader = AnswerReader(schema, {}, Reason.of_field)
    samples, bad = reader.read(answer, np.arange(count), np.zeros(count))
    return samples, {row.event for row in bad}


def rows_of(samples: Samples, schema: Schema) -> list[dict[str, Any]]:
    """Each sample with the bits of its values."""
    rows = []
    for b in range(len(samples)):
        row: dict[str, Any] = {"event": int(samples.event_B[b])}
        for slot in schema.sparse:
            column = samples.sparse[slot.name]
            row[slot.name] = column.values_N[column.offset_B1[b] : column.offset_B1[b + 1]].tolist()
        row |= {slot.name: samples.dense[slot.name][b].tolist() for slot in schema.dense}
        row |= {slot.name: samples.meta[slot.name][b] for slot in schema.meta}
        rows.append(row)
    return rows


class Rejected(Exception):
    """The plain reading rejects an event."""


class PlainReading:
    """The rules, one event at a time: what docs/features.md says, as a program."""

    def __init__(self, schema: Schema, pipe: ColumnsPipe) -> None:
        self.schema, self.explode = schema, pipe.explode
        self.fields = {field.path: field for field in fields_of(pipe, schema)}

    def samples(self, event: bytes) -> list[dict[str, Any]]:
        try:
            found = json.loads(event)
            if not isinstance(found, dict):
                raise Rejected
            self.values = {path: field_of(found, field, field.names) for path, field in self.fields.items()}
        except (ValueError, RecursionError):
            raise Rejected from None
        if self.explode is None:
            return [self.sample(None)]
        root = next(path for path in self.fields if self.below(path))
        if self.values[root] is None:
            raise Rejected
        return [self.sample(n) for n in range(len(listed(self.values[root])))]

    def below(self, path: str) -> bool:
        return self.explode is not None and (path == self.explode or path.startswith(f"{self.explode}."))

    def get(self, path: str, element: int | None) -> list[Any]:
        values = listed(self.values[path])
        values = [values[element]] if self.below(path) and element is not None else values
        return [value for value in values if value is not None]

    def sample(self, element: int | None) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for slot in sorted(self.schema.slots, key=lambda slot: bool(slot.entry.cross)):
            row[slot.name] = self.cross(slot, row, element) if slot.entry.cross else self.slot(slot, element)
        return row

    def slot(self, slot: Slot, element: int | None) -> Any:
        entry, path = slot.entry, source_of(slot, self.explode)
        if entry.members is not None:
            (value,) = self.get(path, element) or [None]
            if value is None:
                raise Rejected
            return np.float32(value in self.get(entry.members, None))
        if entry.count:
            whole = self.values[path]
            values = [] if whole is None else [whole if isinstance(whole, int) else len(listed(whole))]
        else:
            values = self.get(path, element)
        if entry.time is not None:
            values = [time_part(value, entry.time, entry.unit) for value in values]
        if entry.split is not None:
            texts = [piece for value in values for piece in value.split(entry.split) if piece]
            kind = FieldKind.TEXT if getattr(entry, "values", "") == "string" else FieldKind.WHOLE
            values = [plain(text, EventField(path, kind)) for text in texts]
        if entry.buckets:
            values = [sum(edge <= value for edge in entry.buckets) for value in values if finite(value)]
        if entry.log:
            if any(value <= -1 for value in values):
                raise Rejected
            values = [math.log1p(value) for value in values]
        if entry.scale is not None:
            values = [value * entry.scale for value in values]
        return self.shaped(slot, values or ([] if entry.default is None else [entry.default]))

    def shaped(self, slot: Slot, values: list[Any]) -> Any:
        if slot.kind == "sparse":
            signs = [sign_of_text(value.encode()) if isinstance(value, str) else int(value) for value in values]
            if any(sign < 0 for sign in signs):
                raise Rejected
            return signs if slot.entry.hash is None else [hashed_reference(sign, slot.entry.hash) for sign in signs]
        if slot.kind == "dense":
            with np.errstate(over="ignore"):
                row = np.array(values, np.float32)
            if len(row) != slot.shape[3] or not np.isfinite(row).all():
                raise Rejected
            return row.tolist()
        if len(values) != 1:
            raise Rejected
        return values[0]

    def cross(self, slot: Slot, row: dict[str, Any], element: int | None) -> list[int]:
        crossed: list[list[int]] = [[]]
        for part in slot.entry.cross:
            if part in row:
                signs = row[part]
            else:
                values = self.get(part, element)
                signs = [sign_of_text(value.encode()) if isinstance(value, str) else value for value in values]
            crossed = [[*each, sign] for each in crossed for sign in signs]
        if len(crossed) > 1024:
            raise Rejected
        signs = [crossed_reference(parts) for parts in crossed]
        return signs if slot.entry.hash is None else [hashed_reference(sign, slot.entry.hash) for sign in signs]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def plain(value: Any, field: EventField) -> Any:
    try:
        return plain_value(value, field)
    except BadValue:
        raise Rejected from None


def finite(value: float) -> bool:
    if not math.isfinite(value):
        raise Rejected
    return True


def time_part(value: Any, part: str, unit: str | None) -> int:
    try:
        if unit == "iso":
            when = datetime.fromisoformat(value)
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
        else:
            when = datetime.fromtimestamp(math.floor(value), UTC)
    except (ValueError, OverflowError, OSError):
        raise Rejected from None
    days = (when - datetime(1970, 1, 1, tzinfo=UTC)).days
    return {"week_hour": 24 * when.weekday() + when.hour, "month": when.month, "day": days}[part]


WHOLE = st.integers(0, 5) | st.sampled_from([-1, 2**53 + 1, 2**63, 2**64 - 1, 2**64])
SCALAR = WHOLE | st.sampled_from([True, None, 1.5, 2.0, -0.0, -1.0, 1e30, "7", "a", "+5", "", "ü", "1,2,,3", "x;y"])


def mostly(usual: Any, unusual: Any = SCALAR) -> Any:
    """One value in some ten is of another kind."""
    return st.integers(0, 9).flatmap(lambda n: unusual if n == 0 else usual)


ELEMENT = mostly(
    st.fixed_dictionaries({"id": st.integers(0, 3)}, optional={"price": mostly(st.floats(-0.5, 9)), "x": SCALAR})
)
EVENT = st.fixed_dictionaries(
    {
        "shown": mostly(st.lists(ELEMENT, max_size=3)),
        "clicked": mostly(st.lists(st.integers(0, 3), max_size=2)),
        "place": mostly(st.lists(st.floats(-2, 2), min_size=2, max_size=2)),
        "impression": mostly(st.integers(0, 9)),
        "ts": mostly(st.integers(0, 2_000_000_000) | st.sampled_from([-62135596800, 253402300799, 0.5])),
        "when": mostly(st.sampled_from(["2026-05-01T12:30:00+02:00", "2026-12-31", "2000-02-29T23:59:59Z"])),
    },
    optional={
        "user": mostly(
            st.fixed_dictionaries(
                {},
                optional={
                    "tags": mostly(st.lists(st.sampled_from(["a", "b"]), max_size=2)),
                    "age": mostly(st.floats(0, 90) | st.integers(0, 90)),
                    "ids": mostly(st.lists(st.integers(0, 9), max_size=2)),
                },
            )
        ),
        "words": mostly(st.sampled_from(["a,b", ",", "", "c"])),
        "numbers": mostly(st.sampled_from(["1;2", "", "3"])),
        "zone": mostly(st.sampled_from(["n", "s"])),
        "session": mostly(st.just("s")),
    },
)
TEXT = EVENT.map(lambda event: json.dumps(event).encode()) | EVENT.map(
    lambda event: json.dumps(event, ensure_ascii=False).encode() + b"\r"
)
BROKEN = st.sampled_from(
    [b"", b"{}", b"[]", b"5", b'{"ts":', b"\xff", b'{"a":1}{"b":2}', b'{"ts":1}\n', b'{"words":"\xff"}', b'{"ts":NaN}']
)
PLAN, SCHEMA, PIPE = plan_of(SLOTS, "shown")
WHOLE_EVENT = {
    **{"shown": [{"id": 3}], "clicked": [3], "place": [0, 1], "impression": 1, "ts": 1_700_000_000, "zone": "n"},
    **{"when": "2026-05-01", "words": "b", "user": {"tags": ["a"], "ids": [5]}},
}


@given(st.lists(mostly(TEXT, BROKEN), max_size=5))
@settings(max_examples=150, deadline=None)
@example([b'{"ts":1,"words":"\\ud800"}', b'{"a":NaN}'])
def test_columns_are_the_plain_reading_of_each_event(events: list[bytes]) -> None:
    reading = PlainReading(SCHEMA, PIPE)
    wanted: list[dict[str, Any]] = []
    rejected = set()
    for number, event in enumerate(events):
        try:
            wanted += [{"event": number, **row} for row in reading.samples(event)]
        except Rejected:
            rejected.add(number)
    samples, bad = samples_of(PLAN, SCHEMA, events)
    assert bad == rejected
    assert rows_of(samples, SCHEMA) == wanted


@given(st.lists(mostly(TEXT, BROKEN), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_the_answer_of_an_event_does_not_depend_on_its_neighbours(events: list[bytes]) -> None:
    together = PLAN.apply(pa.array(events, pa.binary())).to_pylist()
    fresh = [plan_of(SLOTS, "shown")[0].apply(pa.array([event], pa.binary())).to_pylist() for event in events]
    assert together == [row | {"event": number} for number, rows in enumerate(fresh) for row in rows]


FIELDS = [
    EventField("a.b", FieldKind.WHOLE),
    EventField("a", FieldKind.LENGTH),
    EventField("c", FieldKind.NUMBER),
    EventField("d", FieldKind.TEXT),
    EventField("e", FieldKind.WHOLE, signed=True),
]
NODE = st.dictionaries(st.sampled_from("bx"), SCALAR, max_size=2)
ANY = st.dictionaries(
    st.sampled_from("acdef"), SCALAR | NODE | st.lists(SCALAR | NODE | st.lists(SCALAR, max_size=1), max_size=2)
)


@given(st.lists(ANY, max_size=4))
@settings(max_examples=150, deadline=None)
def test_the_json_decoder_reads_what_python_reads(events: list[dict[str, Any]]) -> None:
    decoded = JsonDecoder(FIELDS).decode(pa.array([json.dumps(event).encode() for event in events], pa.binary()))
    plainly = decoded_of(events, FIELDS)
    assert decoded.errors == plainly.errors
    bad = {event for event, _ in decoded.errors}
    for path in decoded.fields.schema.names:
        pairs = zip(decoded.fields.column(path).to_pylist(), plainly.fields.column(path).to_pylist(), strict=True)
        for number, (found, wanted) in enumerate(pairs):
            assert number in bad or listed(found) == listed(wanted)


@given(st.lists(st.text(st.sampled_from("+-0123456789x "), max_size=22) | WHOLE.map(str)), st.booleans())
def test_whole_numbers_in_text(texts: list[str], signed: bool) -> None:
    field = EventField("f", FieldKind.WHOLE, signed)
    data = np.frombuffer("".join(texts).encode() or b" ", np.uint8)
    end_N = np.cumsum([len(text) for text in texts], dtype=np.int64)
    begin_N = end_N - np.array([len(text) for text in texts], np.int64)
    out_N, wrong_N = np.empty(len(texts), np.uint64), np.empty(len(texts), np.bool_)
    parse_whole(data, begin_N, end_N, signed, out_N, wrong_N)
    for n, text in enumerate(texts):
        try:
            wanted = plain_value(text, field)
        except BadValue:
            assert wrong_N[n]
        else:
            assert not wrong_N[n] and (out_N.view(np.int64) if signed else out_N)[n] == wanted


OBJECT_PARTS = [*'{}[]":\\a \n\rN.-0', '{"a":', "-0", "-0.", "-0e", "7" * 640, "7" * 641]


@given(st.lists(st.lists(st.sampled_from(OBJECT_PARTS), max_size=12).map(lambda parts: "".join(parts).encode())))
@example([b'{"a":-0}', b'{"a":-0.0}', b'{"a":-0E1}', b'{"a":%s}' % (b"7" * 641), b'{"a":%s}' % (b"7" * 640), b"0{}"])
def test_single_objects(events: list[bytes]) -> None:
    offset_E1 = np.cumsum([0, *(len(event) for event in events)], dtype=np.int64)
    fit_E = np.empty(len(events), np.bool_)
    data = bytes_of(b"".join(events) or b" ")
    find_single_objects(data, offset_E1[:-1], offset_E1[1:], 2, fit_E)
    assert fit_E.tolist() == [is_single_object(event, 2) for event in events]


@pytest.mark.parametrize("number", ["-0", "-0.0", "9" * 640, "9" * 5000, "0." + "9" * 5000, "1e999", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["c", "unused"])
def test_a_number_is_read_alike_whatever_the_events_beside_it_are(name: str, number: str) -> None:
    event, good, odd = f'{{"{name}": {number}}}'.encode(), b'{"c": 1.5}', b'{"c": NaN}'
    read = []
    for events in ([good, event, good], [odd, event, odd]):
        found = JsonDecoder(FIELDS).decode(pa.array(events, pa.binary()))
        value = found.fields.column("c")[1].as_py()
        read.append((value, value is not None and math.copysign(1, value), dict(found.errors).get(1)))
    assert read[0] == read[1]


def test_crosses_and_hashes_have_golden_vectors() -> None:
    assert crossed_reference([1, 2]) == 13608149317741381227
    assert crossed_reference([2, 1]) == 16171810823986729605
    assert crossed_reference([0, 2**64 - 1, 7]) == 1751764483104203175
    assert hashed_reference(42, 1000) == 962


@pytest.mark.parametrize(
    ("slots", "explode", "message"),
    [
        ([{"name": "a", "log": True}], None, "slots.0.log: does not fit a sparse slot; it fits dense slots"),
        ([{"name": "a", "cross": ["b", "c"], "default": 1}], None, "slots.0.default: does not go with cross"),
        ([{"name": "a", "cross": ["b"]}], None, "slots.0.cross: needs at least two"),
        ([{"name": "a", "time": "hour", "count": True}], None, "slots.0.count: does not go with time"),
        ([{"names": ["a", "b"], "from": "c"}], None, "slots.0.from: is of one slot"),
        ([{"name": "a", "unit": "ms"}], None, "slots.0.unit: is the unit of a time"),
        ([{"name": "a", "values": "string", "buckets": [1]}], None, "slots.0.buckets: gives a number"),
        ([{"name": "a", "buckets": [2, 1]}], None, "slots.0.buckets: is not a rising list"),
        ([{"name": "a", "default": -1}], None, "slots.0.default: is not a whole number from 0"),
        ([{"name": "a", "values": "string", "default": 1}], None, "slots.0.default: is not text"),
        ([{"name": "a", "weighted": True}], None, "slots.0.weighted: is not built"),
        ([{"name": "a", "from": "b..c"}], None, "slots.0.from: 'b..c' is not a field"),
        ([{"name": "a", "kind": "meta", "in": "b"}], None, "slots.0.in: needs from, or pipe.explode"),
        ([{"name": "a", "kind": "meta", "in": "s.b"}], "s", "slots.0.in: 's.b' is below pipe.explode"),
        ([{"name": "a", "kind": "meta", "type": "uint64", "scale": 2.0}], None, "slots.0.scale: does not fit a meta"),
        (
            [{"name": "a"}, {"name": "b", "values": "string", "from": "a"}],
            None,
            "field 'a' is text for 'b' and a whole",
        ),
        ([{"name": "d", "kind": "dense"}, {"name": "a", "cross": ["d", "e"]}], None, "cross of 'd', which is no plain"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    slots: list[dict[str, Any]], explode: str | None, message: str
) -> None:
    with pytest.raises(SpecError) as raised:
        plan_of(slots, explode)
    assert message in str(raised.value)


def test_a_cross_whose_last_part_is_empty_takes_no_room() -> None:
    """Of 20,000 ids with 20,000 others and none, 3.2 GB would be crossed in between."""
    slots = TypeAdapter(list[AnySlot]).validate_python([{"name": "a"}, {"name": "b"}, {"name": "c"}])
    cross = TypeAdapter(AnySlot).validate_python({"name": "abc", "cross": ["a", "b", "c"]})
    plan = FeaturePlan(ColumnsPipe(kind="columns"), Schema.of([*slots, cross]))
    numbers = list(range(20_000))
    event = json.dumps({"a": numbers, "b": numbers, "c": []}).encode()
    pool = pa.default_memory_pool()
    tracemalloc.start()
    answer = plan.apply(pa.array([event, b'{"a": 1, "b": [2, 3], "c": 4}'], pa.binary()))
    peak_bytes = tracemalloc.get_traced_memory()[1] + pool.bytes_allocated()
    tracemalloc.stop()
    assert list(map(len, answer.column("abc").to_pylist())) == [0, 2] and peak_bytes < 64 << 20


@pytest.mark.parametrize(
    ("slot", "value", "reason"),
    [
        ({"name": "x"}, list(range(8_000)), "more than 1,048,576 values in the samples"),
        ({"name": "x", "kind": "meta", "type": "string"}, "x" * 500_000, "more than 2,000,000 bytes in the samples"),
    ],
)
def test_values_that_would_be_repeated_too_often_reject_their_event(slot: Any, value: Any, reason: str) -> None:
    slots = TypeAdapter(list[AnySlot]).validate_python([{"name": "id", "from": "items.id"}, slot])
    plan = FeaturePlan(ColumnsPipe(kind="columns", explode="items"), Schema.of(slots))
    events = [{"items": [{"id": n} for n in range(num)], "x": value} for num in (8_000, 2)]
    answer = plan.apply(pa.array([json.dumps(event).encode() for event in events], pa.binary()))
    assert answer.column("event").to_pylist() == [0, 1, 1]
    assert reason in answer.column("error")[0].as_py() and answer.nbytes < 8 << 20


def test_a_person_names_the_ids_of_crosses_and_hashes_by_their_values() -> None:
    spec = SimpleNamespace(slots=TypeAdapter(tuple[AnySlot, ...]).validate_python(SLOTS))
    samples, _ = samples_of(PLAN, SCHEMA, [json.dumps(WHOLE_EVENT).encode()])
    (row,) = rows_of(samples, SCHEMA)
    assert [sign_of(spec, "pair", f"3,{row['hour'][0]}")] == row["pair"]
    assert [sign_of(spec, "wide", "a,5,b")] == row["wide"]
    assert [sign_of(spec, "raw", "3,n")] == row["raw"]
    assert [sign_of(spec, "many", "5")] == row["many"]
    assert sign_of(spec, "pair", "12") == 12
    with pytest.raises(SpecError, match="has 3 values; 'pair' crosses item, hour"):
        sign_of(spec, "pair", "1,2,3")


def test_the_job_fills_histories_and_events_do_not() -> None:
    history = {"name": "seen", "pooling": "none", "history": {"key": "user", "of": "item", "last": 3}}
    slots: list[dict[str, Any]] = [{"name": "user"}, {"name": "item"}, history]
    entries = TypeAdapter(tuple[AnySlot, ...]).validate_python(slots)
    pipe, schema = ColumnsPipe(kind="columns"), Schema.of(entries)
    check_slot_features(pipe, entries)
    assert [field.path for field in FeaturePlan(pipe, schema.emitted).fields] == ["user", "item"]
    document = describe_features(pipe, schema)
    assert document is not None and [slot["name"] for slot in document["slots"]] == ["user", "item"]
    for wrong, message in (
        ([*slots[:2], history | {"from": "x"}], "slots.2.from: does not go with history"),
        ([*slots, {"name": "c", "cross": ["item", "seen"]}], "slots.3.cross: of 'seen', a history"),
    ):
        with pytest.raises(SpecError, match=message):
            check_slot_features(pipe, TypeAdapter(tuple[AnySlot, ...]).validate_python(wrong))


def test_the_example_of_the_documentation_does_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    event, job = (re.findall(rf"```{kind}\n(.*?)```", text, re.S)[0] for kind in ("json", "toml"))
    stream = validate(TrainerJob, tomllib.loads(job))
    check_references(stream)
    schema = Schema.of(stream.slots)
    assert isinstance(stream.pipe, ColumnsPipe)
    samples, bad = samples_of(FeaturePlan(stream.pipe, schema), schema, [event.replace("\n", "").encode()])
    first, second = rows_of(samples, schema)
    assert not bad and (first["click"], second["click"]) == (0, 1)
    assert (first["item"], second["item"], first["age"], first["hour"]) == ([11], [12], [2], [22])
    assert first["item_hour"] == [crossed_reference([11, 22])] and first["user"] == [sign_of_text(b"u-17")]
    assert first["price"] == [np.float32(math.log1p(3.5))] and second["price"] == [0]
    assert first["length"] == [np.float32(0.2)] and len(first["tags"]) == 2


def test_a_pipe_command_has_no_features() -> None:
    entries = TypeAdapter(tuple[AnySlot, ...]).validate_python([{"name": "a", "from": "b"}])
    with pytest.raises(SpecError, match=r'slots.0.from: needs pipe.kind = "columns"'):
        check_slot_features(PipeSection(command=("cat",)), entries)


def test_slots_without_features_are_written_as_before() -> None:
    (entry,) = TypeAdapter(tuple[AnySlot, ...]).validate_python([{"name": "a", "kind": "dense"}])
    assert entry.model_dump(mode="json") == {"name": "a", "names": [], "kind": "dense", "size": 1}


@pytest.mark.parametrize("default", [0, 0.0, False, "", 2.5])
def test_slots_with_features_are_read_again_as_they_are_written(default: Any) -> None:
    slots = TypeAdapter(tuple[AnySlot, ...])
    written = {"name": "a", "from": "b.c", "kind": "meta", "default": default, "in": "d", "scale": 0.0}
    (entry,) = slots.validate_python([written])
    dumped = entry.model_dump(mode="json")
    assert entry.feature_keys == ("from", "in", "scale", "default")
    assert {name: value for name, value in dumped.items() if name in entry.feature_keys} == {
        name: written[name] for name in entry.feature_keys
    }
    assert slots.validate_json(json.dumps([dumped]), strict=True) == (entry,)


@pytest.mark.parametrize("every", [2, 16, 100, 4096])
@pytest.mark.parametrize("other", [b'{"n": "7", "user": "a"}', b'{"n": 7,, "user": "a"}', b'{"n": 7.5, "user": "a"}'])
def test_readings_are_few_where_events_of_another_form_are_frequent(monkeypatch, every, other):
    fields = [EventField("user", FieldKind.TEXT), EventField("n", FieldKind.WHOLE)]
    events = [b'{"n": 5, "user": "b"}' if number % every else other for number in range(4096)]
    read_json, read = pa.json.read_json, list[int]()
    monkeypatch.setattr(pa.json, "read_json", lambda *args, **more: read.append(1) or read_json(*args, **more))
    decoded = JsonDecoder(fields).decode(pa.array(events, pa.binary()))
    good = other.startswith(b'{"n": "7"')
    assert len(decoded.errors) == (0 if good else -(-4096 // every))
    numbers = decoded.fields.column(1).to_pylist()
    assert numbers == [5 if number % every else (7 if good else None) for number in range(4096)]
    assert len(read) < 4 * 4096 // 100 + 40


def test_text_that_is_no_number_is_told_how_to_be_text():
    user, count = EventField("user", FieldKind.WHOLE), EventField("count", FieldKind.WHOLE, signed=True)
    with pytest.raises(BadValue, match=r"'u7' is not a whole number from 0 .*; for text, set values = \"string\""):
        plain_value("u7", user)
    for value, field in ((-7, user), ("u7", count)):
        with pytest.raises(BadValue, match="63 - 1$|64 - 1$"):
            plain_value(value, field)
