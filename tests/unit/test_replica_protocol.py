"""Extensions of the Open Inference Protocol: raw tensors, compressed bodies, and what clients ask about a model."""

import gzip
import json
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from prometheus_client.openmetrics import parser as openmetrics

from headrace.trainer.replica import content_coding
from headrace.trainer.replica.content_coding import BodyRefused, decoded, encoded
from headrace.trainer.replica.inference_handler import BodyHeaders
from headrace.trainer.replica.inference_messages import DTYPES, INTS, InvalidInference, RequestTensor, raw_of
from tests.unit.test_replica_server import INFER, ONE, Served

HEAD = "Inference-Header-Content-Length"
VALUES = {"UINT64": "<u8", "INT64": "<i8", "FP32": "<f4"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served")).serve(1, 2)


def raw(told, **more):
    """The body of a request with all its tensors as raw bytes, as Triton's client sends it; the length of its head."""
    inputs, parts = [], []
    for each in told["inputs"]:
        data = np.array(each["data"], object).ravel().tolist()
        if each["datatype"] == "BYTES":
            parts.append(b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in data))
        else:
            parts.append(np.array(data, VALUES[each["datatype"]]).tobytes())
        rest = {key: value for key, value in each.items() if key != "data"}
        inputs.append(rest | {"parameters": {"binary_data_size": len(parts[-1])}})
    head = json.dumps(told | {"inputs": inputs} | more).encode()
    return head + b"".join(parts), str(len(head))


def test_raw_tensors_are_answered_as_those_in_json(served):
    wanted = served.infer(ONE).json()
    body, length = raw(ONE)
    answer = served.ask("POST", INFER, content=body, headers={HEAD: length})
    assert answer.json() == wanted and HEAD not in answer.headers
    body, length = raw(ONE, parameters={"binary_data_output": True})
    answer = served.ask("POST", INFER, content=body, headers={HEAD: length})
    assert answer.headers["content-type"] == "application/octet-stream"
    head = json.loads(answer.content[: int(answer.headers[HEAD])])
    (output,) = wanted["outputs"]
    raw_output = {"name": "ctr", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    assert head == wanted | {"outputs": [raw_output]}
    numbers = np.frombuffer(answer.content[int(answer.headers[HEAD]) :], "<f4")
    assert numbers.tolist() == np.array(output["data"], np.float32).tolist()


@pytest.mark.parametrize(
    ("of_request", "of_output", "is_raw"),
    [(None, True, True), (True, False, False), (True, None, True), (False, True, True), (False, None, False)],
)
def test_an_output_says_more_than_its_request_whether_it_is_raw(served, of_request, of_output, is_raw):
    output = {"name": "ctr"} | ({} if of_output is None else {"parameters": {"binary_data": of_output}})
    request = {} if of_request is None else {"parameters": {"binary_data_output": of_request}}
    answer = served.infer(ONE | request | {"outputs": [output]})
    assert answer.status_code == 200 and (HEAD in answer.headers) is is_raw


BODY, LENGTH = raw(ONE)
WRONG = {
    "no number": (BODY, "x", f"{HEAD} is 'x'; it must be the length"),
    "negative": (BODY, "-1", "it must be the length"),
    "too long": (BODY, str(len(BODY) + 1), f"0 to {len(BODY)}$"),
    "digits": (BODY, "9" * 4000, "it must be the length"),
    "no head": (BODY, "0", "the body is not JSON"),
    "too short": (BODY[:-1], LENGTH, "has 8 bytes of binary_data_size, where 7 follow the JSON head"),
    "more": (BODY + b"x", LENGTH, "^1 bytes follow the tensors that the JSON head names$"),
    "bytes of none": (json.dumps(ONE).encode() + b"x" * 16, str(len(json.dumps(ONE))), "^16 bytes follow"),
}


def one_raw(name, kind, content, *, shape, size=None):
    """A request whose input `name` alone is raw."""
    change = {
        "datatype": kind,
        "shape": shape,
        "parameters": {"binary_data_size": len(content) if size is None else size},
    }
    without = [{key: each[key] for key in ("name", "datatype", "shape")} | change if each["name"] == name else each
               for each in ONE["inputs"]]  # fmt: skip
    head = json.dumps({"inputs": without}).encode()
    return head + content, str(len(head))


def with_changed_first(**changes):
    inputs = [ONE["inputs"][0] | changes, *ONE["inputs"][1:]]
    body = json.dumps({"inputs": inputs}).encode()
    return body, str(len(body))


WRONG |= {
    name: (*body, words)
    for name, (body, words) in {
        "half a number": (one_raw("a", "UINT64", b"1234567", shape=[1, 1]), "'a': 7 bytes are no whole number of"),
        "shape": (one_raw("a", "UINT64", bytes(16), shape=[1, 3]), r"a: data has 2 values, the shape \[1, 3\] has 3"),
        "datatype": (one_raw("a", "UINT65", bytes(16), shape=[1, 2]), "'a': there is no datatype 'UINT65'"),
        "no datatype": (one_raw("a", [], bytes(16), shape=[1, 2]), r"'a': there is no datatype \[\]"),
        "wrong type": (one_raw("a", "FP32", bytes(8), shape=[1, 2]), "a: is FP32, and must be UINT64 or"),
        "text": (one_raw("b", "BYTES", b"\x09\0\0\0red", shape=[1, 1]), "'b': its last text should have 9 bytes"),
        "length": (one_raw("b", "BYTES", b"\x09\0\0", shape=[1, 1]), "'b': its bytes end within the length of a text"),
        "no UTF-8": (one_raw("b", "BYTES", b"\x01\0\0\0\xff", shape=[1, 1]), "'b': a text is not UTF-8"),
        "not finite": (one_raw("d", "FP32", b"\0\0\xc0\x7f" * 2, shape=[1, 2]), "d: a number is not finite"),
        "true": (with_changed_first(parameters={"binary_data_size": True}), "an input has True bytes"),
        "both": (with_changed_first(parameters={"binary_data_size": 0}), "send its data there, not as data"),
        "parameters": (with_changed_first(parameters=[3]), '"parameters" must be an object'),
        "shared": (with_changed_first(parameters={"shared_memory_region": "x"}), "'a': shared memory is not read here"),
        "out of range": (with_changed_first(datatype="INT8", data=[3, 128]), r"a: a number is not from -128 to 127"),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_raw_tensors_is_said(served, case):
    body, length, words = WRONG[case]
    answer = served.ask("POST", INFER, content=body, headers={HEAD: length})
    assert answer.status_code == 400 and re.search(words, answer.json()["error"]), answer.text


def test_raw_tensors_without_the_length_of_their_head_are_told_to_send_it(served):
    body, _ = raw(ONE)
    assert served.ask("POST", INFER, content=body).status_code == 400
    head = body[: int(raw(ONE)[1])]
    answer = served.ask("POST", INFER, content=head)
    assert answer.status_code == 400 and f"the length of the head as {HEAD}" in answer.json()["error"]


@given(st.data())
def test_whatever_follows_a_head_is_answered_or_refused_in_words(served, data):
    junk, place, cut = (
        data.draw(st.binary(max_size=9)),
        data.draw(st.integers(0, len(BODY))),
        data.draw(st.integers(0, 9)),
    )
    body = BODY[:place] + junk + BODY[place + cut :]
    length = data.draw(st.sampled_from([LENGTH, str(int(LENGTH) + len(junk) - cut), "0", str(len(body)), "x"]))
    status, found, _ = served.answering.infer("small", None, body, BodyHeaders(head_length=length))
    assert status == 200 or (status == 400 and json.loads(found)["error"])


@pytest.mark.parametrize("parameter", ["shared_memory_region", "classification"])
def test_outputs_that_no_replica_gives_are_refused(served, parameter):
    answer = served.infer(ONE | {"outputs": [{"name": "ctr", "parameters": {parameter: 1}}]})
    assert answer.status_code == 400 and "neither shared memory nor classification" in answer.json()["error"]


NUMBERS = {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64} | {
    kind: DTYPES[kind] for kind in INTS
}


@given(st.data())
def test_raw_numbers_of_each_type_are_the_same_as_in_json(data):
    kind = data.draw(st.sampled_from(sorted(NUMBERS)))
    values_N = data.draw(arrays.arrays(NUMBERS[kind], st.integers(0, 5), elements={} if kind == "BOOL" else None))
    told = {"name": "a", "datatype": kind, "shape": [len(values_N)]}
    raw_tensor = RequestTensor(told | {"data": values_N.astype(DTYPES[kind]).tobytes()}).typed(kind)
    plain = RequestTensor(told | {"data": values_N.tolist()}).typed(kind)
    assert np.array_equal(np.array(raw_tensor.data), np.array(plain.data), equal_nan=True)


def test_bfloat16_is_the_upper_half_of_a_float32():
    values_N = np.array([1.0, -2.5, 0.15625], np.float32)
    told = {
        "name": "d",
        "datatype": "BF16",
        "shape": [3],
        "data": (values_N.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }
    assert RequestTensor(told).typed("BF16").floats().tolist() == values_N.tolist()


@given(st.binary(max_size=40), st.sampled_from([*DTYPES, "BYTES", "x"]))
def test_whatever_bytes_a_tensor_has_are_read_or_refused_in_words(content, kind):
    told = {"name": "a", "datatype": kind, "shape": [len(content)], "data": content}
    try:
        RequestTensor(told).typed(kind)
    except InvalidInference as error:
        assert str(error)


def test_outputs_are_little_endian():
    assert raw_of(np.array([1.0], ">f4")) == struct.pack("<f", 1.0)
    assert raw_of(np.array([1], np.int64)) == struct.pack("<q", 1)


# Compressed bodies

CODERS = {"gzip": gzip.compress, "deflate": zlib.compress}
PACKED = gzip.compress(b"{}", mtime=0)  # the same in every process that collects these tests


@pytest.mark.parametrize("coding", CODERS)
def test_compressed_requests_are_answered_as_plain_ones(served, coding):
    body, length = raw(ONE)
    headers = {HEAD: length, "Content-Encoding": coding}
    answer = served.ask("POST", INFER, content=CODERS[coding](body), headers=headers)
    assert answer.json() == served.infer(ONE).json() and "content-encoding" not in answer.headers  # it is short


@pytest.mark.parametrize("coding", CODERS)
def test_long_answers_are_compressed_for_a_client_that_accepts_it(served, coding):
    plain = {"inputs": [
        {"name": "a", "datatype": "UINT64", "shape": [900, 0], "data": []},
        {"name": "b", "datatype": "BYTES", "shape": [900, 0], "data": []},
        {"name": "history", "datatype": "UINT64", "shape": [900, 0], "data": []},
        {"name": "d", "datatype": "FP32", "shape": [900, 2], "data": [0, 1] * 900},
    ]}  # fmt: skip
    body = json.dumps(plain).encode()
    quiet = served.ask("POST", INFER, content=body, headers={"Accept-Encoding": "identity"})
    answer = served.ask("POST", INFER, content=body, headers={"Accept-Encoding": coding})
    assert answer.headers["content-encoding"] == coding and answer.headers["vary"] == "accept-encoding"
    assert answer.json() == quiet.json()  # httpx decompresses
    assert "content-encoding" not in quiet.headers
    assert int(answer.headers["content-length"]) < int(quiet.headers["content-length"]) / 10
    text = served.ask("GET", "/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert text.headers["content-encoding"] == "gzip" and text.json()["info"]["title"] == "Headrace replica"


def test_a_compressed_request_may_not_expand_beyond_the_limit_of_bodies(tmp_path):
    served = Served(tmp_path, max_body="64KiB").serve(1)
    for coding, coder in CODERS.items():
        bomb = coder(b" " * (1 << 20))
        answer = served.ask("POST", INFER, content=bomb, headers={"Content-Encoding": coding})
        assert len(bomb) < 2000 and answer.status_code == 413 and "65,536 bytes" in answer.json()["error"]
        fits = coder(json.dumps(ONE).encode().ljust(64 << 10))
        assert served.ask("POST", INFER, content=fits, headers={"Content-Encoding": coding}).status_code == 200


@pytest.mark.parametrize(
    ("coding", "body", "status", "words"),
    [
        ("br", b"", 415, "the content coding 'br' is not read here; send gzip or deflate"),
        ("gzip, gzip", b"", 415, "the content coding 'gzip, gzip' is not read here"),
        ("gzip", b"{}", 400, "the body is not gzip"),
        ("deflate", PACKED, 400, "the body is not deflate"),
        ("gzip", PACKED[:-1], 400, "the body ends before its gzip does"),
        ("gzip", b"", 400, "the body ends before its gzip does"),
        ("gzip", PACKED * 2, 400, "the body goes on after its gzip; send one member"),
    ],
)
def test_what_is_wrong_with_a_compressed_body_is_said(served, coding, body, status, words):
    answer = served.ask("POST", INFER, content=body, headers={"Content-Encoding": coding})
    assert answer.status_code == status and words in answer.json()["error"]


@given(st.binary(max_size=5000), st.sampled_from(["gzip", "deflate"]), st.integers(0, 5000))
def test_a_body_is_decoded_whole_or_refused(body, coding, most):
    found, used = encoded(body, coding)
    assert (used == coding) is (len(body) >= content_coding.MIN_BYTES)
    coder = CODERS[coding]
    if len(body) <= most:
        assert decoded(found if used else coder(body), coding, most) == body
    else:
        with pytest.raises(BodyRefused, match="also once it is decompressed"):
            decoded(coder(body), coding, most)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("", None), ("identity", None), ("br", None), ("gzip", "gzip"), ("deflate, gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0", None), ("gzip;q=0, deflate;q=0.1", "deflate"), ("gzip;q=0.5,deflate;q=0.7", "deflate"),
        ("GZIP ; q=1", "gzip"), ("gzip;q=x", None), (";;,,", None),
    ],
)  # fmt: skip
def test_the_coding_of_an_answer_is_one_that_is_accepted(accepted, coding):
    assert encoded(b"x" * 2000, accepted)[1] == coding


# What clients ask about a model


def test_the_configuration_has_the_largest_batch_and_shapes_of_one_sample(served):
    config = served.ask("GET", "/v2/models/small/config").json()
    assert (config["name"], config["max_batch_size"]) == ("small", 4096)
    assert [(each["name"], each["data_type"], each["dims"], each["optional"]) for each in config["input"]] == [
        ("a", "TYPE_UINT64", [-1], False), ("b", "TYPE_STRING", [-1], False), ("b.weight", "TYPE_FP32", [-1], True),
        ("history", "TYPE_UINT64", [-1], False), ("d", "TYPE_FP32", [2], False),
    ]  # fmt: skip
    assert config["output"] == [{"name": "ctr", "data_type": "TYPE_FP32", "dims": []}]
    assert served.ask("GET", "/v2/models/small/versions/2/config").json() == config
    assert served.ask("GET", "/v2/models/small/versions/1/config").status_code == 404


def test_the_index_has_all_kept_versions_and_which_is_served(tmp_path):
    served = Served(tmp_path)
    assert served.ask("POST", "/v2/repository/index").json() == []
    served.serve(1, 2)
    ready = {"name": "small", "version": "2", "state": "READY", "reason": ""}
    kept = ready | {"version": "1", "state": "UNAVAILABLE", "reason": "it is kept: roll back to it first"}
    assert served.ask("POST", "/v2/repository/index").json() == [kept, ready]
    assert served.ask("POST", "/v2/repository/index", {"ready": True}).json() == [ready]
    assert served.ask("POST", "/v2/repository/index", {"ready": "x"}).status_code == 400
    for change in ("load", "unload"):
        answer = served.ask("POST", f"/v2/repository/models/small/{change}")
        assert answer.status_code == 400 and "takes its versions from a job" in answer.json()["error"]


def test_statistics_count_requests_and_their_parts(tmp_path):
    served = Served(tmp_path)
    assert served.ask("GET", "/v2/models/stats").json() == {"model_stats": []}
    assert served.ask("GET", "/v2/models/small/stats").status_code == 503
    served.serve(1)
    served.infer(ONE)
    served.infer(ONE)
    served.infer({})
    (told,) = served.ask("GET", "/v2/models/stats").json()["model_stats"]
    assert (told["name"], told["version"], told["inference_count"], told["execution_count"]) == ("small", "1", 2, 2)
    found = told["inference_stats"]
    assert (found["success"]["count"], found["fail"]["count"], found["queue"]["count"]) == (2, 1, 2)
    parts = [found[each]["ns"] for each in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert found["compute_infer"]["ns"] > 0 and abs(sum(parts) - found["success"]["ns"]) <= 4
    for path in ("/v2/models/small/stats", "/v2/models/small/versions/1/stats"):
        assert served.ask("GET", path).json() == {"model_stats": [told]}
    assert served.ask("GET", "/v2/models/other/stats").status_code == 404


def test_metrics_are_served_as_openmetrics_to_a_scraper_that_asks_for_them(served):
    served.infer(ONE)
    answer = served.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {each.name: each for each in openmetrics.text_string_to_metric_families(answer.text)}
    assert families["headrace_replica_requests"].samples and families["headrace_replica_freshness_seconds"].samples
    assert served.ask("GET", "/metrics").headers["content-type"].startswith("text/plain; version=")


def test_openapi_has_inference_and_no_error_that_never_comes(served):
    document = served.ask("GET", "/openapi.json").json()
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]
    assert set(infer["responses"]) == {"200", "400", "401", "403", "404", "408", "413", "415", "500", "503"}
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream"}
    assert "422" not in json.dumps(document) and "HTTPValidationError" not in json.dumps(document)
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named == set(document["components"]["schemas"])
