"""Rank 0's part of the live feed: its addresses, the publishing of versions, and everything except rows.

Shards publish the rows (pserver.feed.publisher) when rank 0 asks them. Rank 0 publishes the dense tensors, the time of
the newest event, and the description and ONNX graph of the model. Nothing is opened, traced or copied before the first
client asks for the addresses, and nothing is published without subscribers.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.dataset.features.served_events import describe_features
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.identity.credentials import Identity
from headrace.pserver.feed import feed_messages, feed_server
from headrace.pserver.feed.feed_server import FeedServer
from headrace.pserver.feed.publisher import Subscribers, Subscription
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import PublishVersion, ServeFeed
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.trainer.config import ExportSection, TrainerJob, WorkerConfig
from headrace.trainer.exports.model_document import describe
from headrace.trainer.features.default_rows import default_rows_of, widths_of
from headrace.trainer.models.contract import Declared, Shape
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.retrieval_config import catalogue_files, describe_retrieval
from headrace.trainer.spec.history_tables import remembered_of
from headrace.trainer.train.commit_state import StateHolders
from headrace.trainer.train.tracing import TraceFailed, trace

ASK_S = 10.0
"""Longest time for shards to open their ports."""
PUBLISH_S = 60.0
"""Longest time for shards to copy the changed rows."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedContent:
    """Everything in the feed of a job except rows. Callables are called between passes, on the loop's thread."""

    job: str
    timeline: str
    generation: int
    tensors: Callable[[], Mapping[str, Tensor] | None]
    """Returns the model's tensors by name; None while rank 0 lacks some of them."""
    model: Callable[[], Mapping[str, Any]]
    """Returns the description of trainer.exports.model_document."""
    onnx: Callable[[], bytes | None]
    """Returns the ONNX template of trainer.train.tracing, or None if tracing fails; called once."""
    event_time_s: Callable[[], float | None]
    event_times: Callable[[int], Mapping[str, Any] | None] = lambda _version: None
    """Returns the event times of a version's pass as trainer.status.freshness reports them; None if they are not
    known."""
    trouble: str = ""
    """Why the model cannot be published at all."""
    memories: tuple[str, ...] = ()
    """The tables of histories and counters, whose rows shards publish as they are, and of statistics of rows."""
    catalogue: tuple[str, ...] = ()
    """The files of the catalogue of items, for replicas of this machine."""

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        job: TrainerJob,
        schema: Schema,
        rank0: RankZero,
        model: nn.Module,
        holders: StateHolders,
    ) -> "FeedContent":
        """The content for a job, as a full export in float32 would have it."""

        def onnx() -> bytes | None:
            try:
                return trace(model, Shape.of(schema, job.tables, [task.name for task in job.tasks]), job.tasks)
            except TraceFailed as error:
                log.warning("replicas that follow the live feed have no ONNX: %s", error)
                return None

        def described() -> Mapping[str, Any]:
            learnt = {name: row.tolist() for name, row in default_rows_of(holders.dense.tensors(), widths).items()}
            return describe(schema, rank0.operator.job.tables, job.tasks, ExportSection(), learnt, features, retrieval)

        widths = widths_of(schema, job.tables)
        features = describe_features(job.pipe, schema)
        retrieval = describe_retrieval(job.retrieval, job.model.settings)
        facts = job.name, rank0.beginning.timeline, config.generation
        closes = holders.closes
        latest_s = lambda: closes.latest_event_s  # noqa: E731
        rows = Declared.of(model).class_rows
        size = sum(each.nbytes for each in model.state_dict().values())
        size += 0 if rows is None else 4 * rows.num_classes * rows.dim
        trouble = f"its model has {size >> 20} MiB, more than a message: follow its exports instead"
        trouble = trouble if size > feed_messages.MAX_MESSAGE_BYTES // 2 else ""
        memories = tuple(remembered_of(schema))
        times, files = closes.event_times, catalogue_files(job.retrieval, config.folder)
        return cls(*facts, holders.dense.published, described, onnx, latest_s, times, trouble, memories, files)


class ModelFeed:
    """The live feed of rank 0: a FeedSource. `tick` is called by the loop; the rest on any
    thread."""

    def __init__(
        self,
        content: FeedContent,
        shards: Shards,
        tls: TlsEndpoint | None = None,
        *,
        embedded: bool = False,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`tls`: where to serve, if not at loopback; `embedded`: whether the one shard is in this process;
        `trouble`: why nothing may be published now."""
        self._content, self._shards, self._tls, self._embedded = content, shards, tls, embedded
        self._trouble = trouble
        self._opening = threading.Lock()
        self._server: FeedServer | None = None
        self._shard_addresses: list[str] = []
        self._secret = ""
        self._subscribers = Subscribers()
        self._new: tuple[Subscription, ...] = ()
        """Subscriptions that have not received the model yet."""
        self._again = False
        self._published_version = 0
        self._model: Mapping[str, Any] | None = None
        self._onnx: bytes | None = None

    # --- addresses ---------------------------------------------------------------------------------------------------

    def answer(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """The addresses for subscribers, in the form of trainer.replica.feed_address. The first call opens the ports.

        Raises Unavailable where nothing may be published.
        """
        if trouble := self._trouble():
            raise Unavailable(trouble)
        with self._opening:
            if self._server is None:
                self._secret = secrets.token_hex(16)
                self._shard_addresses = self._shards.call(ServeFeed(self._secret), Deadline.after(ASK_S))
                self._server = FeedServer(self, self._secret, self._tls)
            facts = {"job": self._content.job, "timeline": self._content.timeline}
            return facts | {
                "generation": self._content.generation,
                "tls": self._tls is not None,
                "embedded": self._embedded,
                "secret": self._secret,
                "chief": self._server.address,
                "shards": list(self._shard_addresses),
            }

    # --- subscribers -------------------------------------------------------------------------------------------------

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_messages.Outgoing]:
        """A new subscriber receives the model with the next published version."""
        with self._opening:
            self._subscribers.add(subscription)
            self._new = (*self._new, subscription)
        return iter(())

    def close(self, subscription: Subscription) -> None:
        with self._opening:
            self._subscribers.remove(subscription)
            self._new = tuple(each for each in self._new if each is not subscription)

    def poke(self) -> None:
        self._again = True

    def end(self) -> None:
        self._subscribers.end()

    # --- publishing --------------------------------------------------------------------------------------------------

    def due(self, version: int) -> bool:
        """Whether `version` is to be published: a subscriber has not got it, or asks again."""
        if not self._subscribers.now() or not version or self._trouble():
            return False
        return self._again or bool(self._new) or version != self._published_version

    def tick(self, version: int) -> None:
        """Between passes, after operations: publish `version` if it is due, and the whole model is there."""
        if not self.due(version) or (tensors := self._content.tensors()) is None:
            return
        with self._opening:
            self._again, new, self._new = False, self._new, ()
            subscribers = self._subscribers.now()  # one that comes meanwhile gets the model with the next version
        self._shards.call(PublishVersion(version), Deadline.after(PUBLISH_S))
        self._send_model(subscribers, new)
        facts = {"event_time_s": self._content.event_time_s(), "event_times": self._content.event_times(version)}
        messages = [feed_messages.dense(version, copies_of(tensors), facts)]
        for subscription in subscribers:
            subscription.put(messages)
        self._published_version = version

    def _send_model(self, subscribers: tuple[Subscription, ...], new: tuple[Subscription, ...]) -> None:
        """Send the model to new subscribers, and its description to all subscribers if it has changed.

        The description holds learnt default rows, so it changes with them; the graph does not change.
        """
        if self._model is None:
            self._onnx = self._content.onnx()
        model, content = self._content.model(), self._content
        is_changed, self._model = model != self._model, model
        facts = {"job": content.job, "timeline": content.timeline, "generation": content.generation, "model": model}
        facts |= {"memories": list(content.memories)} if content.memories else {}
        facts |= {"catalogue": list(content.catalogue)} if content.catalogue and self._tls is None else {}
        for subscription in subscribers:
            if subscription in new:
                subscription.put([feed_messages.introduction(facts, self._onnx)])
            elif is_changed:
                subscription.put([feed_messages.introduction(facts, None)])

    def shut(self) -> None:
        """Send the queued messages, and close the port."""
        with self._opening:
            server = self._server
        if server is not None:
            server.close()


@contextmanager
def open_feed(
    content: FeedContent, shards: Shards, rank0: RankZero, config: WorkerConfig, identity: Identity | None
) -> Iterator[ModelFeed]:
    """The feed of a job, which rank 0 announces. Queued messages are sent at the end."""
    tls = feed_server.endpoint_of(config.interface, identity)
    feed = ModelFeed(
        content, shards, tls, embedded=not config.shards, trouble=lambda: content.trouble or rank0.trouble()
    )
    rank0.answers["feed"] = feed.answer
    try:
        yield feed
    finally:
        feed.shut()


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Copies of the model's own tensors on the CPU."""
    prefix = "model."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return {name: np.array(value.detach().cpu().numpy(), order="C") for name, value in own.items()}
