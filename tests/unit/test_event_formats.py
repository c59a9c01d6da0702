"""Events of Avro and Protobuf: the same fields as of JSON, to the bit; bad events and bad schemas."""

import io
import json

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.features.avro_events import AvroEvents
from headrace.dataset.features.conversion import as_lists
from headrace.dataset.features.event_reader import InvalidSchema, SchemaDecoder
from headrace.dataset.features.feature_plan import FeaturePlan
from headrace.dataset.features.json_decoder import JsonDecoder
from headrace.dataset.features.plain_rows import Unreadable
from headrace.dataset.features.protobuf_events import ProtobufEvents, ProtobufSchema
from headrace.dataset.spec.config import ColumnsPipe, DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.dataset.spec.schema import Schema

AVRO = {
    "type": "record",
    "name": "Event",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": ["null", "double"]},
        {"name": "title", "type": ["null", "string"]},
        {"name": "sale", "type": "boolean"},
        {"name": "colour", "type": {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {
            "name": "user",
            "type": [
                "null",
                {"type": "record", "name": "User", "fields": [{"name": "id", "type": ["null", "long"]}]},
            ],
        },
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": "double"}],
                },
            },
        },
        {"name": "counts", "type": {"type": "map", "values": "long"}},
    ],
}
KINDS = {
    "id": FieldKind.WHOLE,
    "price": FieldKind.NUMBER,
    "title": FieldKind.TEXT,
    "sale": FieldKind.NUMBER,
    "colour": FieldKind.TEXT,
    "tags": FieldKind.TEXT,
    "user.id": FieldKind.WHOLE,
    "items.id": FieldKind.TEXT,
    "items.price": FieldKind.WHOLE,
    "counts.a": FieldKind.NUMBER,
}
FIELDS = [EventField(path, kind, signed=True) for path, kind in KINDS.items()]

Type = descriptor_pb2.FieldDescriptorProto


def member(name, number, kind, type_name="", *, repeated=False, optional=False):
    label = Type.LABEL_REPEATED if repeated else Type.LABEL_OPTIONAL
    found = Type(name=name, number=number, type=kind, label=label)
    if type_name:
        found.type_name = type_name
    if optional:
        found.proto3_optional = True
    return found


def proto_file():
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="shop", syntax="proto3")
    event = file.message_type.add(name="Event")
    event.field.extend(
        [
            member("id", 1, Type.TYPE_INT64),
            member("price", 2, Type.TYPE_DOUBLE, optional=True),
            member("title", 3, Type.TYPE_STRING, optional=True),
            member("sale", 4, Type.TYPE_BOOL),
            member("colour", 5, Type.TYPE_ENUM, ".shop.Colour"),
            member("tags", 6, Type.TYPE_STRING, repeated=True),
            member("user", 7, Type.TYPE_MESSAGE, ".shop.User"),
            member("items", 8, Type.TYPE_MESSAGE, ".shop.Event.Item", repeated=True),
            member("counts", 9, Type.TYPE_MESSAGE, ".shop.Event.CountsEntry", repeated=True),
        ]
    )
    for field in (event.field[1], event.field[2]):
        event.oneof_decl.add(name=f"_{field.name}")
        field.oneof_index = len(event.oneof_decl) - 1
    item = event.nested_type.add(name="Item")
    item.field.extend([member("id", 1, Type.TYPE_INT64), member("price", 2, Type.TYPE_DOUBLE)])
    entry = event.nested_type.add(name="CountsEntry")
    entry.field.extend([member("key", 1, Type.TYPE_STRING), member("value", 2, Type.TYPE_INT64)])
    entry.options.map_entry = True
    colour = file.enum_type.add(name="Colour")
    colour.value.add(name="RED", number=0)
    colour.value.add(name="BLUE", number=1)
    user = file.message_type.add(name="User")
    user.field.append(member("id", 1, Type.TYPE_INT64, optional=True))
    user.oneof_decl.add(name="_id")
    user.field[0].oneof_index = 0
    return file


FILE = proto_file()
DESCRIPTORS = descriptor_pb2.FileDescriptorSet(file=[FILE]).SerializeToString()


def event_class():
    pool = descriptor_pool.DescriptorPool()
    pool.Add(FILE)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Event"))


EVENT = event_class()
PLAIN = json.loads(json.dumps(AVRO).replace(', "logicalType": "timestamp-millis"', ""))
"""For fastavro's writer, which takes times for that type."""
WRITTEN = fastavro.parse_schema(PLAIN)


def as_avro(event):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, WRITTEN, event)
    return out.getvalue()


def as_protobuf(event):
    plain = {key: value for key, value in event.items() if value is not None}
    plain["colour"] = ["RED", "BLUE"].index(plain["colour"])
    return EVENT(**plain).SerializeToString()


def avro_decoder(fields=FIELDS):
    reader = AvroEvents(json.dumps(AVRO))
    reader.check_fields(fields)
    return SchemaDecoder(reader, fields)


def protobuf_decoder(fields=FIELDS):
    reader = ProtobufEvents(ProtobufSchema.of_set(DESCRIPTORS).message("shop.Event"), fields)
    reader.check_fields()
    return SchemaDecoder(reader, fields)


def decoded(decoder, events):
    found = decoder.decode(pa.array(events, pa.binary()))
    return [as_lists(column) for column in found.fields.columns], [event for event, _ in found.errors]


whole = st.integers(-(1 << 63), (1 << 63) - 1)
number = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-1000, 1000).map(float)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
events = st.fixed_dictionaries(
    {
        "id": whole,
        "price": st.none() | number,
        "title": st.none() | text,
        "sale": st.booleans(),
        "colour": st.sampled_from(["RED", "BLUE"]),
        "tags": st.lists(text, max_size=3),
        "user": st.none() | st.fixed_dictionaries({"id": st.none() | whole}),
        "items": st.lists(st.fixed_dictionaries({"id": whole, "price": number}), max_size=3),
        "counts": st.dictionaries(st.sampled_from("abc"), whole),
    }
)


@given(st.lists(events, max_size=5))
def test_json_avro_and_protobuf_give_the_same_fields_to_the_bit(drawn):
    expected = decoded(JsonDecoder(FIELDS), [json.dumps(event).encode() for event in drawn])
    assert decoded(avro_decoder(), [as_avro(event) for event in drawn]) == expected
    assert decoded(protobuf_decoder(), [as_protobuf(event) for event in drawn]) == expected


PIPE = ColumnsPipe(kind="columns", explode="items")
SLOTS = Schema.of(
    [
        SparseSlot(name="id", values="string"),
        SparseSlot(name="user.id", values="string"),
        SparseSlot(name="title", values="string", split=" "),
        SparseSlot(name="tags", values="string"),
        SparseSlot(name="item", values="string", **{"from": "items.id"}),
        SparseSlot(name="item_colour", cross=("item", "colour"), hash=1000),
        SparseSlot(name="colour", values="string"),
        SparseSlot(name="steps", buckets=(-5.0, 0.0, 5.0), **{"from": "price"}),
        DenseSlot(name="items.price", kind="dense", default=0.0),
        MetaSlot(name="sale", kind="meta"),
    ]
)


@settings(max_examples=30)
@given(st.lists(events, max_size=5))
def test_json_avro_and_protobuf_give_the_same_features_to_the_bit(drawn):
    fields = FeaturePlan(PIPE, SLOTS).fields
    expected = FeaturePlan(PIPE, SLOTS).apply(pa.array([json.dumps(event).encode() for event in drawn], pa.binary()))
    for decoder, encode in ((avro_decoder(fields), as_avro), (protobuf_decoder(fields), as_protobuf)):
        plan = FeaturePlan(PIPE, SLOTS, decoder=decoder)
        assert plan.apply(pa.array([encode(event) for event in drawn], pa.binary())).equals(expected)


EXAMPLE = {
    "id": 7,
    "price": 1.5,
    "title": "a",
    "sale": True,
    "colour": "BLUE",
    "tags": ["x", "y"],
    "user": {"id": 5},
    "items": [{"id": 1, "price": 2.0}],
    "counts": {"a": 3},
}


@pytest.mark.parametrize(
    ("decoder", "encode"), [(avro_decoder, as_avro), (protobuf_decoder, as_protobuf)], ids=["avro", "protobuf"]
)
def test_a_bad_event_is_rejected_alone(decoder, encode):
    good = encode(EXAMPLE)
    columns, errors = decoded(decoder(), [good, good[:-3], good])
    assert errors == [1]
    assert [column.to_pylist()[1] for column in columns] == [None] * len(FIELDS)
    assert columns[0].to_pylist() == [[7], None, [7]]


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_rejected(data):
    for decoder in (avro_decoder(), protobuf_decoder()):
        decoder.decode(pa.array([data], pa.binary()))


def test_an_event_of_avro_that_is_cut_is_rejected_with_the_same_words_at_each_reading():
    whole, reader = as_avro(EXAMPLE), AvroEvents(json.dumps(AVRO))
    said = [[reader.read(whole[:size]).error for size in range(len(whole))] for _ in range(2)]
    assert said[0] == said[1] and not any(" at 0x" in each for each in said[0])


def test_bytes_after_an_avro_record_are_an_error():
    found = AvroEvents(json.dumps(AVRO)).read(as_avro(EXAMPLE) + b"x")
    assert isinstance(found, Unreadable) and "1 bytes follow the record" in found.error


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("user.name", r"no field 'user.name'"),
        ("itms.id", r"no field 'itms'.*items"),
        ("user", r"'user', a (message|record)"),
        ("id.x", r"no field 'id.x'"),
    ],
)
def test_a_field_that_is_not_in_the_schema_is_refused(path, message):
    fields = [EventField(path, FieldKind.WHOLE)]
    with pytest.raises(InvalidSchema, match=message):
        protobuf_decoder(fields)
    with pytest.raises(InvalidSchema, match=message):
        avro_decoder(fields)


def nulls_beside_a_boolean(num):
    """A list of records with so many values for a byte, and one."""
    fields = [{"name": "b", "type": "boolean"}, *({"name": f"n{i}", "type": "null"} for i in range(num - 1))]
    return {"type": "array", "items": {"type": "record", "name": "R", "fields": fields}}


def doubled(levels, level=0):
    """A record with two records of the next level: 2 ** levels of the last one, and no byte."""
    if level == levels:
        return {"type": "record", "name": f"R{level}", "fields": []}
    fields = [{"name": "a", "type": doubled(levels, level + 1)}, {"name": "b", "type": f"R{level + 1}"}]
    return {"type": "record", "name": f"R{level}", "fields": fields}


def nested_by_name(num):
    """A record in `num` records, in a schema whose text is nested a few levels deep."""
    fields = [{"name": "f0", "type": {"type": "record", "name": "R0", "fields": [{"name": "x", "type": "int"}]}}]
    for level in range(1, num + 1):
        inner = [{"name": "in", "type": f"R{level - 1}"}, {"name": "x", "type": "int"}]
        fields.append({"name": f"f{level}", "type": {"type": "record", "name": f"R{level}", "fields": inner}})
    return {"type": "record", "name": "A", "fields": fields}


def test_an_event_of_avro_may_have_sixteen_values_for_a_byte():
    fields = [{"name": "a", "type": nulls_beside_a_boolean(15)}, {"name": "d", "type": doubled(8)}]
    reader = AvroEvents(json.dumps({"type": "record", "name": "A", "fields": fields}))
    assert len(reader.read(b"\x04\x01\x00\x00")["a"]) == 2


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "is not JSON"),
        ('"long"', "not a schema of a record"),
        ({"type": "record", "name": "A", "fields": [{"name": "a", "type": ["null", "A"]}]}, "recursive"),
        ({"type": "record", "name": "A", "fields": [{"name": "a", "type": "B"}]}, "not a schema of Avro"),
        ({"type": "record", "name": "A", "fields": [{"name": "a", "type": 3}]}, "not a schema of Avro"),
        ({"type": "record", "name": "A"}, "not a schema of Avro"),
        (
            {"type": "record", "name": "A", "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}]},
            "take no bytes",
        ),
        (
            {
                "type": "record",
                "name": "A",
                "namespace": "n",
                "fields": [
                    {"name": "a", "type": {"type": "record", "name": "E", "fields": []}},
                    {"name": "b", "type": {"type": "array", "items": "n.E"}},
                ],
            },
            "take no bytes",
        ),
        ('{"type": "record", "__fastavro_parsed__": true, "name": "A"}', "not a schema of Avro"),
        (
            {"type": "record", "name": "A", "fields": [{"name": "a", "type": nulls_beside_a_boolean(16)}]},
            "more than 16",
        ),
        ({"type": "record", "name": "A", "fields": [{"name": "a", "type": doubled(20)}]}, "2,097,152 values without"),
        (nested_by_name(100), "deeper than 100"),
    ],
)
def test_a_schema_of_avro_that_cannot_be_used_is_refused(schema, message):
    with pytest.raises(InvalidSchema, match=message):
        AvroEvents(schema if isinstance(schema, str) else json.dumps(schema))


def test_an_event_of_avro_may_be_nested_by_names():
    found = AvroEvents(json.dumps(nested_by_name(3))).read(b"\x02" * 10)
    assert found["f2"] == {"in": {"in": {"x": 1}, "x": 1}, "x": 1}


def test_a_schema_of_protobuf_that_cannot_be_used_is_refused():
    with pytest.raises(InvalidSchema, match="not a FileDescriptorSet"):
        ProtobufSchema.of_set(b"\xff\xff")
    with pytest.raises(InvalidSchema, match="has 0 files"):
        ProtobufSchema.of_set(b"")
    with pytest.raises(InvalidSchema, match=r"no message 'shop.Evnt'; .*shop.Event"):
        ProtobufSchema.of_set(DESCRIPTORS).message("shop.Evnt")
    alone = descriptor_pb2.FileDescriptorProto(name="a.proto", dependency=["b.proto"])
    with pytest.raises(InvalidSchema, match="--include_imports"):
        ProtobufSchema([alone.SerializeToString()])


def test_well_known_types_need_not_be_in_the_set():
    file = descriptor_pb2.FileDescriptorProto(
        name="t.proto",
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"],
    )
    event = file.message_type.add(name="T")
    event.field.append(member("at", 1, Type.TYPE_MESSAGE, ".google.protobuf.Timestamp"))
    event.field.append(member("n", 2, Type.TYPE_MESSAGE, ".google.protobuf.Int64Value"))
    fields = [EventField("at.seconds", FieldKind.WHOLE), EventField("n", FieldKind.WHOLE)]
    reader = ProtobufEvents(ProtobufSchema([file.SerializeToString()]).message("T"), fields)
    reader.check_fields()
    seconds, wrapped = b"\x0a\x02\x08\x07", b"\x12\x02\x08\x09"
    assert reader.read(seconds + wrapped) == {"at": {"seconds": 7}, "n": 9}
    assert reader.read(b"") == {}


@pytest.mark.parametrize("name", ["DESCRIPTOR", "HasField", "FromString", "ParseFromString", "fields_by_name", "from"])
def test_a_field_of_protobuf_may_have_the_name_of_a_method(name):
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", syntax="proto2")
    file.message_type.add(name="T", field=[member(name, 1, Type.TYPE_INT32), member("id", 2, Type.TYPE_INT64)])
    fields = [EventField(name, FieldKind.WHOLE), EventField("id", FieldKind.WHOLE)]
    reader = ProtobufEvents(ProtobufSchema([file.SerializeToString()]).message("T"), fields)
    reader.check_fields()
    assert reader.read(b"\x08\x05\x10\x07") == {name: 5, "id": 7}


def test_a_key_of_a_map_that_is_not_utf8_rejects_its_event():
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", syntax="proto2")
    event = file.message_type.add(name="T", field=[member("m", 1, Type.TYPE_MESSAGE, ".T.MEntry", repeated=True)])
    entry = event.nested_type.add(name="MEntry", field=[member("key", 1, Type.TYPE_STRING)])
    entry.field.append(member("value", 2, Type.TYPE_INT64))
    entry.options.map_entry = True
    schema = ProtobufSchema([file.SerializeToString()])
    reader = ProtobufEvents(schema.message("T"), [EventField("m.a", FieldKind.WHOLE)])
    assert reader.read(b"\x0a\x05\x0a\x01a\x10\x07") == {"m": {"a": 7}}
    found = reader.read(b"\x0a\x05\x0a\x01\xff\x10\x07")
    assert isinstance(found, Unreadable) and found.error.startswith("not UTF-8")


def test_pools_are_private():
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("shop.Event")
