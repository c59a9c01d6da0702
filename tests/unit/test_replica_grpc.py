"""A replica over gRPC: the Open Inference Protocol with a real server and a real channel, its errors, who may call."""

import asyncio
import socket
import struct
import threading
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import validate
from headrace.errors import HeadraceError, SpecError
from headrace.rpc.channels import serialize
from headrace.trainer.proto import open_inference_pb2 as pb
from headrace.trainer.replica import grpc_api
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.grpc_api import GrpcCalls
from tests.fakes.served import asked
from tests.unit.test_access_exposure import write_pair
from tests.unit.test_replica_server import ONE, Served

WITHIN_S = 20
SERVICE = "/inference.GRPCInferenceService/"
FIELDS = {"UINT64": "uint64_contents", "INT64": "int64_contents", "FP32": "fp32_contents", "BYTES": "bytes_contents"}
DTYPES = {"UINT64": "<u8", "INT64": "<i8", "FP32": "<f4"}


@contextmanager
def channel_to(served, *, open_channel=grpc.insecure_channel):
    with grpc_api.serving(served.state, served.answering, served.config) as address, open_channel(address) as channel:
        yield channel


def call(channel, method, request, metadata=(), **more):
    reply = getattr(pb, f"{method}Response")
    made = channel.unary_unary(SERVICE + method, serialize if isinstance(request, Message) else None, reply.FromString)
    return made(request, timeout=WITHIN_S, metadata=metadata, **more)


def refusal(channel, method, request, **more):
    with pytest.raises(grpc.RpcError) as found:
        call(channel, method, request, **more)
    return found.value.code(), found.value.details()


def request_for(tensors, *, raw, **more):
    """A request with these tensors, of the form of JSON."""
    request = pb.ModelInferRequest(model_name="small", **more)
    for each in tensors:
        data = np.array(each["data"], object).ravel().tolist()
        is_text = each["datatype"] == "BYTES"
        data = [value.encode() for value in data] if is_text else data
        tensor = request.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        if not raw:
            getattr(tensor.contents, FIELDS[each["datatype"]]).extend(data)
        elif is_text:
            request.raw_input_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in data))
        else:
            request.raw_input_contents.append(np.array(data, DTYPES[each["datatype"]]).tobytes())
    return request


def over_grpc(folder, **config):
    return Served(folder, grpc_listen="127.0.0.1:0", **config)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return over_grpc(tmp_path_factory.mktemp("served"), max_body="64KiB").serve(1, 2)


@pytest.fixture(scope="module")
def channel(served):
    with channel_to(served) as opened:
        yield opened


@pytest.mark.parametrize("raw", [False, True])
def test_answers_are_the_golden_predictions(served, channel, raw):
    answer = call(channel, "ModelInfer", request_for(asked(served.job.samples), raw=raw, id="seven"))
    assert (answer.model_name, answer.model_version, answer.id) == ("small", "2", "seven")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("ctr", "FP32", [16])
    found = np.frombuffer(answer.raw_output_contents[0], "<f4")
    assert np.abs(found - served.job.predictions()).max() < 1e-5


def test_documents_are_those_of_rest(served, channel):
    of_model = {"name": "small", "version": "2"}
    assert call(channel, "ServerLive", pb.ServerLiveRequest()).live
    assert call(channel, "ServerReady", pb.ServerReadyRequest()).ready
    for name, version, ready in (("small", "", True), ("small", "2", True), ("small", "1", False), ("x", "", False)):
        assert call(channel, "ModelReady", pb.ModelReadyRequest(name=name, version=version)).ready is ready
    server = MessageToDict(call(channel, "ServerMetadata", pb.ServerMetadataRequest()))
    assert server == served.ask("GET", "/v2").json()
    model = call(channel, "ModelMetadata", pb.ModelMetadataRequest(**of_model))
    of_rest = served.ask("GET", "/v2/models/small").json()
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        (each["name"], each["datatype"], each["shape"]) for each in of_rest["inputs"]
    ]
    assert list(model.versions) == of_rest["versions"] and model.platform == of_rest["platform"]
    config = call(channel, "ModelConfig", pb.ModelConfigRequest(**of_model)).config
    of_rest = served.ask("GET", "/v2/models/small/config").json()
    assert config.max_batch_size == of_rest["max_batch_size"] and config.version_policy.latest.num_versions == 1
    assert [list(each.dims) for each in config.input] == [each["dims"] for each in of_rest["input"]]
    index = call(channel, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True)).models
    assert [(each.name, each.version, each.state) for each in index] == [("small", "2", "READY")]


def test_calls_are_counted_as_requests_of_rest_are(tmp_path):
    served = over_grpc(tmp_path).serve(1)
    with channel_to(served) as channel:
        call(channel, "ModelInfer", request_for(ONE["inputs"], raw=True))
        refusal(channel, "ModelInfer", pb.ModelInferRequest(model_name="small"))
        (told,) = call(channel, "ModelStatistics", pb.ModelStatisticsRequest(name="small")).model_stats
        assert (told.inference_count, told.inference_stats.success.count, told.inference_stats.fail.count) == (1, 1, 1)
        assert call(channel, "ModelStatistics", pb.ModelStatisticsRequest()).model_stats[0].name == "small"
    text = served.ask("GET", "/metrics").text
    assert 'requests_total{code="200"} 1.0' in text and 'requests_total{code="400"} 1.0' in text


def changed(raw=True, **changes):
    request = request_for(ONE["inputs"], raw=raw)
    for name, value in changes.items():
        setattr(request.inputs[0], name, value)
    return request


def with_parameter(name):
    request = changed()
    request.outputs.add(name="ctr").parameters[name].int64_param = 1
    return request


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
WRONG = {
    "no message": (b"\xff\xff", INVALID, "the message cannot be read: "),
    "model": (pb.ModelInferRequest(model_name="x"), MISSING, "there is no model 'x'; this replica serves 'small'"),
    "version": (pb.ModelInferRequest(model_name="small", model_version="1"), MISSING, "version 1 is not served"),
    "no inputs": (pb.ModelInferRequest(model_name="small"), INVALID, '"inputs", a list of tensors'),
    "name": (changed(name="aa"), INVALID, "there is no input 'aa'; did you mean 'a'"),
    "datatype": (changed(datatype="FP64"), INVALID, "a: is FP64, and must be UINT64"),
    "contents": (changed(raw=False, datatype="FP16"), INVALID, "'a': contents cannot be of type 'FP16'; send it raw"),
    "other field": (changed(raw=False, datatype="INT64"), INVALID, "a: data has 0 values, the shape [1, 2] has 2"),
    "output": (with_parameter("classification"), INVALID, "neither shared memory nor classification"),
    "many inputs": (
        b"\x0a\x05small" + b"\x2a\0" * 20_000,
        INVALID,
        "20000 inputs or outputs in one request; at most 16384",
    ),
    "too long": (b"x" * 100_000, grpc.StatusCode.RESOURCE_EXHAUSTED, "(100000 vs. 65536)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_call_is_said(channel, case):
    request, code, words = WRONG[case]
    found, details = refusal(channel, "ModelInfer", request)
    assert found == code and words in details


def test_raw_contents_are_of_all_inputs_or_none(channel):
    request = changed()
    del request.raw_input_contents[0]
    code, details = refusal(channel, "ModelInfer", request)
    assert code == INVALID and details == "3 raw_input_contents for 4 inputs; send all or none raw"


def test_a_message_may_not_expand_beyond_the_limit(channel):
    code, _ = refusal(channel, "ModelInfer", bytes(1 << 20), compression=grpc.Compression.Gzip)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(channel, "ModelInfer", changed(), compression=grpc.Compression.Gzip).outputs


def test_nothing_is_ready_until_a_version_is_there(tmp_path):
    served = over_grpc(tmp_path)
    with channel_to(served) as channel:
        assert not call(channel, "ServerReady", pb.ServerReadyRequest()).ready
        assert not call(channel, "ModelReady", pb.ModelReadyRequest(name="small")).ready
        code, details = refusal(channel, "ModelMetadata", pb.ModelMetadataRequest(name="small"))
        assert code == grpc.StatusCode.UNAVAILABLE and "no version is loaded" in details


def test_who_is_slow_to_send_is_refused_and_keeps_no_thread(served, channel, monkeypatch):
    monkeypatch.setattr(grpc_api, "BODY_S", 0.3)

    held = threading.Semaphore(0)

    def never():
        held.acquire()
        yield b""

    slow = channel.stream_unary(SERVICE + "ModelInfer")
    waiting = [slow.future(never(), timeout=WITHIN_S) for _ in range(20)]
    assert call(channel, "ModelInfer", request_for(ONE["inputs"], raw=True)).outputs
    for each in waiting:
        assert each.exception(WITHIN_S).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    held.release(20)
    assert refusal(channel, "ModelInfer", b"")[0] == MISSING  # an empty message names no model


def test_a_token_is_asked_for_by_all_but_health(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    served = over_grpc(tmp_path, token_file=str(tmp_path / "token")).serve(1)
    with channel_to(served) as channel:
        assert call(channel, "ServerReady", pb.ServerReadyRequest()).ready
        asked_for = pb.ModelMetadataRequest(name="small")
        for metadata in ((), (("authorization", "Bearer 0123456789abcdeX"),), (("authorization", "0123456789abcdef"),)):
            code, details = refusal(channel, "ModelMetadata", asked_for, metadata=metadata)
            assert code == grpc.StatusCode.UNAUTHENTICATED and "authorization: Bearer" in details
        token = (("authorization", "Bearer 0123456789abcdef"),)
        assert call(channel, "ModelMetadata", asked_for, metadata=token).name == "small"


def test_calls_are_encrypted_with_the_certificate_of_https(tmp_path):
    cert, key = write_pair(tmp_path, "ours")
    served = over_grpc(tmp_path, tls_cert=str(cert), tls_key=str(key)).serve(1)
    trusting = grpc.ssl_channel_credentials(cert.read_bytes())
    override = [("grpc.ssl_target_name_override", "localhost")]
    with channel_to(served, open_channel=lambda at: grpc.secure_channel(at, trusting, override)) as channel:
        assert call(channel, "ServerReady", pb.ServerReadyRequest()).ready
    with channel_to(served) as channel:
        assert refusal(channel, "ServerReady", pb.ServerReadyRequest())[0] == grpc.StatusCode.UNAVAILABLE


def test_the_address_needs_a_token_off_loopback_and_must_be_free(tmp_path, served):
    config = validate(ReplicaConfig, {"exports": "x", "grpc_listen": "0.0.0.0:1"})
    with pytest.raises(SpecError, match=r"--grpc-listen: '0.0.0.0' is not this machine's loopback"):
        config.token()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        config = validate(ReplicaConfig, {"exports": "x", "grpc_listen": at})
        with (
            pytest.raises(SpecError, match=f"--grpc-listen: {at} is not available: choose another port"),
            grpc_api.serving(served.state, served.answering, config),
        ):
            pass


REQUEST = changed().SerializeToString()


@settings(max_examples=100)
@given(st.binary(max_size=30), st.integers(0, len(REQUEST)), st.integers(0, 5))
def test_whatever_is_sent_is_answered_or_refused_in_words(served, junk, place, cut):
    content = REQUEST[:place] + junk + REQUEST[place + cut :]
    try:
        assert asyncio.run(GrpcCalls(served.state, served.answering).ModelInfer(content)).outputs
    except HeadraceError as error:
        assert grpc_api.refusal_of(error)[0] in (400, 404)
    except DecodeError as error:
        assert "message" in str(error)
