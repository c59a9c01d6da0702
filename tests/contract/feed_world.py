"""A job of shards whose rank 0 tells its versions, and a subscriber that holds what it is told."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.errors import HeadraceError
from headrace.identity import certificates
from headrace.identity.peers import PeerName, PeerRole
from headrace.pserver.config import ShardProcess
from headrace.pserver.feed import feed_server
from headrace.pserver.server.commands import Explain, Operate, RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.server.shard_server import ShardServer
from headrace.trainer.replica.feed_address import FeedAddress
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.train.model_feed import FeedContent, ModelFeed
from tests.contract import shards_world as w

JOB, SIGNS = "shards", range(60)
MODEL = {"tables": {"default": {}, "other": {}}}


@dataclass
class Job:
    """Shards between passes, and rank 0's part of the feed."""

    shards: object
    rank0: ModelFeed
    weights: torch.Tensor
    version: int = 0
    known: dict = field(default_factory=dict)
    """By version, the rows that are."""

    def find(self, _deadline):
        """As a finder does: whoever signs has the authority."""
        answer, key = self.rank0.answer({}), certificates.draw_key()
        if answer["tls"]:
            name = PeerName(JOB, answer["generation"], PeerRole.REPLICA, 0)
            certificate = w.authority().sign(certificates.signing_request(key), name)
            answer = {**answer, "authority": w.authority().pem, "certificate": certificate}
        return FeedAddress.of_message(answer, key)

    def live(self, batches, operations=(), *, seed=0, day=0):
        """A pass, what acts at its close, and the word of rank 0."""
        self.version += 1
        w.train(self.shards, self.version, batches, seed=seed or self.version, steps=len(batches), day=day)
        if operations:
            self.shards.call(Operate(self.version, operations), w.soon())
        self.weights.fill_(self.version)
        self.known[self.version] = rows_of(self.shards)
        self.rank0.tick(self.version)


def read(shards, table, signs):
    """Rows of signs as bits, zeros without one."""
    found = {}
    for begin in range(0, len(signs), 500):  # where memory is bounded, not all fit at once
        keys = w.keys(*signs[begin : begin + 500])
        rows_UD = shards.look({table: keys}, w.soon())[table]
        found.update(zip(keys.keys_U.tolist(), (row.tobytes() for row in rows_UD), strict=True))
    return found


def rows_of(shards):
    """Every row that is, as its bits, by table and key: asked for one by one."""
    found = {}
    for name, group in (("default", 1), ("other", 2)):
        found[name] = {}
        for key in w.keys(*SIGNS).keys_U.tolist():
            told = shards.call(Explain(name, key, group), w.soon())
            if told["row"]:
                found[name][key] = np.array(told["weights"], np.float32).tobytes()
    return found


def _credentials(kind, role, number, generation):
    return w.credentials(role, number, generation) if isinstance(kind, w.OverTls) else None


@contextmanager
def shards_of(kind, tables, live, generation):
    """Embedded, or `kind` shards as servers; those of OverTls as between machines."""
    rank0 = _credentials(kind, PeerRole.TRAINER, 0, generation)
    with ExitStack() as held:
        if kind == 0:
            feed_at = feed_server.endpoint_of("lo", rank0)
            made = EmbeddedShards(ShardProcess.alone(tables, w.SEED, live=live, generation=generation), 2, feed_at)
        else:
            homes = [None if live is None else str(live / f"shard-{s}") for s in range(kind)]
            own = [_credentials(kind, PeerRole.SHARD, s, generation) for s in range(kind)]
            configs = [
                w.process(s, int(kind), 1, tables, live=homes[s], generation=generation, credentials=own[s])
                for s in range(kind)
            ]
            servers = [held.enter_context(ShardServer(config)) for config in configs]
            made = w.client(servers, 0, 1, tables, generation=generation, identity=rank0)
        held.callback(made.close)
        yield made


@contextmanager
def job(kind, tables=w.TABLES, live=None, generation=1, timeline="t1", restore=None):
    """Restored from (folder, parts, version), if given."""
    with shards_of(kind, tables, live, generation) as shards:
        weights = torch.zeros(3)
        tensors = lambda: {"model.a": weights, "optimizer.a": weights}  # noqa: E731
        telling = FeedContent(JOB, timeline, generation, tensors, lambda: MODEL, lambda: b"onnx", lambda: 7.5)
        tls = feed_server.endpoint_of("lo", _credentials(kind, PeerRole.TRAINER, 0, generation))
        made = Job(shards, ModelFeed(telling, shards, tls, embedded=kind == 0), weights)
        if restore is not None:
            shards.call(RestoreCommit(*restore), w.soon())
            made.version = restore[2]
            made.known[made.version] = rows_of(shards)
        try:
            yield made
        finally:
            made.rank0.shut()


@dataclass
class Held:
    """Follows one job, and applies what it is told."""

    job: Job
    version: int = 0
    rows: dict = field(default_factory=dict)
    updates: list = field(default_factory=list)

    def __post_init__(self):
        self.feed = FeedUpdates(lambda deadline: self.job.find(deadline))

    def begin_again(self):
        """Go on with what it holds, over new connections."""
        given = self.feed.held
        self.feed.close()
        self.feed = FeedUpdates(lambda deadline: self.job.find(deadline), given)

    def hear(self, within_s=5.0, partly=False):
        """The next update, applied, and held to what is promised. `partly`: there are rows of other signs, too."""
        update = self.feed.next(w.Deadline.after(within_s))
        if update is None:
            return None
        assert update.version > self.version
        if update.whole:
            self.rows = {}
            assert update.onnx == b"onnx" and update.model == MODEL
        else:
            assert self.version
        for name, table in update.tables.items():
            held = self.rows.setdefault(name, {})
            for rows in table.rows:
                held.update(zip(rows.keys_U.tolist(), (row.tobytes() for row in rows.rows_UD), strict=True))
                assert set(rows.group_U.tolist()) == {1 if name == "default" else 2}
            told = {key for rows in table.rows for key in rows.keys_U.tolist()}
            assert not told & set(table.gone.tolist())
            for key in table.gone.tolist():
                held.pop(key, None)
        self.version = update.version
        self.updates.append(update)
        chosen = set(w.keys(*SIGNS).keys_U.tolist())
        some = {name: {key: row for key, row in held.items() if key in chosen} for name, held in self.rows.items()}
        assert some == self.job.known[update.version] and (partly or some == self.rows)
        assert update.dense["a"].tolist() == [update.version] * 3 and list(update.dense) == ["a"]
        assert (update.job, update.event_time_s) == (JOB, 7.5)
        return update

    def until(self, version, within_s=20.0, partly=False):
        """Hear on to a version, which it then holds."""
        deadline = w.Deadline.after(within_s)
        while self.version < version:
            deadline.check(f"version {version}, at {self.version}")
            if self.hear(0.2, partly) is None:
                self.job.rank0.tick(self.job.version)  # as rank 0's loop does where nothing comes

    def troubled(self):
        """What it is told where nobody can tell."""
        try:
            self.feed.next(w.soon())
        except HeadraceError as error:
            return error
        raise AssertionError("no error")


@contextmanager
def follower(job):
    held = Held(job)
    try:
        yield held
    finally:
        held.feed.close()


@contextmanager
def fed(process, restore, described=()):
    """A job of the one shard `process`, with a live feed: its shard, its rank 0, and the address for subscribers.

    `restore`: as RestoreCommit. `described`: the tables of its model.
    """
    shards = EmbeddedShards(process)
    shards.call(RestoreCommit(*restore), w.soon())
    model = lambda: {"tables": {name: {} for name in described}}  # noqa: E731
    facts = "job", "t1", process.generation, dict, model, lambda: b"onnx", lambda: None
    content = FeedContent(*facts, memories=tuple(process.histories))
    rank0, key = ModelFeed(content, shards, embedded=True), certificates.draw_key()
    try:
        yield shards, rank0, lambda _: FeedAddress.of_message(rank0.answer({}), key)
    finally:
        rank0.shut()
        shards.close()
