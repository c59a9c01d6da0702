"""Requests that are read and answered quickly: the same as the others, byte by byte."""

import asyncio
import http.client
import json
import re
import socket
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.deadline import Deadline
from headrace.http import connections, http_server
from headrace.http.listening import listen
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.replica import http_api
from headrace.trainer.replica.inference_messages import InvalidInference, RequestReader, attach_raw
from headrace.trainer.replica.known_requests import MAX_LAYOUTS, KnownRequests
from headrace.trainer.replica.replica_state import MAX_BOUND, MAX_BOUND_SAMPLES
from headrace.trainer.replica.serving_model import ServingModel
from tests.fakes.served import asked, model_json, template
from tests.unit.test_replica_server import INFER, ONE, Served

MODEL = ServingModel(model_json(), DenseGraph(template()).open())
READER = RequestReader(MODEL, 8)
FLAT = [
    each | {"data": sum(([*part] if isinstance(part, list) else [part] for part in each["data"]), [])}
    for each in ONE["inputs"]
]
"""The same with flat data."""


def read(told, raw=b""):
    content = told if isinstance(told, bytes) else json.dumps(told).encode()
    return KnownRequests(READER).read(content, raw, lambda: None)


def same(found, wanted):
    assert found.num_samples == wanted.num_samples
    assert (found.left_out, found.events, found.time_s_B) == (wanted.left_out, wanted.events, wanted.time_s_B)
    for one, other in zip(found.signs, wanted.signs, strict=True):
        for name in ("sign_N", "offset_SB1", "weight_N"):
            left, right = getattr(one, name), getattr(other, name)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes() and left.shape == right.shape
    assert found.dense.keys() == wanted.dense.keys()
    for name, values in found.dense.items():
        assert values.tobytes() == wanted.dense[name].tobytes() and values.shape == wanted.dense[name].shape


@pytest.mark.parametrize("inputs", [FLAT, ONE["inputs"], FLAT[::-1]], ids=["flat", "nested", "in another order"])
def test_a_known_request_is_read_as_the_others_are(inputs):
    found = read({"inputs": inputs, "id": "seven"})
    same(found.inputs, READER.inputs({"inputs": inputs}))
    assert found.cost == READER.cost({"inputs": inputs}) and found.rest == {"id": "seven"}


VALUES = st.one_of(
    st.integers(-2, 1 << 65), st.floats(width=32), st.text(max_size=3), st.booleans(), st.none(), st.just([1]),
    st.sampled_from([1 << 2000, 1e39, [], [[1]], "\ud800"]),
)  # fmt: skip
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a", "b", "d", "a.lengths", "x"]),
        "datatype": st.sampled_from(["UINT64", "INT64", "INT8", "BYTES", "FP32", "FP64", "BOOL", "x"]),
        "shape": st.lists(st.one_of(st.integers(-1, 3), st.just(True), st.just(1.0)), max_size=3),
        "data": st.lists(VALUES, max_size=4),
        "parameters": st.sampled_from([{}, {"binary_data_size": 8}, {"x": 1}, None, 1]),
        "more": st.just(1),
    },
)


@given(st.sampled_from([FLAT, ONE["inputs"]]), st.dictionaries(st.integers(0, 3), CHANGES, max_size=2), st.booleans())
def test_what_is_read_of_any_request_equals_what_the_others_read(inputs, changes, with_more):
    told = {"inputs": [each | changes.get(at, {}) for at, each in enumerate(inputs)]}
    told |= {"outputs": [{"name": "ctr"}]} if with_more else {}
    if (found := read(told)) is not None:
        same(found.inputs, READER.inputs(json.loads(json.dumps(told))))


RAW = {"a": "<u8", "history": "<i8", "d": "<f4", "b": None}


@given(st.integers(1, 8), st.integers(0, 2), st.integers(-1, 1), st.booleans(), st.sampled_from([0, 1.5, np.nan]))
def test_raw_tensors_are_read_as_the_others_are(num, count, more, is_negative, number):
    described = model_json()
    described["slots"] = [slot for slot in described["slots"] if slot["name"] != "b"]
    reader = RequestReader(ServingModel(described, MODEL.graph), 8)
    inputs, raw = [], b""
    for name, kind, size in (("a", "UINT64", count), ("history", "INT64", count), ("d", "FP32", 2)):
        values = np.arange(num * size).astype(RAW[name])
        values[:1] = number if kind == "FP32" else -1 if is_negative and kind == "INT64" else 3
        sized = {"binary_data_size": values.nbytes + (more if name == "a" else 0)}
        inputs.append({"name": name, "datatype": kind, "shape": [num, size], "parameters": sized})
        raw += values.tobytes()
    found = KnownRequests(reader).read(json.dumps({"inputs": inputs}).encode(), raw, lambda: None)
    try:
        attach_raw(told := {"inputs": inputs}, raw)
        wanted = reader.inputs(told)
    except InvalidInference:
        wanted = None
    assert (found is None) == (wanted is None)
    if found is not None:
        same(found.inputs, wanted)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"inputs": []}', b'{"inputs": [NaN]}', b"\xff\xfe{", b"[" * 1000, b'{"inputs": ' + b"[" * 100_000],
)
def test_what_is_no_known_request_is_left_to_the_others(content):
    assert read(content) is None


def test_layouts_are_bounded():
    known = KnownRequests(READER)
    for count in range(MAX_LAYOUTS + 5):
        sized = FLAT[0] | {"shape": [1, count], "data": [1] * count}
        assert known.read(json.dumps({"inputs": [sized, *FLAT[1:]]}).encode(), b"", lambda: None) is not None
        assert len(known._layouts) <= MAX_LAYOUTS


def test_few_samples_are_predicted_in_kept_arrays_with_the_same_bits(tmp_path):
    served = Served(tmp_path).serve(1, 2)
    model = served.state.model()
    view = served.state._view
    for num in (1, 2, 1, 3, MAX_BOUND_SAMPLES + 1, 1):
        samples = served.job.samples.slice(0, min(num, 16))
        inputs = RequestReader(model, 64).inputs({"inputs": asked(samples)})
        _, found = served.state.predict(model, inputs)
        wanted = model.graph.run(model.feeds(view.tables, inputs) | dict(view.kept.weights))
        assert found["ctr"].tobytes() == wanted["ctr"].tobytes()
    assert set(view.idle) == {1, 2, 3, 16} and max(map(len, view.idle.values())) <= MAX_BOUND


# -- over sockets


@contextmanager
def answering(served, *, at_once=True):
    """Serves on a free port."""

    async def without(scope, receive, send):
        await served.app(scope, receive, send)

    with closing(listen("127.0.0.1", 0, "listen")) as listener:
        with http_api.serving(served.app if at_once else without, listener):
            yield listener.getsockname()


def sent(address, *parts, until=1):
    """What comes back for bytes that are sent one after another, without its dates."""
    with socket.create_connection(address, 10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
        return received(client, until)


def received(client, until):
    """So many answers, without their dates."""
    found = b""
    while found.count(b"HTTP/1.1 ") < until or not found.endswith((b"}", b"]")):
        if not (more := client.recv(1 << 16)):
            break
        found += more
    return re.sub(rb"date: [^\r]*\r\n", b"", found)


def post(told, *headers, path=INFER):
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


GOOD = post(ONE)
ASKED = {
    "good": [GOOD],
    "two at once": [GOOD + post({"inputs": FLAT, "id": "2"})],
    "twenty at once": [GOOD * 20],
    "a bad one between": [GOOD + post({"inputs": FLAT[1:]}) + GOOD],
    "in parts": [GOOD[:30], GOOD[30:200], GOOD[200:]],
    "no model": [post(ONE, path="/v2/models/other/infer")],
    "a version": [post(ONE, path="/v2/models/small/versions/2/infer")],
    "another version": [post(ONE, path="/v2/models/small/versions/1/infer")],
    "with a question mark": [post(ONE, path=f"{INFER}?x=1")],
    "another site": [post(ONE, "Origin: http://evil.example")],
    "another name": [GOOD.replace(b"Host: 127.0.0.1", b"Host: evil.example")],
    "kept alive": [post(ONE, "Connection: keep-alive")],
    "then closed": [post(ONE, "Connection: close") + GOOD],
    "then closed by a proxy": [post(ONE, "Proxy-Connection: close") + GOOD],
    "a coding": [post(ONE, "Content-Encoding: br")],
    "a head": [post(ONE, "Inference-Header-Content-Length: 5")],
    "two heads": [post(ONE, "Inference-Header-Content-Length: 5", "Inference-Header-Content-Length: 6")],
    "no JSON": [post(b"{")],
    "too long": [post(b" " * 5000)],
    "metadata": [b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"],
}


def test_answers_at_once_have_the_bytes_of_the_application(tmp_path):
    found = {}
    for at_once in (True, False):
        served = Served(tmp_path / str(at_once), max_body=4096).serve(1, 2)
        with answering(served, at_once=at_once) as address:
            found[at_once] = {
                name: sent(address, *parts, until=max(1, b"".join(parts).count(b"POST")))
                for name, parts in ASKED.items()
            }
    assert found[True] == found[False]
    assert found[True]["two at once"].count(b"HTTP/1.1 200") == 2
    assert found[True]["twenty at once"].count(b"HTTP/1.1 200") == 20


def test_the_rest_of_a_request_may_come_with_one_for_the_application(tmp_path):
    served = Served(tmp_path).serve(1)
    for cut in (30, GOOD.index(b"{") - 1):
        with answering(served) as address, socket.create_connection(address, 10) as client:
            client.sendall(GOOD + GOOD[:cut])
            first = received(client, 1)
            client.sendall(GOOD[cut:] + post({}, path="/v2/repository/index"))
            second, _, index = received(client, 2).partition(b"}]}")
            assert first == second + b"}]}" and index.startswith(b"HTTP/1.1 200") and b'"small"' in index


def in_turn(address, requests):
    """The answers to requests of one connection, each sent when the one before is answered, without their dates."""
    answers = []
    with closing(http.client.HTTPConnection(*address, timeout=10)) as client:
        client.connect()
        for request in requests:
            client.sock.sendall(request)
            answer = http.client.HTTPResponse(client.sock)
            answer.begin()
            told = [each for each in answer.getheaders() if each[0] != "date"]
            answers.append((answer.status, told, answer.read()))
    return answers


FLAT_ONE, SHORT = post({"inputs": FLAT}), post({"inputs": FLAT, "id": "a longer one"})
TURNS = {
    "the same": [GOOD, GOOD, GOOD],
    "other lengths": [GOOD, FLAT_ONE, SHORT, GOOD],
    "bad ones between": [GOOD, post(b"{"), GOOD, post({"inputs": FLAT[1:]}), GOOD, GOOD],
    "another name": [GOOD, GOOD.replace(b"Host: 127.0.0.1", b"Host: evil.example"), GOOD],
    "other heads": [GOOD, post(ONE, "X-Trace: 1"), post(ONE, "X-Trace: 2"), GOOD],
    "a length with zeros": [GOOD, GOOD.replace(b"Content-Length: ", b"Content-Length: 00"), GOOD],
    "an empty line before": [GOOD, b"\r\n" + GOOD, b"\r\n" + GOOD, GOOD],
    "too long": [GOOD, post(b" " * 5000), GOOD],
    "no length": [GOOD, GOOD, GOOD.replace(b"Content-Length: ", b"Content-Length: -")],
    "another method": [GOOD, GOOD, b"GET" + GOOD[4:]],
}


def test_requests_with_a_known_head_have_the_answers_of_the_application(tmp_path):
    found = {}
    for at_once in (True, False):
        served = Served(tmp_path / str(at_once), max_body=4096).serve(1, 2)
        with answering(served, at_once=at_once) as address:
            found[at_once] = {name: in_turn(address, requests) for name, requests in TURNS.items()}
    assert found[True] == found[False]


def test_a_connection_with_known_heads_is_open_while_it_is_used_and_then_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    served = Served(tmp_path).serve(1)
    with answering(served) as address, socket.create_connection(address, 10) as client:
        used = Deadline.after(1.5)
        while not used.passed():
            client.sendall(GOOD)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert client.recv(1 << 16) == b""


def test_a_token_is_asked_for_with_every_head(tmp_path):
    (tmp_path / "token").write_text("t" * 16)
    served = Served(tmp_path, token_file=str(tmp_path / "token")).serve(1)
    known = post(ONE, f"Authorization: Bearer {'t' * 16}")
    with answering(served) as address:
        told = sent(address, known + GOOD + known, until=3)
    assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"200", b"401", b"200"]


def test_good_requests_are_answered_at_once_and_counted(tmp_path, monkeypatch):
    served = Served(tmp_path).serve(1)

    async def never(*_):
        raise AssertionError("the application was asked")

    monkeypatch.setattr(served.answering, "answer", never)
    with answering(served) as address:
        assert sent(address, GOOD, GOOD, until=2).count(b"HTTP/1.1 200") == 2
    assert b'headrace_replica_requests_total{code="200"} 2.0' in served.figures.exposition()[0]


def test_a_request_behind_one_that_was_answered_at_once_may_take_long(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server.uvicorn, "Config", partial(http_server.uvicorn.Config, timeout_keep_alive=0))
    served = Served(tmp_path).serve(1)
    answer = served.answering.answer

    async def slowly(*asked):
        await asyncio.sleep(0.1)
        await answer(*asked)

    monkeypatch.setattr(served.answering, "answer", slowly)
    long = post(ONE, path=f"{INFER}?x=1")
    with answering(served) as address:
        assert sent(address, GOOD + long, until=2).count(b"HTTP/1.1 200") == 2
