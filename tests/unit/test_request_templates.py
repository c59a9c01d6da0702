"""Requests that are read by the bytes of one before: the same numbers, or nothing."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.replica import known_requests
from headrace.trainer.replica.inference_messages import InvalidInference, RequestReader
from headrace.trainer.replica.known_requests import LEARNT_EVERY, MAX_TEMPLATES, KnownRequests
from headrace.trainer.replica.request_templates import RequestTemplate, places_of, read_reference
from headrace.trainer.replica.serving_model import ServingModel
from tests.fakes.served import model_json, template
from tests.unit.test_known_requests import same

CONTENT = b'{"inputs": [{"data": [[7, 8]], "name": "a"}, {"data":[0.5,-1] , "shape": [1, 2]}, {"data": [9]}]}'
TO_H = places_of([2, 2, 1], [2, 0], [1])
TEXTS = st.one_of(
    st.integers(-3, 1 << 65).map(str), st.floats().map(repr), st.floats(width=32).map(repr),
    st.from_regex(r"-?[0-9]{1,22}(\.[0-9]{1,22})?([eE][-+]?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(["-0", "-0.0", "0e5", "1.", ".5", "+1", "01", "1e", "", " 1", "18446744073709551615"]),
)  # fmt: skip


def one_of(texts):
    parts = RequestTemplate(CONTENT, TO_H, 3, 2).literals
    return parts[0] + b"".join(text.encode() + part for text, part in zip(texts, parts[1:], strict=True))


@given(st.tuples(*[TEXTS] * 5))
@example(["18446744073709551616", "1", "1", "1", "1"])
@example(["18446744073709551615", "1", "3.4028235677973366e+38", "1e-46", "0"])
@example(["1", "1", "1.000000059604644775390625", "1.00000017881393432617187", "0"])  # halves of float32
@example(["1", "1", "-0", "1", "0"])
def test_a_template_reads_what_the_reference_reads_or_nothing(texts):
    content = one_of(texts)
    found = RequestTemplate(CONTENT, TO_H, 3, 2).read(content)
    if found is not None:
        signs, floats = read_reference(RequestTemplate(CONTENT, TO_H, 3, 2).literals, TO_H.tolist(), content)
        assert found[0].tolist() == [signs[place] for place in range(3)]
        assert found[1].tobytes() == np.array([floats[place] for place in range(2)]).tobytes()


@given(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 3), st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2))
def test_numbers_that_clients_write_are_read(signs, floats):
    floats = [each if abs(each) > 1e-4 else 0.0 for each in floats]
    found = RequestTemplate(CONTENT, TO_H, 3, 2).read(one_of(map(repr, [*signs[:2], *floats, signs[2]])))
    assert found[0].tolist() == [signs[2], signs[0], signs[1]] and found[1].tolist() == list(floats)


@pytest.mark.parametrize(
    "content",
    [b"", CONTENT[:-1], CONTENT + b" ", CONTENT.replace(b"[1, 2]", b"[2, 1]"), CONTENT.replace(b"8]]", b"8 ]]")],
)
def test_other_bytes_are_not_read(content):
    assert RequestTemplate(CONTENT, TO_H, 3, 2).read(content) is None


def told(values, number, **more):
    data = [values[:2], values[2:], [number, -number]]
    slots = zip(("a", "history", "d"), ("UINT64", "INT64", "FP32"), data, strict=True)
    inputs = [{"name": name, "datatype": kind, "shape": [1, 2], "data": each} for name, kind, each in slots]
    return {"inputs": inputs} | more


def reader():
    described = model_json()
    described["slots"] = [slot for slot in described["slots"] if slot["name"] != "b"]
    return RequestReader(ServingModel(described, DenseGraph(template()).open()), 8)


def test_requests_are_read_by_a_template_as_without_one():
    known, requests = KnownRequests(reader()), np.random.default_rng(1)
    for _ in range(20):
        signs = requests.integers(1 << 64, size=4, dtype=np.uint64).tolist()
        request = told(signs, float(requests.normal()))
        same(known.read(json.dumps(request).encode(), b"", lambda: None).inputs, known.reader.inputs(request))
    assert len(known._templates) == 1


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 0.5, None, "x", [1], True])
def test_a_wrong_number_is_refused_beside_a_template(wrong):
    known = KnownRequests(reader())
    for _ in range(3):
        assert known.read(json.dumps(told([1, 2, 3, 4], 0.5)).encode(), b"", lambda: None) is not None
    request = told([1, 2, 3, wrong], 0.5)
    assert known.read(json.dumps(request).encode(), b"", lambda: None) is None
    with pytest.raises(InvalidInference):
        known.reader.inputs(request)


def test_a_key_that_is_written_with_an_escape_makes_no_template():
    known, body = KnownRequests(reader()), json.dumps(told([1, 2, 3, 4], 0.5))
    twice = body.replace('"data": [1, 2]', '"data": [1, 2], "d\\u0061ta": [1, 2]')
    for _ in range(4):
        known.read(twice.encode(), b"", lambda: None)
    assert not known._templates


def test_templates_are_few_and_learnt_ever_more_rarely():
    known = KnownRequests(reader())
    for spaces in range(64):
        body = json.dumps(told([1, 2, 3, 4], 0.5)).replace("{", "{" + " " * spaces)
        assert known.read(body.encode(), b"", lambda: None) is not None
    assert len(known._templates) == MAX_TEMPLATES
    ((_, layout), *_) = known._templates
    assert layout.num_read == 64


def test_requests_of_ever_new_layouts_rarely_make_templates(monkeypatch):
    known, made = KnownRequests(reader()), []
    monkeypatch.setattr(known_requests, "RequestTemplate", lambda *given: made.append(1) or RequestTemplate(*given))
    for number in range(200):
        request = told([1, 2, *range(2 + number % 70)], 0.5)
        request["inputs"][1]["shape"] = [1, 2 + number % 70]
        for _ in range(2):
            assert known.read(json.dumps(request).encode(), b"", lambda: None) is not None
    assert MAX_TEMPLATES < len(made) <= MAX_TEMPLATES + 400 // LEARNT_EVERY
