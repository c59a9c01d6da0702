"""A replica's addresses: the Open Inference Protocol, its errors, who may ask, what Prometheus reads."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import compile_path

from headrace.config import validate
from headrace.errors import SpecError
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.replica import access, inference_handler, inference_messages
from headrace.trainer.replica.access import RequestGate
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.http_api import gated
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.serving_model import Memories, MemoryMissing, ServingModel, filled
from tests.fakes.served import Job, asked

GOLDEN = Path(__file__).parents[1] / "golden"
INFER = "/v2/models/small/infer"
QUIET = SimpleNamespace(refused="", trouble="")
ONE = {
    "inputs": [
        {"name": "a", "datatype": "UINT64", "shape": [1, 2], "data": [[3, 18446744073709551615]]},
        {"name": "b", "datatype": "BYTES", "shape": [1, 1], "data": ["red"]},
        {"name": "history", "datatype": "INT64", "shape": [1], "data": [4]},
        {"name": "d", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]},
    ]
}


DOCUMENTED = []
"""See Served.documented: the same for all replicas."""


def check_documented(documented, method, path, answer):
    """Every status that comes is one that /openapi.json has for the route, and every error has the protocol's form."""
    known = [statuses for pattern, verb, statuses in documented if verb == method and pattern.match(path)]
    assert not known or str(answer.status_code) in known[0], (method, path, answer.status_code, known)
    assert answer.is_success or set(answer.json()) >= {"error"}


class Served:
    """A replica without a process, and requests to it."""

    def __init__(self, folder, **config):
        self.job = Job(folder)
        self.state = ReplicaState(5, 1 << 30)
        self.figures = ReplicaMetrics(self.state)
        told = {"exports": "x"} | config
        self.config = validate(ReplicaConfig, told)
        self.answering = InferenceHandler(self.state, self.figures, self.config.max_batch, self.config.max_body)
        self.app = gated(self.state, QUIET, self.figures, self.config, self.answering)

    def serve(self, *versions):
        for version in versions:
            self.state.apply(self.job.update(version, whole=not self.state.served))
        return self

    def ask(self, method, path, told=None, *, content=None, headers=None, kind="application/json"):
        async def go():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090") as client:
                body = content if content is not None else None if told is None else json.dumps(told).encode()
                named = [("Content-Type", kind)] if kind else []
                sent = [*named, *httpx.Headers(headers).multi_items()]
                answer = await client.request(method, path, content=body, headers=sent)
                check_documented(await self.documented(client), method, path, answer)
                return answer

        return asyncio.run(go())

    async def documented(self, client):
        """The responses of /openapi.json: regular expression of a path, method, statuses."""
        if not DOCUMENTED:
            headers = {"Authorization": f"Bearer {self.config.token()}"}
            paths = (await client.get("/openapi.json", headers=headers)).json()["paths"]
            DOCUMENTED.extend(
                (compile_path(path)[0], method.upper(), set(operation["responses"]))
                for path, methods in paths.items()
                for method, operation in methods.items()
            )
        return DOCUMENTED

    def infer(self, told, path=INFER):
        return self.ask("POST", path, told)


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path).serve(1, 2)


def test_answers_are_the_golden_predictions(served):
    answer = served.infer({"id": "seven", "inputs": asked(served.job.samples)})
    assert answer.status_code == 200
    told = answer.json()
    assert (told["model_name"], told["model_version"], told["id"]) == ("small", "2", "seven")
    (output,) = told["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("ctr", "FP32", [16])
    assert np.abs(np.array(output["data"]) - served.job.predictions()).max() < 1e-5


def test_a_sample_alone_is_answered_as_in_a_batch(served):
    whole = served.infer({"inputs": asked(served.job.samples)}).json()["outputs"][0]["data"]
    for at in range(4):
        told = served.infer({"inputs": asked(served.job.samples.slice(at, 1))}).json()
        assert told["outputs"][0]["data"] == pytest.approx(whole[at : at + 1], abs=1e-6)


def test_paddings_are_dropped_and_what_is_too_long_is_cut_as_the_spec_says(served):
    def tags(texts, history):
        more = [
            {"name": "b", "datatype": "BYTES", "shape": [1, len(texts)], "data": texts},
            {"name": "history", "datatype": "UINT64", "shape": [1, len(history)], "data": history},
        ]
        return served.infer({"inputs": [ONE["inputs"][0], ONE["inputs"][3], *more]}).json()["outputs"][0]["data"]

    assert tags(["none", "red", "none"], [9, 8, 1, 2, 3]) == tags(["red"], [1, 2, 3])
    assert tags(["red"], [1, 2, 3]) != tags(["red"], [9, 8, 1])
    assert tags([], []) != tags(["red"], [])


def test_weights_that_are_not_given_are_1(served):
    weight = {"name": "b.weight", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    plain, ones = served.infer(ONE).json(), served.infer({"inputs": [*ONE["inputs"], weight]}).json()
    twice = served.infer({"inputs": [*ONE["inputs"], weight | {"data": [2.0]}]}).json()
    assert plain["outputs"] == ones["outputs"] != twice["outputs"]


def changed(at, **changes):
    return {"inputs": [each | changes if number == at else each for number, each in enumerate(ONE["inputs"])]}


LENGTHS = {"name": "a.lengths", "datatype": "INT64", "shape": [1], "data": [3]}
WRONG = {
    "no JSON": (b"{", "the body is not JSON"),
    "deep": (b"[" * 100_000, "the body has lists and objects nested deeper than 100"),
    "a list": ([], '"inputs", a list of tensors'),
    "no inputs": ({"inputs": []}, '"inputs", a list of tensors'),
    "unknown": (changed(0, name="aa"), "there is no input 'aa'; did you mean 'a'"),
    "twice": ({"inputs": ONE["inputs"] * 2}, "input 'a' occurs twice"),
    "missing": ({"inputs": ONE["inputs"][1:]}, r"^input 'a' is missing: a sample without signs there .* \[1, 0\]$"),
    "missing dense": ({"inputs": ONE["inputs"][:3]}, r"^input 'd' is missing: .* numbers of the shape \[samples, 2\]$"),
    "raw events": (
        {"events": [{"a": 1}]},
        '^this model has no .* its job has not pipe.kind = "columns"; send "inputs"$',
    ),
    "no data": ({"inputs": [{"name": "a"}]}, "needs name, datatype, shape and data"),
    "shape": (changed(0, shape=[1, 3]), r"a: data has 2 values, the shape \[1, 3\] has 3"),
    "no size": (changed(0, shape=[1, "2"]), "which is not a size"),
    "minus infinity": (changed(0, shape=[float("-inf"), 2]), "a: shape holds -inf, which is not a size"),
    "digits": (changed(0, shape=[10**4000, 10**4000]), "a: shape holds 10{99}, which is not a size"),
    "below 0": (changed(0, shape=[-1, -2]), "which is not a size"),
    "text for numbers": (changed(0, datatype="BYTES"), "a: is BYTES, and must be UINT64"),
    "numbers for text": (changed(1, datatype="UINT64", data=[3]), "b: is UINT64, and must be BYTES"),
    "no number": (changed(0, data=[1, "2"]), "a: data has values that are not UINT64"),
    "a fraction": (changed(0, data=[1, 2.5]), "a: data has values that are not UINT64"),
    "a truth": (changed(0, data=[1, True]), "a: data has values that are not UINT64"),
    "negative": (changed(2, data=[-4]), r"history: a sign is not from 0 to 2\*\*64 - 1"),
    "too large": (changed(0, data=[1, 1 << 64]), r"a: a sign is not from 0 to 2\*\*64 - 1"),
    "not finite": (changed(3, data=[0.5, float("nan")]), "d: a number is not finite"),
    "huge": (changed(3, data=[0.5, 1e300]), "d: a number is not finite"),
    "dense size": (changed(3, shape=[1, 1], data=[1.0]), r"d: has the shape \[1, 1\], but must have \[1, 2\]"),
    "samples": (changed(0, shape=[2, 1]), r"history|b|d: has the shape"),
    "none": (changed(0, shape=[0, 2], data=[]), "0 samples in one request"),
    "lengths": ({"inputs": [*ONE["inputs"], LENGTHS]}, "a.lengths: must have 1 numbers with the sum 2"),
    "mixed": (changed(0, data=[[3], 4]), "data mixes lists and values"),
    "surrogate": (changed(1, data=["\ud800"]), "not UTF-8"),
    "output": (ONE | {"outputs": [{"name": "ctrr"}]}, "there is no output 'ctrr'; did you mean 'ctr'"),
    "outputs": (ONE | {"outputs": [3]}, "a list of objects with a name"),
    "outputs again": (ONE | {"outputs": [{"name": "ctr"}] * 3800}, "^output 'ctr' is named twice; name each once$"),
    "dimensions": (changed(0, shape=[1] * 9), "a: a shape of 9 sizes; at most 8"),
    "long sizes": (changed(0, shape=["x" * 9999]), "^a: shape holds 'x{99}, which is not a size$"),
    "long name": (changed(0, name="x" * 9999), "^there is no input 'x{99}; known: a"),
    "long output": (ONE | {"outputs": [{"name": "x" * 9999}]}, "^there is no output 'x{99}; known: ctr"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_request_is_said(served, case):
    told, words = WRONG[case]
    content = told if isinstance(told, bytes) else json.dumps(told).encode()
    answer = served.ask("POST", INFER, content=content)
    assert answer.status_code == 400 and re.search(words, answer.json()["error"]), answer.text


def test_a_version_without_statistics_of_rows_asks_for_the_values_of_the_slot(served):
    slots = [
        slot | ({"statistics": {"of": ["a"]}} if slot["name"] == "d" else {}) for slot in served.job.model["slots"]
    ]
    model = ServingModel(served.job.model | {"slots": slots}, DenseGraph(served.job.onnx).open())
    inputs = replace(model.empty(), left_out=("d",))
    for memories in (Memories(), Memories(frozenset({"statistics-a"}))):  # the second lacks the day and the rates
        with pytest.raises(
            MemoryMissing, match="'d' is missing, and this version came without statistics: send its va"
        ):
            filled(model, {}, inputs, memories)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["a", "d", "UINT64"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "datatype", "shape", "data", "inputs", "outputs", "id"]), inner)
    ),
    max_leaves=12,
)
INPUT = st.fixed_dictionaries({"name": JUNK, "datatype": JUNK, "shape": JUNK, "data": JUNK})


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("served")).serve(1)
    return InferenceHandler(served.state, served.figures, 10, 1 << 20)


REQUESTS = st.dictionaries(st.sampled_from(["inputs", "outputs", "id"]), JUNK | st.lists(INPUT, max_size=3))


@settings(max_examples=200)
@given(REQUESTS, st.integers(0, 3))
def test_whatever_is_sent_gets_an_answer_in_words(answers, told, at):
    status, body, _ = answers.infer("small", None, json.dumps(told).encode())
    assert status == 400 and json.loads(body)["error"]
    name = ["name", "datatype", "shape", "data"][at]
    inputs = [dict(each) for each in ONE["inputs"]]
    inputs[at][name] = told
    status, body, _ = answers.infer("small", None, json.dumps({"inputs": inputs}).encode())
    assert status == 400 and json.loads(body)["error"]


def test_nothing_is_ready_until_a_version_is_there(tmp_path):
    served = Served(tmp_path)
    assert served.ask("GET", "/v2/health/live").json() == {"live": True}
    for path in ("/v2/health/ready", "/v2/models/small", "/v2/models/small/ready"):
        answer = served.ask("GET", path)
        assert answer.status_code == 503 and "no version is loaded" in answer.json()["error"]
    assert served.infer(ONE).status_code == 503
    served.serve(1)
    assert served.ask("GET", "/v2/health/ready").json() == {"ready": True}
    assert served.ask("GET", "/v2/models/small/ready").json() == {"name": "small", "ready": True}
    assert served.infer(ONE).status_code == 200


def test_a_model_tells_what_it_reads_and_says(served):
    told = served.ask("GET", "/v2/models/small").json()
    assert told["inputs"] == [
        {"name": "a", "datatype": "UINT64", "shape": [-1, -1]},
        {"name": "b", "datatype": "BYTES", "shape": [-1, -1]},
        {"name": "b.weight", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "history", "datatype": "UINT64", "shape": [-1, -1]},
        {"name": "d", "datatype": "FP32", "shape": [-1, 2]},
    ]
    assert told["outputs"] == [{"name": "ctr", "datatype": "FP32", "shape": [-1]}]
    assert (told["name"], told["versions"], told["platform"]) == ("small", ["1", "2"], "headrace_onnx")
    assert told["parameters"]["version"] == "2" and told["parameters"]["held_back"] is False
    assert {"binary_tensor_data", "rollback"} < set(served.ask("GET", "/v2").json()["extensions"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v2/models/other", "there is no model 'other'; this replica serves 'small'"),
        ("/v2/models/small/versions/1", "version 1 is not served, but 2; it is kept: roll back to it first"),
        ("/v2/models/small/versions/9/ready", "it is not kept either"),
        ("/v2/nothing", "Not Found"),
    ],
)
def test_what_is_not_served_is_named(served, path, words):
    answer = served.ask("GET", path)
    assert answer.status_code == 404 and words in answer.json()["error"]


def test_a_version_is_gone_back_to_until_somebody_follows_again(served):
    now = served.infer(ONE).json()
    answer = served.ask("POST", "/v2/models/small/rollback", {"version": 1})
    assert answer.json() == {"name": "small", "version": "1", "timeline": "t1", "held_back": True}
    assert served.infer(ONE).json()["model_version"] == "1"
    assert served.infer(ONE, "/v2/models/small/versions/1/infer").status_code == 200
    assert served.infer(ONE, "/v2/models/small/versions/2/infer").status_code == 404
    assert served.ask("POST", "/v2/models/small/follow").json()["version"] == "2"
    assert served.infer(ONE).json() == now
    missing = served.ask("POST", "/v2/models/small/rollback", {"version": 7})
    assert missing.status_code == 404 and "versions: 1, 2" in missing.json()["error"]
    for wrong in ({}, {"version": "x"}, {"version": 1, "more": 2}, []):
        assert served.ask("POST", "/v2/models/small/rollback", wrong).status_code == 400


def test_versions_of_a_timeline_that_was_left_are_told_apart(served):
    """After a rewind numbers come again: those of before have their timeline's name behind them."""
    served.state.apply(served.job.update(2, timeline="t2", whole=True))
    assert served.ask("GET", "/v2/models/small").json()["versions"] == ["1@t1", "2@t1", "2"]
    assert served.infer(ONE).json()["model_version"] == "2"
    answer = served.ask("POST", "/v2/models/small/rollback", {"version": 2, "timeline": "t1"})
    assert answer.json() == {"name": "small", "version": "2", "timeline": "t1", "held_back": True}
    assert served.infer(ONE, "/v2/models/small/versions/2@t1/infer").json()["model_version"] == "2@t1"
    newest = served.infer(ONE, "/v2/models/small/versions/2/infer")
    assert newest.status_code == 404 and "version 2 is not served, but 2@t1; it is kept" in newest.json()["error"]
    assert served.ask("POST", "/v2/models/small/rollback", {"version": 2}).json()["timeline"] == "t2"


def test_a_rollback_is_read_whatever_its_body_is_called(served):
    """curl -d calls it a form; some send no name at all. What is wrong with it is said without a place it has not."""
    rollback = "/v2/models/small/rollback"
    form = "application/x-www-form-urlencoded"
    assert served.ask("POST", rollback, {"version": 1}, kind=form).json()["version"] == "1"
    assert served.ask("POST", rollback, {"version": 2}, kind=None).json()["version"] == "2"
    for content, words in ((b"version=1", "Invalid JSON"), (b"[]", "Input should be an object"), (b"{}", "version: ")):
        answer = served.ask("POST", rollback, content=content, kind=form)
        assert answer.status_code == 400 and answer.json()["error"].startswith(words)


# Who may ask, and how much


def batch(num_samples):
    """Little to send, and much to compute."""
    empty = {"shape": [num_samples, 0], "data": []}
    rows = [{"name": name, "datatype": kind} | empty for name, kind in
            [("a", "UINT64"), ("b", "BYTES"), ("history", "UINT64")]]  # fmt: skip
    return {
        "inputs": [*rows, {"name": "d", "datatype": "FP32", "shape": [num_samples, 2], "data": [0, 1] * num_samples}]
    }


def test_outputs_and_samples_together_are_bounded(served, monkeypatch):
    monkeypatch.setattr(inference_messages, "MAX_VALUES", 20)
    assert served.infer(batch(10) | {"outputs": [{"name": "ctr"}]}).status_code == 200
    reader = inference_messages.RequestReader(served.state.model(), 100)
    with pytest.raises(
        inference_messages.InvalidInference, match="1 outputs of 21 samples are more than 20 numbers; send fewer"
    ):
        reader.outputs({}, 21)


def test_long_outputs_of_few_samples_are_bounded(served, monkeypatch):
    """Such as the best thousand items of each sample."""
    monkeypatch.setattr(inference_messages, "MAX_VALUES", 20)
    found = {"ctr": np.zeros(3, np.float32), "items": np.zeros((3, 7), np.float32)}
    with pytest.raises(inference_messages.InvalidInference, match="outputs have 24 numbers, more than 20; send fewer"):
        inference_messages.checked_outputs(found, ["ctr", "items"])
    assert list(inference_messages.checked_outputs(found, ["ctr"])) == ["ctr"]


def test_a_wide_network_takes_fewer_samples_at_a_time(served, monkeypatch):
    """A softmax over millions of items has a number of each for every sample."""
    widest = served.state.model().graph.widest
    assert 1 < widest < 1000
    monkeypatch.setattr(inference_messages, "MAX_ACTIVATIONS", 3 * widest)
    reader = inference_messages.RequestReader(served.state.model(), 100)
    assert reader.inputs(batch(3)).num_samples == 3
    with pytest.raises(inference_messages.InvalidInference, match="4 samples in one request; send 1 to 3"):
        reader.inputs(batch(4))


def test_what_costs_much_is_not_answered_where_others_wait_however_short_it_is(served, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    predict = served.state.predict

    def slowly(model, inputs):
        if inputs.num_samples > 1:
            begun.set()
            assert go.wait(20)
        return predict(model, inputs)

    monkeypatch.setattr(served.state, "predict", slowly)
    short, long = json.dumps(ONE).encode(), json.dumps(batch(1000)).encode()
    assert len(short) < len(long) < inference_handler.INLINE_BYTES

    async def go_on():
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090") as client:
            waiting = asyncio.create_task(client.post(INFER, content=long))
            assert await asyncio.to_thread(begun.wait, 20)
            meanwhile = await client.post(INFER, content=short)
            assert meanwhile.status_code == 200 and not waiting.done()
            go.set()
            return await waiting

    answer = asyncio.run(go_on())
    assert answer.status_code == 200 and len(answer.json()["outputs"][0]["data"]) == 1000


@pytest.mark.parametrize(
    "told", [None, [], {}, {"inputs": 3}, {"inputs": [3]}, {"inputs": [{"shape": []}]}, {"inputs": [{"shape": ["x"]}]}]
)
def test_a_request_that_is_none_costs_nothing(served, told):
    assert inference_messages.RequestReader(served.state.model(), 100).cost(told) == 0


def test_the_cost_of_a_request_grows_with_its_samples_up_to_a_batch(served):
    reader = inference_messages.RequestReader(served.state.model(), 100)
    each = reader.cost(batch(1))
    assert each > 0 and reader.cost(batch(7)) == 7 * each and reader.cost(batch(101)) == 100 * each


def test_bodies_and_batches_are_bounded(tmp_path):
    served = Served(tmp_path, max_body="1KiB", max_batch=2).serve(1)
    answer = served.ask("POST", INFER, content=b" " * 2000)
    assert answer.status_code == 413 and "1,024 bytes" in answer.json()["error"]

    async def chunks():
        for _ in range(20):
            yield b" " * 100

    assert served.ask("POST", INFER, content=chunks()).status_code == 413
    rows = [{"name": name, "datatype": kind, "shape": [3, 1], "data": data} for name, kind, data in
            [("a", "UINT64", [1, 2, 3]), ("b", "BYTES", ["x"] * 3), ("history", "UINT64", [1, 2, 3])]]  # fmt: skip
    rows.append({"name": "d", "datatype": "FP32", "shape": [3, 2], "data": [0] * 6})
    answer = served.infer({"inputs": rows})
    assert answer.status_code == 400 and "3 samples in one request; send 1 to 2" in answer.json()["error"]


def test_more_requests_at_once_than_allowed_are_told_to_come_again():
    async def go():
        told, waiting = [], asyncio.Event()

        async def slow(scope, receive, send):
            await waiting.wait()

        door = RequestGate(slow, None, 100, 2, local=False)
        scope = {"type": "http", "path": "/x", "headers": []}

        async def send(message):
            told.append(message)

        under_way = [asyncio.create_task(door(scope, None, send)) for _ in range(2)]
        await asyncio.sleep(0)
        await door(scope, None, send)
        assert told[0]["status"] == 503 and b"2 requests are in progress" in told[1]["body"]
        waiting.set()
        await asyncio.gather(*under_way)
        told.clear()
        await door(scope, None, send)
        assert told == []

    asyncio.run(go())


def test_who_is_slow_to_send_keeps_no_place(served, monkeypatch):
    monkeypatch.setattr(access, "BODY_S", 0.01)

    async def never():
        yield b"{"
        await asyncio.sleep(60)

    for path in (INFER, "/v2/models/small/rollback"):
        answer = served.ask("POST", path, content=never())
        assert answer.status_code == 408 and "0.01 s" in answer.json()["error"]
    assert served.app._under_way == 0


def test_a_token_is_asked_for_by_all_but_health(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    served = Served(tmp_path, token_file=str(tmp_path / "token"), listen="0.0.0.0:0").serve(1)
    assert served.ask("GET", "/v2/health/ready").status_code == 200
    for headers in (None, {"Authorization": "Bearer 0123456789abcdeX"}, {"Authorization": "0123456789abcdef"}):
        for path in ("/v2", "/metrics", "/v2/models/small"):
            answer = served.ask("GET", path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert served.ask("GET", "/v2", headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 200


def test_pages_of_other_sites_are_not_answered(served):
    assert served.ask("GET", "/v2", headers={"Host": "evil.example"}).status_code == 400
    assert served.ask("GET", "/v2", headers={"Host": "localhost:9"}).status_code == 200
    two = httpx.Headers([("Host", "localhost"), ("Host", "evil.example")])
    assert served.ask("GET", "/v2", headers=two).status_code == 400
    follow = "/v2/models/small/follow"
    assert served.ask("POST", follow, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    for origin in ("http://evil.example", "http://127.0.0.1:3000", "null"):  # of a browser that sends no Sec-Fetch-Site
        for method, path in (("POST", follow), ("POST", INFER), ("GET", "/metrics")):
            assert served.ask(method, path, headers={"Origin": origin}).status_code == 403
    assert served.ask("POST", follow, headers={"Origin": "http://127.0.0.1:8090"}).status_code == 200


def test_pages_of_other_sites_are_not_answered_by_a_replica_that_anyone_may_ask(tmp_path):
    served = Served(tmp_path, listen="0.0.0.0:0", anyone=True).serve(1)
    assert served.ask("GET", "/v2", headers={"Host": "replica.example"}).status_code == 200
    assert served.ask("GET", "/v2", headers={"Origin": "http://evil.example"}).status_code == 403


def test_only_loopback_is_listened_on_without_a_token(tmp_path):
    config = lambda **told: validate(ReplicaConfig, {"exports": "x", **told})  # noqa: E731
    assert config(listen="localhost:1").token() is None and config(listen="[::1]:1").token() is None
    with pytest.raises(SpecError, match="not this machine's loopback"):
        config(listen="0.0.0.0:1").token()
    assert config(listen="0.0.0.0:1", anyone=True).token() is None
    (tmp_path / "short").write_text("abc")
    with pytest.raises(SpecError, match="holds no token"):
        config(token_file=str(tmp_path / "short")).token()


def test_a_source_is_named_by_its_option_and_one_live_feed_at_most(tmp_path):
    with pytest.raises(SpecError, match="^name the source to follow: --exports, --feed, --join or --store"):
        validate(ReplicaConfig, {})
    for two in ({"feed": "y", "store": "z"}, {"feed": "y", "join": "h:1"}, {"store": "z", "join": "h:1"}):
        with pytest.raises(SpecError, match="^name one of --feed, --join and --store: each is the live feed"):
            validate(ReplicaConfig, {"exports": "x", **two})
    with pytest.raises(SpecError, match="--feed-token-file: --join needs the join token of the job: name its file"):
        validate(ReplicaConfig, {"join": "10.77.0.10:7070"})
    with pytest.raises(SpecError, match="join: 'head' is not of the form 127.0.0.1:7070"):
        validate(ReplicaConfig, {"join": "head", "feed_token_file": "x"})
    with pytest.raises(SpecError, match="--store: there is no folder y; name the store.path of a job that has started"):
        validate(ReplicaConfig, {"exports": "x", "store": "y"})
    assert validate(ReplicaConfig, {"exports": "x", "store": str(tmp_path)}).exports == "x"


def test_the_metrics_are_the_ones_we_promised(served):
    served.infer(ONE)
    text = served.ask("GET", "/metrics").text
    lines = [line for line in text.splitlines() if "_created" not in line and "_bucket" not in line]
    found = [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]
    assert "\n".join(found) + "\n" == (GOLDEN / "replica_metrics.txt").read_text()
    assert 'headrace_replica_requests_total{code="200"} 1.0' in text
    assert "headrace_replica_samples_total 1.0" in text
