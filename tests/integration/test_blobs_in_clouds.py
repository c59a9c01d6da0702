"""Buckets of Google Cloud Storage and Azure: where requests go, who signs them, what is told where they are refused."""

import logging
import os

import pytest

from headrace.blob import blob_retry
from headrace.blob import bucket as bucket_module
from headrace.blob.azure import AzureBlobs, account_endpoint
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_store import open_blobs, whole
from headrace.blob.bucket import endpoint_of
from headrace.blob.gcs import HOST, GcsBlobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.retry import Backoff
from headrace.trainer.checkpoint.object_store import ObjectStore
from headrace.trainer.journal.fence import FenceClaim, LogMode, check_conditional_puts
from headrace.trainer.journal.log import Superseded
from tests.object_servers import GcsHandler, azure, gcs  # noqa: F401
from tests.s3_server import Proxy


def soon():
    return Deadline.after(30.0)


def opened(uri):
    return open_blobs(parse(uri), "mirror", soon())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Tries follow each other at once."""
    monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.02,)))
    monkeypatch.setattr(bucket_module, "CLIENT_TRIES", 1)


@pytest.fixture(params=["gcs", "azure"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def trap(server):
    """A port that nothing may connect to; it would even work."""
    trap = Proxy(server.port)
    yield trap
    trap.close()


# -- where requests go


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("gs://bucket/p", "https://storage.googleapis.com"),
        ("gs://bucket/p?endpoint_override=localhost:4443&scheme=http", "http://localhost:4443"),
        ("az://c0/p?account=name", "https://name.blob.core.windows.net"),
        ("abfss://c0@name.dfs.core.windows.net/p", "https://name.blob.core.windows.net"),
        ("az://c0/p?account=name&endpoint_override=localhost:10000", "https://localhost:10000/name"),
        (
            "az://c0/p?account=name&endpoint_override=name.blob.core.chinacloudapi.cn",
            "https://name.blob.core.chinacloudapi.cn",
        ),
    ],
)
def test_requests_go_where_the_address_says(text, endpoint):
    address = parse(text)
    assert (endpoint_of(address, HOST) if text.startswith("gs") else account_endpoint(address)) == endpoint


def test_nothing_in_the_environment_sends_requests_elsewhere(server, trap, monkeypatch):
    away = f"http://127.0.0.1:{trap.port}"
    for name in ("HTTP_PROXY", "ALL_PROXY", "GOOGLE_BASE_URL", "GOOGLE_BUCKET", "GOOGLE_PROXY_URL", "AZURE_ENDPOINT"):
        monkeypatch.setenv(name, away)
    for name in ("AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL", "AZURE_PROXY_URL"):
        monkeypatch.setenv(name, away)
    for name in ("AZURE_STORAGE_USE_EMULATOR", "AZURE_USE_FABRIC_ENDPOINT"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    blobs = opened(server.uri("bucket", "env"))
    blobs.put("a", whole(b"1"), soon())
    assert blobs.get("a", 10, soon()) == b"1" and trap.num_connections == 0


# -- what is told


def test_a_bucket_that_does_not_exist_is_named(server):
    with pytest.raises(BlobUnavailable, match="there is none of this name; make it first"):
        opened(server.uri("nowhere", "p"))


@pytest.mark.parametrize(
    ("blobs", "asked", "said"),
    [
        (GcsBlobs, "GET http://metadata.google.internal/computeMetadata/v1/instance", "no credentials: set GOOGLE_"),
        (
            GcsBlobs,
            "POST https://accounts.google.com/o/oauth2/token",
            "POST https://accounts.google.com/o/oauth2/token",
        ),
        (AzureBlobs, "GET http://169.254.169.254/metadata/identity/oauth2/token", "no credentials: set AZURE_"),
        (AzureBlobs, "POST https://login.microsoftonline.com/t/oauth2/v2.0/token", "POST https://login.microsoft"),
    ],
)
def test_credentials_that_are_refused_are_not_said_to_be_missing(blobs, asked, said):
    """The machine is asked for credentials where the environment has none."""
    assert said in blobs._explained(OSError(f"Error performing token request: Error performing {asked} in 1s"))


@pytest.mark.parametrize("name", ["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN"])
def test_no_message_and_no_log_holds_a_secret(name, azure, gcs, monkeypatch, caplog):  # noqa: F811
    server = gcs if name.startswith("GOOGLE") else azure
    if server is azure and "HEADRACE_AZURITE" in os.environ:
        pytest.skip("it knows the keys of its account, and refuses invented ones at once")
    secret = {"AZURE_STORAGE_SAS_TOKEN": "sv=2023-11-03&sig=aHVudGVyMg", "AZURE_STORAGE_ACCOUNT_KEY": "aHVudGVyMg=="}
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv(name, secret.get(name, "aHVudGVyMg"))
    caplog.set_level(logging.DEBUG)
    way = Proxy(server.port)
    try:
        blobs = opened(server.uri("bucket", "p", way.port))
        way.cut_after(0)
        with pytest.raises(BlobUnavailable) as cut:
            blobs.put("a", whole(b"1"), soon())
        way.heal()
        way.refuse(10)
        with pytest.raises(BlobUnavailable) as refused:
            blobs.get("a", 10, soon())
        with pytest.raises(BlobUnavailable) as elsewhere:
            opened(server.uri("nowhere", "p"))
    finally:
        way.close()
    for error in (cut.value, refused.value, elsewhere.value):
        assert "\n" not in str(error) and "aHVudGVyMg" not in f"{error} {error.__cause__!r}"
    assert "aHVudGVyMg" not in caplog.text + repr(blobs)


# -- conditional puts, on which `store.parts = "object"` rests


def test_a_job_is_claimed_once(server):
    store = ObjectStore.open(server.uri("bucket", "claimed"), soon())
    first, second = store.sequence(1), store.sequence(2)
    for head in (first, second):
        head.catch_up(soon())
        head.claim(FenceClaim(log_id="a", timeline=f"t{head.generation}", mode=LogMode.ASYNC), soon())
    with pytest.raises(Superseded):
        first.check_newest(soon())


def test_a_server_that_ignores_conditions_is_refused(gcs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(GcsHandler, "_check_generation", lambda *_: None)
    with pytest.raises(SpecError, match="does not know conditional puts"):
        check_conditional_puts(opened(gcs.uri("bucket", "ignored")), "store.parts", soon())
