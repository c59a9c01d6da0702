"""Recall of the live index of a two-tower job, as it learns: `python -m tests.bench.retrieval`, as Markdown.

Clicks of the news data (ebnerd, `HEADRACE_DATA`) arrive pass by pass. Before a pass arrives, the articles of its clicks
are looked for: by a replica that follows the job (*live*), by one that gets its versions once an hour of event time
(*frozen an hour*), by the most clicked articles of the last hours, and by item-item co-visitation: articles that were
clicked within five clicks of a reader, filled up with the most clicked ones. *Fading count* is what `popularity`
counts, without towers. Recall@k is the share of an impression's clicked articles among k, the hit rate whether one of
them is, nDCG@10 of binary gains; means over all impressions after the first day.

`--rank MODEL` adds a second job: it learns which candidates are clicked, of those that were shown and those that were
retrieved but not shown. *Live index, ranked*: a replica of both jobs is asked, with the time of each impression.
"""

import argparse
import gzip
import heapq
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.trainer.replica import feed_address
from headrace.trainer.replica.candidate_ranking import CandidateRanker
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.replica.inference_messages import RequestReader
from headrace.trainer.replica.item_indexer import ItemIndexer
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.retrieval import Retrieval, RetrievalRequest, request_of
from headrace.trainer.replica.updates import ReplicaUpdate
from tests.bench.streams import DATA
from tests.bench.w1 import ROOT

IMPRESSIONS = DATA / "ebnerd" / "impressions.jsonl.gz"
DAY_S, HOUR_S = 86_400, 3_600
AT = (20, 100)
ASKED = 50
"""Users of one request for ranked articles."""
RANKED = 10
HISTORY = 10
BACK = 5
"""Clicks of a reader that co-visitation looks back at."""
WAIT_S = 600.0
DEFAULTS = {
    "pass-events": 100,
    "batch": 16,
    "dim": 32,
    "hidden": 64,
    "cached": 512,
    "memory": 1000,
    "popularity": 100,
    "weight": 2,
}
"""Options, as the keys of the job; `memory` is frequency_memory of two_tower. popularity 0: without."""
USER = ("user", "page", "last", "device", "gender", "postcode", "age", "hour", "weekday")
FROM = (
    "user_id",
    "context_article",
    "last_click",
    "device_type",
    "gender",
    "postcode",
    "age",
    "hour_of_day",
    "day_of_week",
)
STREAM = """
name = "{name}"
seed = 1
[sources.clicks]
kind = "files"
paths = ["events.jsonl"]
event_time = {{ field = "ts", unit = "s" }}
follow = true
poll = "10ms"
[passes]
max_events = {pass_events}
cut = "count"
[commit]
every = "1h"
[store]
path = "store"
[pipe]
kind = "columns"
explode = "{explode}"
[[tasks]]
name = "ctr"
label = "click"
[[slots]]
names = {user}
[[slots]]
name = "history"
pooling = "mean"
[[slots]]
name = "item"
from = "{explode}"
"""
"""The beginning of both jobs."""
JOB = """
[[slots]]
name = "click"
kind = "meta"
from = "one"
[tables.default]
dim = {dim}
[model]
name = "two_tower"
[model.settings]
item = ["item"]
hidden = [{hidden}]
dim = {dim}
cached = {cached}
frequency_memory = {memory}
popularity = {popularity}
popularity_weight = {weight}
[retrieval]
items = {{ slot = "item", files = ["items.jsonl"] }}
[train]
batch_size = {batch}
"""
RANKING = """
[[slots]]
name = "shown_to_all"
kind = "dense"
counters = {{ key = "item", half_lives = ["30m", "2h", "12h"], what = ["clicks"], click = "shown" }}
[[slots]]
name = "clicked_by_all"
kind = "dense"
counters = {{ key = "item", half_lives = ["30m", "2h", "12h"], what = ["clicks"], click = "click" }}
[[slots]]
name = "shown_on_page"
kind = "dense"
counters = {{ key = ["page", "item"], half_lives = ["2h", "1d"], what = ["clicks"], click = "shown" }}
[[slots]]
name = "shown_to_user"
kind = "dense"
counters = {{ key = ["user", "item"], half_lives = ["2h", "1d"], what = ["clicks"], click = "shown" }}
[[slots]]
name = "clicked_by_user"
kind = "dense"
counters = {{ key = ["user", "item"], half_lives = ["1d"], what = ["clicks"], click = "click" }}
[[slots]]
name = "click"
kind = "meta"
in = "clicked"
[[slots]]
name = "shown"
kind = "meta"
in = "shown"
[tables.default]
dim = 8
[model]
name = "{model}"
[train]
batch_size = 256
"""


class Method(Protocol):
    """A way to find articles for impressions."""

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The best articles for each, the best first."""
        ...

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        """They are over, with their clicks."""
        ...


def impressions(most: int | None) -> Iterator[dict[str, Any]]:
    """Those with clicks, in their order, with the reader's last clicks before."""
    clicked: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=HISTORY))
    with gzip.open(IMPRESSIONS) as lines:
        for line in itertools.islice(lines, most):
            each = json.loads(line)
            if not each["clicked"]:
                continue
            told = {name: each[field] for name, field in zip(USER, FROM, strict=True)}
            told |= {"history": [*clicked[told["user"]]], "ts": each["ts"], "one": 1}
            yield {**told, "shown": each["shown"], "clicked": each["clicked"]}
            clicked[told["user"]].extend(each["clicked"])


def users_of(impressions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The users of requests."""
    return [{name: each[name] for name in (*USER, "history")} for each in impressions]


class FollowedJob:
    """A job that runs, and gets a pass of events at a time."""

    def __init__(self, folder: Path, job_file: str, overrides: Sequence[str] = ()) -> None:
        self._events, self._passes = folder / "events.jsonl", 0
        self._events.write_text("")
        (folder / "job.toml").write_text(job_file)
        command = [sys.executable, "-m", "headrace.service", "run", str(folder / "job.toml")]
        command += [word for each in overrides for word in ("--set", each)]
        with (folder / "output").open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        self._feed = FeedUpdates(feed_address.in_store(folder / "store"))

    def learn(self, events: Sequence[Mapping[str, Any]]) -> Iterator[ReplicaUpdate]:
        """The versions up to the one with these events, which are a pass."""
        self._passes += 1
        with self._events.open("a") as lines:
            lines.writelines(json.dumps(each) + "\n" for each in events)
        deadline = Deadline.after(WAIT_S)
        while True:
            deadline.check(f"version {self._passes} comes")
            assert self._process.poll() is None, "the job has ended"
            try:
                update = self._feed.next(Deadline.after(5))
            except Unavailable:
                time.sleep(0.2)
                continue
            if update is not None:
                yield update
                if update.version >= self._passes:
                    return

    def close(self) -> None:
        """End it."""
        self._feed.close()
        self._process.terminate()
        self._process.wait()


class Replica:
    """A replica in this process: the newest version, or that of the last full hour."""

    def __init__(self, every_s: int = 0) -> None:
        self.state, self._every_s = ReplicaState(1, 0, ItemIndexer()), every_s
        self._waiting: list[ReplicaUpdate] = []
        self._hour = 0

    def update(self, update: ReplicaUpdate, now_s: int) -> None:
        """Take a version that is there at this event time."""
        self._waiting.append(update)
        if not self._every_s or now_s // self._every_s != self._hour:
            self._hour = now_s // self._every_s if self._every_s else 0
            for each in self._waiting:
                self.state.apply(each)
            self._waiting = []

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        if self.state.items is None:
            return [[] for _ in impressions]
        model = self.state.model()
        asked = RetrievalRequest.model_construct(users=users_of(impressions))
        inputs = RequestReader(model, len(impressions)).inputs(request_of(asked, model, ["item"]))
        done = self.state.users(model, inputs)
        assert done is not None and done[1] is not None
        _, index, user_BV = done
        ids = np.asarray(index.catalogue.id_I)
        return [ids[at_K].tolist() for _, at_K in index.search(user_BV, max(AT), index.there_I)]

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        """Versions come from the job."""


class Ranked:
    """The live index's articles in the order of a model that learns from what was shown and retrieved."""

    def __init__(self, live: Replica, name: str, job: FollowedJob, learnt: int) -> None:
        """`learnt`: retrieved articles of each impression that the job learns from, beside those that were shown."""
        self._state, self._live, self._name, self._job = ReplicaState(1, 0), live, name, job
        self._learnt = learnt
        self._retrieval = Retrieval(live.state, [CandidateRanker(self._state)])
        self._retrieved: list[list[int]] = []

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        if self._live.state.items is None or self._state.served is None:
            self._retrieved = [[] for _ in impressions]
            return self._retrieved
        parts = [impressions[begin : begin + ASKED] for begin in range(0, len(impressions), ASKED)]
        found = [items for part in parts for items in self._ranked(part)]
        self._retrieved = found
        return found

    def _ranked(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        times = [each["ts"] for each in impressions]
        more = {"k": max(AT), "candidates": max(AT), "rank_by": self._name, "event_time": times}
        asked = RetrievalRequest.model_validate({"users": users_of(impressions), **more})
        return [[int(item) for item in each.items] for each in self._retrieval.answer("clicks", asked).results]

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        events = [
            {**each, "candidates": [*dict.fromkeys([*each["shown"], *retrieved[: self._learnt]])]}
            for each, retrieved in zip(impressions, self._retrieved, strict=True)
        ]
        for update in self._job.learn(events):
            self._state.apply(update)


class Popular:
    """The most clicked articles of the last hours."""

    def __init__(self, hours: int) -> None:
        self._window_s, self._last = hours * HOUR_S, deque[tuple[int, int]]()
        self._count: Counter[int] = Counter()

    def best(self, now_s: int) -> list[int]:
        while self._last and self._last[0][0] < now_s - self._window_s:
            article = self._last.popleft()[1]
            self._count[article] -= 1
            if not self._count[article]:
                del self._count[article]
        return [article for article, _ in self._count.most_common(max(AT))]

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        return [self.best(each["ts"]) for each in impressions]

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        for each in impressions:
            for article in each["clicked"]:
                self._last.append((each["ts"], article))
                self._count[article] += 1


class FadingCount:
    """The articles with most clicks, where each click weighs less with each one after it."""

    def __init__(self, memory: int, articles: int) -> None:
        self._kept, self._count_A = 1 - 1 / memory, np.zeros(articles)

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        best = np.argsort(-self._count_A, kind="stable")[: max(AT)]
        return [best[self._count_A[best] > 0].tolist()] * len(impressions)

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        for each in impressions:
            for article in each["clicked"]:
                self._count_A *= self._kept
                self._count_A[article] += 1


class CoVisitation:
    """Articles that readers clicked near those that this reader clicked last."""

    def __init__(self) -> None:
        self._near: dict[int, Counter[int]] = defaultdict(Counter)
        self._clicks: Counter[int] = Counter()
        self._popular = Popular(6)

    def found(self, impressions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        return [self._best(each) for each in impressions]

    def _best(self, impression: Mapping[str, Any]) -> list[int]:
        scores: Counter[int] = Counter()
        for before in impression["history"][-BACK:]:
            for article, count in self._near[before].items():
                scores[article] += count / self._clicks[before] ** 0.5
        near = heapq.nlargest(max(AT), scores, key=lambda article: (scores[article], article))
        return list(dict.fromkeys([*near, *self._popular.best(impression["ts"])]))[: max(AT)]

    def learn(self, impressions: Sequence[Mapping[str, Any]]) -> None:
        self._popular.learn(impressions)
        for each in impressions:
            for article in each["clicked"]:
                self._clicks[article] += 1
                for before in set(each["history"][-BACK:]) - {article}:
                    self._near[before][article] += 1
                    self._near[article][before] += 1


class Tally:
    """Sums of recall and hits of one method."""

    def __init__(self) -> None:
        self.count, self.recall, self.hits, self.ndcg = 0, Counter[int](), Counter[int](), 0.0

    def add(self, clicked: Sequence[int], found: Sequence[int]) -> None:
        self.count += 1
        for k in AT:
            hits = len({*clicked} & {*found[:k]})
            self.recall[k] += hits / len({*clicked})
            self.hits[k] += bool(hits)
        wanted = {*clicked}
        gain = sum(1 / np.log2(2 + place) for place, article in enumerate(found[:RANKED]) if article in wanted)
        self.ndcg += gain / sum(1 / np.log2(2 + place) for place in range(min(RANKED, len(wanted))))

    def line(self, name: str) -> str:
        values = [f"{part[k] / max(1, self.count):.4f}" for part in (self.recall, self.hits) for k in AT]
        values.append(f"{self.ndcg / max(1, self.count):.4f}")
        return f"| {name} | {' | '.join(values)} |"


def measure(folder: Path, asked: argparse.Namespace) -> Iterator[str]:
    """Run the jobs over the impressions, and look for the clicks of each pass before it arrives."""
    stream = list(impressions(asked.events))
    articles = sorted({article for each in stream for article in each["clicked"]})
    (folder / "items.jsonl").write_text("".join(f'{{"item": {article}}}\n' for article in articles))
    begin_s, first_s = time.monotonic(), stream[0]["ts"]
    with ExitStack() as held:
        job = FollowedJob(folder, towers_file(asked), asked.set)
        held.callback(job.close)
        live, frozen = Replica(), Replica(HOUR_S)
        methods: dict[str, Method] = {
            "live index": live,
            "index frozen an hour": frozen,
            "fading count": FadingCount(asked.popularity or DEFAULTS["popularity"], articles[-1] + 1),
            "item-item co-visitation": CoVisitation(),
            **{f"popular in {hours} h": Popular(hours) for hours in (1, 6, 24)},
        }
        for model in asked.rank:
            (folder / model).mkdir()
            ranking = FollowedJob(folder / model, ranking_file(model, asked), asked.set_rank)
            held.callback(ranking.close)
            methods[f"live index, ranked by {model}"] = Ranked(live, model, ranking, asked.learnt)
        tallies = {name: Tally() for name in methods}
        for number, begin in enumerate(range(0, len(stream) - asked.pass_events + 1, asked.pass_events)):
            part = stream[begin : begin + asked.pass_events]
            for name, method in methods.items():
                for each, found in zip(part, method.found(part), strict=True):
                    if each["ts"] >= first_s + DAY_S:
                        tallies[name].add(each["clicked"], found)
                method.learn(part)
            for update in job.learn(part):
                for replica in (live, frozen):
                    replica.update(update, part[-1]["ts"])
            if number % 50 == 49:
                print(f"{begin + len(part)} of {len(stream)}", file=sys.stderr)
                print(*(each.line(name) for name, each in tallies.items()), sep="\n", file=sys.stderr, flush=True)
    took_s = time.monotonic() - begin_s
    yield f"{tallies['live index'].count:,} impressions, passes of {asked.pass_events} events, {took_s:.0f} s"
    yield "\n| | " + " | ".join(f"{what}@{k}" for what in ("recall", "hit rate") for k in AT) + f" | nDCG@{RANKED} |"
    yield "|---|" + "---|" * (2 * len(AT) + 1)
    yield from (tally.line(name) for name, tally in tallies.items())


def towers_file(asked: argparse.Namespace) -> str:
    """The job file of the towers."""
    text = stream_of("clicks", "clicked", asked)
    text += JOB.format(**{name: getattr(asked, name.replace("-", "_")) for name in DEFAULTS})
    return text if asked.popularity else text.replace("popularity = 0\n", "")


def ranking_file(model: str, asked: argparse.Namespace) -> str:
    """The job file of a ranking model."""
    return stream_of(model, "candidates", asked) + RANKING.format(model=model)


def stream_of(name: str, explode: str, asked: argparse.Namespace) -> str:
    """The beginning of a job file."""
    return STREAM.format(name=name, explode=explode, pass_events=asked.pass_events, user=json.dumps(USER))


def main() -> None:
    """Measure, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--events", type=int, default=None, help="impressions that are read; default: all")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the job file")
    options.add_argument(
        "--rank", action="append", default=[], metavar="MODEL", help="a job with it ranks what the live index finds"
    )
    options.add_argument("--learnt", type=int, default=max(AT), help="retrieved articles that it learns from")
    options.add_argument("--set-rank", action="append", default=[], metavar="KEY=VALUE", help="a key of its job file")
    for name, default in DEFAULTS.items():
        options.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory(prefix="bench-retrieval-") as folder:
        for line in measure(Path(folder), options.parse_args()):
            print(line)


if __name__ == "__main__":
    main()
