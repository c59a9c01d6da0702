"""A replica over HTTPS: a real handshake, and certificates that are refused before anything is served."""

import socket
import ssl
from types import SimpleNamespace

import httpx
import pytest

from headrace.config import validate
from headrace.errors import SpecError
from headrace.http.listening import ConnectionBounds, listen
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.http_api import gated, serving
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from tests.unit.test_access_exposure import write_pair

QUIET = SimpleNamespace(refused="", trouble="")


def config(**more):
    return validate(ReplicaConfig, {"exports": "x", "listen": "127.0.0.1:0", **more})


def api(state, told):
    figures = ReplicaMetrics(state)
    return gated(state, QUIET, figures, told, InferenceHandler(state, figures, told.max_batch, told.max_body))


def test_who_trusts_the_certificate_is_answered_and_nobody_in_the_clear(tmp_path):
    cert, key = write_pair(tmp_path, "ours")
    told, state = config(tls_cert=str(cert), tls_key=str(key)), ReplicaState(5, 1 << 30)
    listener = listen(*told.address, "--listen")
    port = listener.getsockname()[1]
    with serving(api(state, told), listener, told.tls()):
        trusting = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"https://localhost:{port}/v2/health/live", verify=trusting).json() == {"live": True}
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{port}/v2/health/live")


def test_connections_that_begin_no_handshake_give_way(tmp_path):
    cert, key = write_pair(tmp_path, "ours")
    told, state = config(tls_cert=str(cert), tls_key=str(key)), ReplicaState(5, 1 << 30)
    listener = listen(*told.address, "--listen")
    listener.room = ConnectionBounds(answered=8, open=9)
    with serving(api(state, told), listener, told.tls()):
        silent = [socket.create_connection(listener.getsockname(), 10) for _ in range(20)]
        trusting = ssl.create_default_context(cafile=str(cert))
        live = f"https://localhost:{listener.getsockname()[1]}/v2/health/live"
        assert httpx.get(live, verify=trusting).json() == {"live": True}
        assert silent[0].recv(1) == b""
        for each in silent:
            each.close()


def test_without_files_there_is_none():
    assert config().tls() is None


def test_what_is_no_pair_is_refused_by_its_option(tmp_path):
    (cert, key), (other, _) = write_pair(tmp_path, "ours"), write_pair(tmp_path, "other")
    with pytest.raises(SpecError, match="--tls-cert.*name both"):
        config(tls_cert=str(cert)).tls()
    with pytest.raises(SpecError, match="not a certificate and its key"):
        config(tls_cert=str(other), tls_key=str(key)).tls()
    key.chmod(0o644)
    with pytest.raises(SpecError, match="--tls-key.*chmod 600"):
        config(tls_cert=str(cert), tls_key=str(key)).tls()
