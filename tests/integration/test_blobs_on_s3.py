"""A bucket behind TLS, proxies, profiles and silence: where requests go, who signs them, how long they take."""

import logging
import os
import ssl
import threading
import time
import uuid

import boto3
import httpx
import pytest

from headrace.blob import blob_retry
from headrace.blob import bucket as bucket_module
from headrace.blob import s3 as s3_module
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_store import CHUNK_BYTES, open_blobs, whole
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.retry import Backoff
from tests.s3_server import ENVIRONMENT, Proxy, proxy, s3  # noqa: F401
from tests.unit.test_access_exposure import write_pair

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def soon():
    return Deadline.after(30.0)


def opened(uri):
    return open_blobs(parse(uri), "mirror", soon())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Tries follow each other at once, and a silent connection is given up early."""
    monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.02,)))
    monkeypatch.setattr(bucket_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(bucket_module, "SEND_S", 1.0)
    monkeypatch.setattr(bucket_module, "CLIENT_TRIES", 1)


@pytest.fixture
def uri(s3):  # noqa: F811
    return s3.uri("bucket", uuid.uuid4().hex)


# -- where requests go


@pytest.fixture
def trap(s3):  # noqa: F811
    """A port that nothing may connect to; it would even work."""
    trap = Proxy(s3.port)
    yield trap
    trap.close()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_in_the_environment_is_not_used(uri, trap, monkeypatch, name, host):
    monkeypatch.setenv(name, f"http://127.0.0.1:{trap.port}")
    blobs = opened(uri.replace("127.0.0.1", host))
    blobs.put("a", whole(b"1"), soon())
    assert blobs.get("a", 10, soon()) == b"1" and trap.num_connections == 0


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROXY_URL"])
def test_an_endpoint_in_the_environment_does_not_replace_the_one_given(uri, trap, monkeypatch, name):
    monkeypatch.setenv(name, f"http://127.0.0.1:{trap.port}")
    opened(uri).put("a", whole(b"1"), soon())
    assert trap.num_connections == 0


def test_an_endpoint_may_say_its_scheme(uri, s3):  # noqa: F811
    opened(uri).put("a", whole(b"1"), soon())
    prefix = uri.partition("?")[0]
    named = f"{prefix}?endpoint_override=http%3A%2F%2F127.0.0.1%3A{s3.port}&region=us-east-1"
    assert opened(named).get("a", 10, soon()) == b"1"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("s3://bucket/p", "https://bucket.s3.eu-west-1.amazonaws.com"),
        ("s3://a.b/p", "https://s3.eu-west-1.amazonaws.com"),
        ("s3://bucket/p?scheme=http", "http://bucket.s3.eu-west-1.amazonaws.com"),
        ("s3://bucket/p?endpoint_override=localhost:9000", "https://localhost:9000"),
    ],
)
def test_requests_go_where_the_address_says(text, endpoint):
    assert s3_module._endpoint(parse(text), "eu-west-1") == endpoint


def test_a_bucket_in_china_has_a_host_there():
    assert s3_module._endpoint(parse("s3://b0/p"), "cn-north-1") == "https://b0.s3.cn-north-1.amazonaws.com.cn"


# -- the region


@pytest.fixture
def amazon(monkeypatch):
    """What Amazon answers: headers, or an error."""
    asked, answers, real = [], [], httpx.Client

    def answer(request):
        asked.append(str(request.url))
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return httpx.Response(301, headers=answers[-1])

    monkeypatch.setattr(httpx, "Client", lambda **more: real(transport=httpx.MockTransport(answer), **more))
    return asked, answers


def test_an_address_without_options_has_the_region_of_its_bucket(amazon):
    asked, answers = amazon
    answers.append({"x-amz-bucket-region": "eu-west-1"})
    assert s3_module._region_of(parse("s3://bucket/prefix")) == "eu-west-1"
    assert asked == ["https://s3.amazonaws.com/bucket"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [({}, "Amazon knows no region of the bucket bucket"), (httpx.ConnectError("no route"), "connecting: no route")],
)
def test_a_region_that_cannot_be_found_is_reported(amazon, answer, words):
    amazon[1].append(answer)
    with pytest.raises(BlobUnavailable, match=words):
        opened("s3://bucket/prefix")


def test_a_server_of_ones_own_is_not_asked_at_amazon(amazon, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    assert s3_module._region_of(parse("s3://bucket/p?endpoint_override=localhost:9000")) is None
    assert s3_module._region_of(parse("s3://bucket/p?region=eu-north-1")) == "eu-north-1"
    assert amazon[0] == []


# -- credentials


def test_credentials_of_a_profile_sign_requests(uri, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for name in KEYS:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    blobs = opened(uri)
    blobs.put("a", whole(b"1"), soon())
    assert blobs.get("a", 10, soon()) == b"1"
    assert not caplog.text, "each client would say where it found them"


def test_without_credentials_the_error_says_what_to_set(uri, monkeypatch, tmp_path):
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(BlobUnavailable, match="no credentials: set AWS_ACCESS_KEY_ID"):
        opened(uri)


def test_no_message_and_no_log_holds_a_secret(s3, proxy, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hunter2-token")
    caplog.set_level(logging.DEBUG)
    blobs = opened(s3.uri("bucket", "p", proxy.port))
    proxy.cut_after(0)
    with pytest.raises(BlobUnavailable) as caught:
        blobs.put("a", whole(b"1"), soon())
    with pytest.raises(BlobUnavailable) as elsewhere:
        opened(s3.uri("nowhere", "p"))
    for shown in (str(caught.value), repr(caught.value.__cause__), str(elsewhere.value), repr(blobs), caplog.text):
        assert "hunter2" not in shown
    assert "\n" not in str(caught.value)


# -- TLS


class TlsProxy(Proxy):
    """Ends TLS before the server."""

    def __init__(self, port, context):
        super().__init__(port)
        self._context = context

    def _serve(self, near):
        try:
            near = self._context.wrap_socket(near, server_side=True)
        except OSError:
            return
        super()._serve(near)


def test_a_servers_certificate_is_checked_against_the_authority_given(s3, tmp_path):  # noqa: F811
    cert, key = write_pair(tmp_path, "ours")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    secured = TlsProxy(s3.port, context)
    plain = f"s3://bucket/tls?endpoint_override=localhost%3A{secured.port}&region=us-east-1"
    try:
        with pytest.raises(BlobUnavailable, match="looking for the bucket"):
            opened(plain)
        os.environ["AWS_ALLOW_INVALID_CERTIFICATES"] = "true"
        with pytest.raises(BlobUnavailable, match="looking for the bucket"):
            opened(plain)
        blobs = opened(f"{plain}&tls_ca_file_path={cert}")
        blobs.put("a", whole(b"1"), soon())
        assert blobs.get("a", 10, soon()) == b"1"
        with pytest.raises(BlobUnavailable, match="connecting: .*No such file"):
            opened(f"{plain}&tls_ca_file_path={tmp_path}/none.pem")
    finally:
        os.environ.pop("AWS_ALLOW_INVALID_CERTIFICATES", None)
        secured.close()


# -- other writers, silence


def test_folder_markers_of_other_programs_are_no_blobs(s3, uri):  # noqa: F811
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3.port}", region_name="us-east-1")
    prefix = parse(uri).root.partition("/")[2]
    for key in ("files/", "files/a", "files/empty/"):
        client.put_object(Bucket="bucket", Key=f"{prefix}/{key}", Body=b"")
    blobs = opened(uri)
    assert blobs.sizes("files", soon()) == {"a": 0} and blobs.folders("", soon()) == ["files"]


@pytest.mark.parametrize("num_bytes", [10, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_a_silent_server_ends_a_put_soon_after_its_deadline(s3, proxy, num_bytes):  # noqa: F811
    blobs = opened(s3.uri("bucket", "silent", proxy.port))
    proxy.stall()
    began_s = time.monotonic()
    with pytest.raises(BlobUnavailable):
        blobs.put("a", lambda: (b"x" * min(num_bytes, CHUNK_BYTES) for _ in range(0, num_bytes, CHUNK_BYTES)), soon())
    assert time.monotonic() - began_s < 10


def test_giving_up_ends_a_large_put_at_its_next_chunk(s3):  # noqa: F811
    blobs, given = opened(s3.uri("bucket", "given-up")), threading.Event()

    def chunks():
        for number in range(100):
            if number == 3:
                blobs.give_up()
                given.set()
            yield b"x" * CHUNK_BYTES

    with pytest.raises(BlobUnavailable, match="given up, as the process ends"):
        blobs.put("a", chunks, soon())
    assert given.is_set()
