"""The chief's part of the live feed: where it is, when a version is told, and what is told beside the rows.

Rows are told by shards (pserver.feed), on the chief's word and right after it; here are the model's tensors, the time
of the newest event, and the model as text and as ONNX. Nothing is opened, traced or copied before somebody asks where
the feed is, and nothing is told while nobody listens.
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

from dataset.schema import Schema
from millrace.deadline import Deadline
from pserver import feed_wire
from pserver.client import Shards
from pserver.feed import Subscribers, Subscription
from pserver.feed_server import FeedServer
from trainer.config import TrainerJob, WorkerConfig
from trainer.default_rows import saved_rows, widths_of
from trainer.exports.config import ExportSection
from trainer.exports.describe import describe
from trainer.exports.tracing import TraceFailed, trace
from trainer.leading import Lead
from trainer.models.needs import shape_of
from trainer.saved import Holders

ASK_S = 10.0
"""How long shards may take to open their ports."""
TELL_S = 60.0
"""How long shards may take to copy what changed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telling:
    """What is told of a job beside its rows; asked for between passes, on the loop's thread."""

    job: str
    timeline: str
    generation: int
    tensors: Callable[[], Mapping[str, Tensor]]
    """The model's state by name."""
    model: Callable[[], Mapping[str, Any]]
    """See trainer.exports.describe."""
    onnx: Callable[[], bytes | None]
    """A template as trainer.exports.tracing makes it; asked for once. None where there can be none."""
    event_time_s: Callable[[], float | None]
    event_times: Callable[[int], Mapping[str, Any] | None] = lambda _version: None
    """Of the pass that made a version, as trainer.freshness says them; None where they are not known."""

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        job: TrainerJob,
        schema: Schema,
        chief: Lead,
        model: nn.Module,
        holders: Holders,
    ) -> "Telling":
        """Of a chief's job: as it would export all of it in float32."""

        def onnx() -> bytes | None:
            try:
                return trace(model, shape_of(schema, job.tables, [task.name for task in job.tasks]), job.tasks)
            except TraceFailed as error:
                log.warning("replicas that follow the live feed have no ONNX: %s", error)
                return None

        def described() -> Mapping[str, Any]:
            learnt = {name: row.tolist() for name, row in saved_rows(holders.dense.tensors(), widths).items()}
            return describe(schema, chief.operator.tables, job.tasks, ExportSection(), learnt)

        widths = widths_of(schema, job.tables)
        facts = job.name, chief.beginning.timeline, config.generation
        closer = holders.closer
        latest_s = lambda: closer.latest_event_s  # noqa: E731
        return cls(*facts, holders.dense.tensors, described, onnx, latest_s, closer.freshness.of)


class ChiefFeed:
    """See module docstring, and pserver.feed_server.Source. `tick` is the loop's; the rest from any thread."""

    def __init__(self, telling: Telling, shards: Shards) -> None:
        self._telling, self._shards = telling, shards
        self._opening = threading.Lock()
        self._server: FeedServer | None = None
        self._shard_addresses: list[str] = []
        self._secret = ""
        self._subscribers = Subscribers()
        self._strangers: tuple[Subscription, ...] = ()
        """Those who have not heard of the model."""
        self._asked = False
        self._told_version = 0
        self._model: Mapping[str, Any] | None = None
        self._onnx: bytes | None = None

    # --- where it is -------------------------------------------------------------------------------------------------

    def answer(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """Where to subscribe, as trainer.replica.finding takes it. Opens the ports at the first call."""
        with self._opening:
            if self._server is None:
                self._secret = secrets.token_hex(16)
                self._shard_addresses = self._shards.feed(self._secret, Deadline.after(ASK_S))
                self._server = FeedServer(self, self._secret)
            facts = {"job": self._telling.job, "timeline": self._telling.timeline}
            return facts | {
                "generation": self._telling.generation,
                "secret": self._secret,
                "chief": self._server.address,
                "shards": list(self._shard_addresses),
            }

    # --- who is told -------------------------------------------------------------------------------------------------

    def open(self, subscription: Subscription, since: int, generation: int) -> Iterator[feed_wire.Outgoing]:
        """See Source: who begins to listen hears of the model with the next version told."""
        with self._opening:
            self._subscribers.add(subscription)
            self._strangers = (*self._strangers, subscription)
        return iter(())

    def close(self, subscription: Subscription) -> None:
        """See Source."""
        with self._opening:
            self._subscribers.remove(subscription)
            self._strangers = tuple(each for each in self._strangers if each is not subscription)

    def poke(self) -> None:
        """See Source."""
        self._asked = True

    def end(self) -> None:
        """See Source."""
        self._subscribers.end()

    # --- what is told ------------------------------------------------------------------------------------------------

    def tick(self, version: int) -> None:
        """Between passes, after operations: tell who listens of `version`, unless it was told and nobody asks again."""
        if not self._subscribers.now() or not version:
            return
        with self._opening:
            asked, self._asked = self._asked, False
            strangers, self._strangers = self._strangers, ()
        if not (asked or strangers) and version == self._told_version:
            return
        self._shards.publish(version, Deadline.after(TELL_S))
        self._introduce(strangers)
        facts = {"event_time_s": self._telling.event_time_s(), "event_times": self._telling.event_times(version)}
        told = [feed_wire.dense(version, copies_of(self._telling.tensors()), facts)]
        for subscription in self._subscribers.now():
            subscription.put(told)
        self._told_version = version

    def _introduce(self, strangers: tuple[Subscription, ...]) -> None:
        """Tell of the model who has not heard of it, and everybody where it is told otherwise than before.

        Default rows that are learnt are numbers in what is told of it; its graph stays.
        """
        if self._model is None:
            self._onnx = self._telling.onnx()
        model, told = self._telling.model(), self._telling
        is_new, self._model = model != self._model, model
        facts = {"job": told.job, "timeline": told.timeline, "generation": told.generation, "model": model}
        for subscription in self._subscribers.now():
            if subscription in strangers:
                subscription.put([feed_wire.introduction(facts, self._onnx)])
            elif is_new:
                subscription.put([feed_wire.introduction(facts, None)])

    def shut(self) -> None:
        """Send what waits, and give the port back."""
        with self._opening:
            server = self._server
        if server is not None:
            server.close()


@contextmanager
def open_feed(telling: Telling, shards: Shards, chief: Lead) -> Iterator[ChiefFeed]:
    """A feed that the chief tells the way to; what waits is sent at the end."""
    feed = ChiefFeed(telling, shards)
    chief.answers["feed"] = feed.answer
    try:
        yield feed
    finally:
        feed.shut()


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """The model's own tensors, on the CPU, as they are now."""
    prefix = "model."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return {name: np.array(value.detach().cpu().numpy(), order="C") for name, value in own.items()}
