"""The bench of a replica still runs: its recorded feed is served, and its requests are answered."""

from headrace.deadline import Deadline
from headrace.trainer.replica.inference_handler import BodyHeaders, InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from tests.bench import serving, serving_peer


def test_the_recorded_feed_is_served_and_the_requests_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "CHANGED", 50)
    monkeypatch.setattr(serving, "EVERY_S", 0.0)
    serving.record(tmp_path, 1000, 2)
    state, feed = ReplicaState(5, 1 << 30), serving.Recorded(tmp_path)
    for version in (1, 2, 3):
        assert state.apply(feed.next(Deadline.after(5))).version.number == version
    answering = InferenceHandler(state, ReplicaMetrics(state), 1, 1 << 20)
    for request in serving.bodies(1000, 3):
        status, body, _ = answering.infer("bench", None, request.partition(b"\r\n\r\n")[2])
        assert status == 200 and b'"model_version": "3"' in body


def test_the_requests_beside_a_peer_are_answered_as_short_ones_are(tmp_path):
    serving.record(tmp_path, 1000, 0)
    state = ReplicaState(5, 1 << 30)
    state.apply(serving.Recorded(tmp_path).next(Deadline.after(5)))
    answering = InferenceHandler(state, ReplicaMetrics(state), 4, 1 << 20)
    for num_samples in (1, 3):
        (request,) = serving_peer.requests_of("replica", num_samples, 1000, 1)
        head, _, body = request.partition(b"\r\n\r\n")
        length = head.partition(b"Header-Content-Length: ")[2].decode() or None
        status, told, headers = answering.at_once("bench", None, BodyHeaders(), body, length)
        assert status == 200 and (num_samples == 1 or len(told) == int(headers["inference-header-content-length"]) + 12)
