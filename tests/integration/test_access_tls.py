"""The API over TLS: a real handshake, and clients that fail it."""

import socket
import ssl

import httpx
import pytest
from fastapi import FastAPI

from headrace.errors import Refused
from headrace.service.api.server import bound, serving
from headrace.service.auth.config import AccessSection, TlsSection
from headrace.service.auth.exposure import exposure_of
from headrace.service.python.rest_client import ServiceClient
from tests.unit.test_access_exposure import write_pair


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    cert, key = write_pair(tmp_path_factory.mktemp("tls"), "ours")
    exposure = exposure_of("127.0.0.1:0", AccessSection(), TlsSection(cert=cert, key=key), any_token=True)
    api = FastAPI()
    api.get("/v1/health")(lambda: {"status": "ok"})
    listener = bound("127.0.0.1:0")
    with serving(api, listener, exposure.cert, exposure.key):
        yield listener.getsockname()[1], cert


def test_who_trusts_the_certificate_is_answered(served, monkeypatch):
    port, cert = served
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with ServiceClient(f"https://localhost:{port}") as client:
        assert client.get("/v1/health") == {"status": "ok"} and client.private


def test_who_does_not_trust_it_sends_nothing_and_is_told_at_once(served):
    with ServiceClient(f"https://localhost:{served[0]}", "mlr_secret") as client:
        with pytest.raises(Refused, match="SSL_CERT_FILE"):
            client.get("/v1/health")


def test_a_certificate_of_another_name_is_none(served, monkeypatch):
    port, cert = served
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with ServiceClient(f"https://127.0.0.1:{port}") as client, pytest.raises(Refused, match="not trusted"):
        client.get("/v1/health")


def test_what_is_not_encrypted_is_not_answered(served):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://localhost:{served[0]}/v1/health")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_are_not_spoken(served, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", served[0]), 10) as connection, pytest.raises(ssl.SSLError):
        context.wrap_socket(connection)
