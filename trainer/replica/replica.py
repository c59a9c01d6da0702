"""Runs a replica: a source, a state, the thread that applies updates, the server."""

import gc
import logging
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from prometheus_client import disable_created_metrics

from headrace.deadline import Deadline
from headrace.http.listening import Listener, listen
from headrace.http.open_pages import health_served
from headrace.lifecycle import stop_flag
from headrace.trainer.replica import feed_address
from headrace.trainer.replica.candidate_ranking import CandidateRanker
from headrace.trainer.replica.config import ReplicaConfig, read_token
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.feed_updates import FeedUpdates, FeedWithExports
from headrace.trainer.replica.grpc_api import serving as grpc_serving
from headrace.trainer.replica.http_api import gated, lacks, serving
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.item_indexer import ItemIndexer
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState, ServedVersion
from headrace.trainer.replica.request_templates import compile_kernels
from headrace.trainer.replica.update_loop import ReplicaSource, UpdateLoop
from headrace.trainer.replica.updates import ReplicaUpdate, ReplicaUpdates

SWITCH_S = 0.0005
"""Interval of thread switches of the interpreter: requests wait for the update thread no longer than this."""
STOP_S = 10.0
"""Longest wait for the end of the update thread."""

log = logging.getLogger(__name__)


class RestartingSource:
    """A source that cannot return to an older version: it restarts with a whole update."""

    def __init__(self, begin: Callable[[], ReplicaUpdates]) -> None:
        self._begin, self._lock, self._closed = begin, threading.Lock(), False
        self._updates = begin()

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        return self._updates.next(deadline)

    def resume(self, served: ServedVersion | None) -> None:
        with self._lock:
            if not self._closed:
                self._updates.close()
                self._updates = self._begin()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._updates.close()


def run(config: ReplicaConfig) -> None:
    """Serve until a signal. Raises SpecError."""
    sys.setswitchinterval(SWITCH_S)
    pa.set_cpu_count(1)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    indexer = ItemIndexer(config.items)
    state = ReplicaState(config.keep_versions, config.keep_memory, indexer)
    figures = ReplicaMetrics(state)
    with stop_flag() as stopping, tempfile.TemporaryDirectory(prefix="headrace-replica-") as scratch:
        source = source_of(config, Path(scratch) / "fetched")
        keeper = UpdateLoop(source, state, figures)
        answering = InferenceHandler(state, figures, config.max_batch, config.max_body)
        rankers = [
            _ranking(config.ranker(each), Path(scratch) / f"ranker-{n}") for n, each in enumerate(config.rankers)
        ]
        scorers = [CandidateRanker(each.state) for each in rankers]
        api, tls = gated(state, keeper, figures, config, answering, scorers), config.tls()
        listener = listen(*config.address, "--listen")
        thread = threading.Thread(target=keeper.run, args=(stopping,), name="updates", daemon=True)
        catalogue = threading.Thread(target=indexer.follow, args=(state, stopping), name="catalogue", daemon=True)
        others = [
            threading.Thread(target=each.loop.run, args=(stopping,), name="ranker", daemon=True) for each in rankers
        ]
        for each in (thread, catalogue, *others):
            each.start()
        compile_kernels()
        gc.collect()
        gc.freeze()  # otherwise each collection scans all loaded modules while requests wait
        health = health_served(config.health, lambda: lacks(state, keeper))
        with serving(api, listener, tls), grpc_serving(state, answering, config), health:
            _publish_address(listener, config)
            stopping.wait()
        for followed in (source, *(each.source for each in rankers)):
            followed.close()
        for each in (thread, *others):
            each.join(STOP_S)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """A ranking model with the source and the loop that follow its job."""

    state: ReplicaState
    source: ReplicaSource
    loop: UpdateLoop


def _ranking(config: ReplicaConfig, scratch: Path) -> _Ranking:
    """Raises SpecError."""
    state, source = ReplicaState(config.keep_versions, config.keep_memory), source_of(config, scratch)
    return _Ranking(state, source, UpdateLoop(source, state, ReplicaMetrics(state)))


def source_of(config: ReplicaConfig, scratch: Path) -> ReplicaSource:
    """The source to follow. Raises SpecError."""
    exports = None if config.exports is None else ExportUpdates(config.exports, scratch, config.poll)
    if exports is not None and config.store is None and config.feed is None and config.join is None:
        return exports
    if config.store is not None:
        find = feed_address.in_store(config.store)
    elif config.join is not None:
        assert config.feed_token_file is not None
        find = feed_address.at_launcher(config.join, config.feed_token_file)
    else:
        assert config.feed is not None
        token = read_token(config.feed_token_file, "--feed-token-file") if config.feed_token_file else None
        find = feed_address.at_url(config.feed, token)
    if exports is not None:
        return FeedWithExports(lambda held: FeedUpdates(find, held), exports)
    return RestartingSource(lambda: FeedUpdates(find))


def _publish_address(listener: Listener, config: ReplicaConfig) -> None:
    host, port = listener.getsockname()[:2]
    log.info("answering on %s://%s:%d/v2", "http" if config.tls_cert is None else "https", host, port)
    if config.address_file is not None:
        unfinished = config.address_file.with_name(config.address_file.name + ".part")
        unfinished.write_text(f"{host}:{port}", encoding="ascii")
        unfinished.rename(config.address_file)
