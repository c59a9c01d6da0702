"""Events whose schemas are in a registry: a real HTTP server on a port."""

import base64
import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.features import registry_events, schema_registry
from headrace.dataset.features.format_kinds import AvroFormat, ProtobufFormat
from headrace.dataset.features.registry_events import BadFrame, RegistryDecoder, split_frame
from headrace.dataset.features.schema_registry import SchemaRegistry
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.dataset.stream.errors import SourceUnavailable
from tests.fakes.schema_registry import serving
from tests.unit.test_event_formats import AVRO, EXAMPLE, FIELDS, FILE, PLAIN, as_avro, as_protobuf, avro_decoder

PROTO = base64.b64encode(FILE.SerializeToString()).decode()
ID = [EventField("id", FieldKind.WHOLE)]


@pytest.fixture
def server():
    with serving() as registry:
        yield registry


@pytest.fixture
def registry(server):
    return SchemaRegistry(server.url, fetch_s=20.0)


def framed(number, event, place=b""):
    return b"\0" + number.to_bytes(4, "big") + place + event


def decode(registry, events, fields=ID, kind=None):
    return RegistryDecoder(registry, fields, kind or AvroFormat(), patience_s=60.0).decode(
        pa.array(events, pa.binary())
    )


def one_field(name):
    return json.dumps({"type": "record", "name": "R", "fields": [{"name": name, "type": "long"}]})


def test_each_event_is_read_by_the_schema_that_it_names(server, registry):
    server.add(1, one_field("id"))
    server.add(70_000, one_field("other"))
    decoder = RegistryDecoder(registry, ID, AvroFormat(), patience_s=60.0)
    found = decoder.decode(pa.array([framed(1, b"\x04"), framed(70_000, b"\x06"), framed(1, b"\x08")]))
    assert found.fields.column("id").to_pylist() == [2, None, 4]
    assert found.errors == []
    assert server.asked == ["/schemas/ids/1?format=serialized", "/schemas/ids/70000?format=serialized"]
    decoder.decode(pa.array([framed(1, b"\x04")]))
    assert len(server.asked) == 2


def test_framed_events_give_what_events_of_a_schema_file_give(server, registry):
    server.add(1, json.dumps(AVRO))
    server.add(2, PROTO, "PROTOBUF")
    expected = avro_decoder().decode(pa.array([as_avro(EXAMPLE)], pa.binary())).fields
    assert decode(registry, [framed(1, as_avro(EXAMPLE))], FIELDS).fields == expected
    assert decode(registry, [framed(2, as_protobuf(EXAMPLE), b"\0")], FIELDS, ProtobufFormat()).fields == expected
    assert PLAIN != AVRO


def test_a_message_is_found_by_its_place(server, registry):
    server.add(3, PROTO, "PROTOBUF")
    user, item = b"\x08\x05", b"\x08\x06"  # shop.User is the second message; Item is inside the first
    events = [framed(3, user, b"\x02\x02"), framed(3, item, b"\x04\x00\x00"), framed(3, user, b"\x02\x08")]
    found = decode(registry, events, kind=ProtobufFormat())
    assert found.fields.column("id").to_pylist() == [5, 6, None]
    ((event, error),) = found.errors
    assert event == 2 and "has no message at [4]" in error and "schema 3" in error


def test_events_of_an_unknown_id_wait_until_the_registry_knows_it(server, registry):
    server.add(1, one_field("id"))
    decoder = RegistryDecoder(registry, ID, AvroFormat(), patience_s=60.0)
    events = pa.array([framed(1, b"\x04"), framed(9, b"\x06")], pa.binary())
    with pytest.raises(SourceUnavailable, match=rf"does not know schema 9 of {server.url}/schemas/ids/9; it may learn"):
        decoder.decode(events)
    server.add(9, one_field("id"))
    found = decoder.decode(events)
    assert found.fields.column("id").to_pylist() == [2, 3] and found.errors == []


def test_an_id_that_stays_unknown_rejects_its_event_alone_and_delays_the_stream_once(server, registry):
    server.add(1, one_field("id"))
    now_s = [1000.0]
    decoder = RegistryDecoder(registry, ID, AvroFormat(), patience_s=60.0, clock=lambda: now_s[0])

    def decoded(*numbers):
        return decoder.decode(pa.array([framed(number, b"\x04") for number in numbers], pa.binary()))

    for now_s[0] in (1000.0, 1059.0):
        with pytest.raises(SourceUnavailable, match="asked again for 60 s, then such events are rejected"):
            decoded(1, 9, 1)
    for now_s[0], unknown in ((1060.0, 9), (1300.0, 10), (1599.0, 11)):  # made-up ids do not stop the stream again
        found = decoded(1, unknown, 1)
        assert found.fields.column("id").to_pylist() == [2, None, 2]
        assert [event for event, _ in found.errors] == [1] and f"does not know schema {unknown}" in found.errors[0][1]
    now_s[0] = 1600.0
    with pytest.raises(SourceUnavailable):
        decoded(12)
    server.add(12, one_field("id"))
    now_s[0] = 1605.0
    assert decoded(12).errors == []
    now_s[0] = 1606.0
    with pytest.raises(SourceUnavailable):  # the wait before was not in vain, so the next one may last as long
        decoded(13)
    now_s[0] = 1665.9
    with pytest.raises(SourceUnavailable):
        decoded(13)


def test_an_unknown_id_may_reject_its_event_alone_and_is_asked_once_for_a_block(server, registry):
    server.add(1, one_field("id"))
    decoder = RegistryDecoder(registry, ID, AvroFormat(), patience_s=0.0)
    found = decoder.decode(pa.array([framed(9, b"\x04"), framed(1, b"\x04"), framed(9, b"\x04")], pa.binary()))
    assert found.fields.column("id").to_pylist() == [None, 2, None]
    assert [event for event, _ in found.errors] == [0, 2]
    assert found.errors[0][1] == f"the schema registry does not know schema 9 of {server.url}/schemas/ids/9"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b"", "does not begin with a zero byte"),
        (b"\0\0\0\0", "does not begin with a zero byte"),
        (b'{"id": 1}', "does not begin with a zero byte"),
        (framed(1, b""), "schema 1 of .*: the event is not of the schema"),
        (framed(2, b""), "schema 2 of .* is of type PROTOBUF; the job reads AVRO"),
        (framed(3, b""), "schema 3 of .* is not a schema of Avro"),
        (framed(4, b""), "schema 4 of .* is longer than 1,048,576 bytes"),
        (framed(5, b""), "schema 5 of .* is answered without a schema"),
    ],
)
def test_the_reason_of_a_rejection_names_the_schema(server, registry, event, message):
    server.add(1, one_field("id"))
    server.add(2, PROTO, "PROTOBUF")
    server.add(3, '{"type": "recrd"}')
    server.add(4, "x" * schema_registry.MAX_ANSWER_BYTES)
    server.answers["/schemas/ids/5"] = 200, {"schemaType": 7}
    ((_, error),) = decode(registry, [event]).errors
    pytest.raises(AssertionError, _raise, error).match(message)


def _raise(text):
    raise AssertionError(text)


@pytest.mark.parametrize(
    "answer",
    [(500, {"message": "down"}), (401, {}), (404, b"<html>"), (404, {"error_code": 404}), (302, b""), (200, b"[]")],
)
def test_a_registry_that_does_not_answer_is_an_unavailable_source(server, registry, answer):
    server.answers["/schemas/ids/1"] = answer
    with pytest.raises(SourceUnavailable, match=rf"answers {answer[0]} for schema 1 of {server.url}/schemas/ids/1"):
        decode(registry, [framed(1, b"\x04")])
    server.add(1, one_field("id"))
    assert decode(registry, [framed(1, b"\x04")]).fields.column("id").to_pylist() == [2]


def test_a_packed_answer_which_nobody_asked_for_is_not_unpacked(server, registry):
    bomb = gzip.compress(gzip.compress(bytes(1 << 26)))
    server.answers["/schemas/ids/1"], server.encoding = (200, bomb), "gzip, gzip"
    tracemalloc.start()
    with pytest.raises(SourceUnavailable, match="answers in 'gzip, gzip' for schema 1"):
        registry.schema(1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22 and server.accepted == ["identity"]
    tracemalloc.stop()


def test_a_registry_that_is_gone_or_silent_is_an_unavailable_source(server):
    server.silent.set()
    silent = SchemaRegistry(server.url, fetch_s=0.1)
    with pytest.raises(SourceUnavailable, match="does not answer for schema 1"):
        silent.schema(1)
    gone = SchemaRegistry("http://127.0.0.1:1", fetch_s=5.0)
    with pytest.raises(SourceUnavailable, match="http://127.0.0.1:1/schemas/ids/1"):
        gone.schema(1)


def test_a_schema_comes_with_those_that_it_refers_to(server, registry):
    user = {"type": "record", "name": "User", "namespace": "a", "fields": [{"name": "id", "type": "a.Id"}]}
    event = {"type": "record", "name": "E", "fields": [{"name": "user", "type": "a.User"}]}
    identity = {"type": "record", "name": "Id", "namespace": "a", "fields": [{"name": "n", "type": "long"}]}
    server.add(1, json.dumps(event), references=[{"name": "a.User", "subject": "user/s", "version": 2}])
    server.add_version("user%2Fs", 2, json.dumps(user), references=[{"name": "a.Id", "subject": "id", "version": 1}])
    server.add_version("id", 1, json.dumps(identity))
    field = [EventField("user.id.n", FieldKind.WHOLE)]
    assert decode(registry, [framed(1, b"\x08")], field).fields.column(0).to_pylist() == [4]


def test_a_schema_that_refers_to_itself_is_refused(server, registry):
    around = [{"name": "x", "subject": "x", "version": 1}]
    server.add(1, one_field("id"), references=around)
    server.add_version("x", 1, one_field("id"), references=around)
    ((_, error),) = decode(registry, [framed(1, b"\x08")]).errors
    assert "refers to itself" in error
    assert len(server.asked) == 2


def test_credentials_are_sent(server):
    server.add(1, one_field("id"))
    server.authorization = "Basic " + base64.b64encode(b"me:secret:1").decode()
    client = SchemaRegistry(server.url + "/", "me:secret:1")
    assert client.schema(1).kind == "AVRO"
    server.authorization = "Bearer abc"
    client = SchemaRegistry(server.url, "Bearer abc")
    assert client.schema(1).kind == "AVRO"


def test_memory_is_bounded_and_dropped_schemas_are_fetched_again(server, registry, monkeypatch):
    monkeypatch.setattr(registry_events, "MAX_SCHEMAS", 2)
    for number in (1, 2, 3):
        server.add(number, one_field("id"))
    found = decode(registry, [framed(number, b"\x04") for number in (1, 2, 1, 3, 1, 2)])
    assert found.fields.column("id").to_pylist() == [2] * 6
    assert [int(path[13:14]) for path in server.asked] == [1, 2, 3, 2]


def zigzag(value):
    data, value = bytearray(), value << 1
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16), st.binary(max_size=5))
def test_frames_are_split_where_they_were_joined(number, place, event):
    head = zigzag(len(place)) + b"".join(map(zigzag, place))
    whole = framed(number, event, head)
    assert split_frame(whole, has_place=True) == (number, tuple(place), len(whole) - len(event))


@given(st.binary(max_size=20))
def test_any_bytes_are_split_or_refused(data):
    try:
        _, place, begin = split_frame(b"\0" + data, has_place=True)
    except BadFrame:
        return
    assert place and begin <= len(data) + 1
