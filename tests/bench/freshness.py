"""How soon an event can be asked about: from its time to the first look that finds a version which learnt it served.

All on this machine, each a process of its own as its users start it: Kafka; `headrace serve` with the clicks example,
one trainer and one shard, reading a topic of PARTITIONS; `headrace replica --feed`; a producer of 2,000 events a
second, SHOWN samples each, whose time is the wall clock's when they are sent. Commits go on every 30 s.

With `--items`, the job is a two-tower job with so many items in its catalogue: a version is served once the index of
its items is there, so an item that an event shows for the first time is found as soon as its version is served.

Measured from outside: who benches asks the replica every LOOK_S which version it serves, and reads in the job's log
afterwards which offsets each version covers; the producer has kept every event's time. So a delay counts up to LOOK_S
too much. What the product's own histograms say of the same minute is beside it.

`from_close` begins where a pass is seen closed in the log.

`python -m tests.bench.freshness [--wait 300ms] [--seconds 60] [--rate 2000] [--items 10000]` prints the figures as
JSON.
"""

import argparse
import bisect
import contextlib
import json
import os
import re
import tempfile
import time
import tomllib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.sources.simulated import SimulatedSource, SimulatedStream
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.service.faults.injection import LogTail
from headrace.trainer.journal.log import read
from headrace.trainer.journal.log_file import file_numbers
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import PassClose
from tests.bench.hosted import EXAMPLE, START_S, STOP_S, Asked, process, service, until
from tests.integration.hosted_service import HostedService
from tests.kafka.cluster import Cluster, why_not

PARTITIONS, SHOWN, MADE, ITEMS = 2, 2, 20_000, "items.jsonl"
MAX_AT_ONCE = 100
"""Events that a producer that is late sends before it looks whether it is to end."""
TICK_S, LOOK_S, WARM_S = 0.005, 0.02, 8.0
TARGET_P50_S, TARGET_P99_S = 1.5, 3.0
F64 = NDArray[np.float64]


def produce(servers: str, topic: str, rate: float, until: Path, kept: Path) -> None:
    """The producer's process: events on a schedule until the file `until` is there; their times, as sent, are kept."""
    from kafka import KafkaProducer

    made = SimulatedStream(SimulatedSource(kind="simulated", events=MADE, partitions=1, shown=SHOWN), 1)
    blocks = made.read(Segment("simulated/0", 0, 0, MADE), Deadline.after(30))
    tails = [block.value(n).partition(b",")[2] for block in blocks for n in range(len(block))]
    times_s: list[float] = []
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=5, metrics_enabled=False)
    with contextlib.closing(producer):
        begin_s = time.time()
        while not until.exists():
            due = min(int((time.time() - begin_s) * rate) - len(times_s), MAX_AT_ONCE)
            for _ in range(due):
                now_s = time.time()
                number = len(times_s)
                value = b'{"ts":%.6f,' % now_s + tails[number % MADE]
                producer.send(topic, value=value, partition=number % PARTITIONS)
                times_s.append(now_s)
            time.sleep(TICK_S if due < MAX_AT_ONCE else 0)
        producer.flush(timeout=30)
    np.save(kept, np.array(times_s))


def spec_of(servers: str, topic: str, wait: str, items: int) -> dict:
    """The clicks example, out of Kafka, with a shard; with items, as two towers."""
    raw = tomllib.loads((EXAMPLE / "job.toml").read_text())
    del raw["store"]
    options = {"bootstrap_servers": servers}
    time_of = raw["sources"]["clicks"]["event_time"]
    if items:
        settings = {"item": ["item"], "hidden": [32], "dim": 16, "popularity": 1000}
        raw |= {"model": {"name": "two_tower", "settings": settings}}
        raw |= {"retrieval": {"items": {"slot": "item", "files": [ITEMS]}}}
    return raw | {
        "sources": {"clicks": {"kind": "kafka", "topics": [topic], "event_time": time_of, "options": options}},
        "passes": {"cut": "arrival", "wait": wait},
        "cluster": {"trainers": 1, "shards": 1},
        "commit": {"every": "30s", "keep": 1000},
    }


def version(replica: Asked) -> int | None:
    """What it serves."""
    content = replica.get("/v2/models/clicks")
    return None if content is None else int(json.loads(content)["parameters"]["version"])


def watch(replica: Asked, seconds: float, log: LogTail) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """When each version was first seen served, and when it was seen closed, unix seconds."""
    while log.new_records():
        pass  # those of before
    seen: list[tuple[float, int]] = [(time.time(), version(replica) or 0)]
    closed: list[tuple[float, int]] = []
    deadline = Deadline.after(seconds)
    while not deadline.passed():
        time.sleep(LOOK_S)
        served = version(replica) or 0
        if served > seen[-1][1]:
            seen.append((time.time(), served))
        numbers = [each.content.number for each in log.new_records() if isinstance(each.content, PassClose)]
        closed += [(time.time(), number) for number in numbers]
    return seen, closed


def buckets(text: bytes | None, name: str) -> dict[float, float]:
    """A histogram of an exposition: counts up to each bound."""
    found = re.findall(rf'^{name}_bucket{{.*?le="([^"]+)"}} (\S+)$', (text or b"").decode(), re.M)
    return {float(bound): float(count) for bound, count in found}


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float:
    """As Prometheus' histogram_quantile says it of what was counted in between."""
    upto = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    wanted, low, below = q * max(upto.values(), default=0.0), 0.0, 0.0
    for bound, count in upto.items():
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return float("nan")


def ends_of(store: Path) -> list[tuple[int, dict[int, int]]]:
    """By version: up to which offset each partition is learnt."""
    found, at = [], dict[int, int]()
    for record in read(store / "log"):
        if isinstance(plan := record.content, PassPlan):
            at = at | {int(name.rpartition("/")[2]): end for name, end in plan.positions().items()}
            found.append((plan.number, at))
    return found


def delays(times_s: F64, ends: list[tuple[int, dict[int, int]]], seen: list[tuple[float, int]]) -> tuple[F64, F64]:
    """Of every event that a version covers which was first seen meanwhile: its time, and its delay."""
    versions = np.array([version for _, version in seen])
    event_s, delay_s = [np.empty(0)], [np.empty(0)]
    for partition in range(PARTITIONS):
        mine_s = times_s[partition::PARTITIONS]
        numbers = np.array([number for number, _ in ends])
        upto = np.array([at.get(partition, 0) for _, at in ends])
        covered_by = numbers[np.minimum(np.searchsorted(upto, np.arange(len(mine_s)), side="right"), len(upto) - 1)]
        look = np.searchsorted(versions, covered_by)
        known = (look > 0) & (look < len(seen)) & (np.arange(len(mine_s)) < upto[-1])
        at_s = np.array([at for at, _ in seen])[np.minimum(look, len(seen) - 1)]
        event_s.append(mine_s[known])
        delay_s.append((at_s - mine_s)[known])
    return np.concatenate(event_s), np.concatenate(delay_s)


def from_close(seen: list[tuple[float, int]], closed: list[tuple[float, int]]) -> F64:
    """Of each version that was seen closed: how much later it was seen served."""
    versions = [version for _, version in seen]
    places = [(at_s, bisect.bisect_left(versions, number)) for at_s, number in closed]
    return np.array([max(0.0, seen[place][0] - at_s) for at_s, place in places if place < len(seen)])


def figures(wait: str = "300ms", seconds: float = 60.0, rate: float = 2000.0, items: int = 0) -> dict:
    """One run."""
    if why := why_not():
        raise SystemExit(f"the freshness bench needs Kafka: {why}")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder = Path(name)
        cluster = Cluster(folder / "kafka")
        held.callback(cluster.stop)
        cluster.start()
        topic = cluster.create_topic(PARTITIONS)
        stop, kept = folder / "stop", folder / "times.npy"
        told = ["--topic", topic, "--rate", str(rate), "--until", str(stop), "--kept", str(kept)]
        sent = process(folder, "producer", "tests.bench.freshness", "--produce", cluster.servers, *told)
        with service(folder) as hosted:
            lines = "".join(f'{{"item": {each}}}\n' for each in range(items))
            (folder / "data" / ITEMS).write_text(lines)
            body = {"spec": spec_of(cluster.servers, topic, wait, items), "base": str(folder / "data")}
            hosted.ask("POST", "/jobs", body)
            hosted.until("/jobs/clicks", lambda told: told["commit"] is not None, START_S)
            with sent as producer:
                found = _measured(folder, hosted, seconds)
                stop.touch()
                producer.wait(2 * STOP_S)
        store = hosted.jobs / "clicks" / "store"
        seen, closed = found.pop("seen"), found.pop("closed")
        if len(seen) < 2 or not closed:
            raise SystemExit(f"{len(closed)} passes were closed and {len(seen) - 1} served: the machine is too busy")
        event_s, delay_s = delays(np.load(kept), ends_of(store), seen)
        found["from_close"] = {f"p{q}_s": round(float(np.percentile(from_close(seen, closed), q)), 3) for q in (50, 99)}
        chosen = (event_s >= found["begin_s"]) & (event_s < found.pop("begin_s") + seconds)
        return summary(delay_s[chosen], seconds) | found


def _measured(folder: Path, hosted: HostedService, seconds: float) -> dict:
    """Start a replica, let it run warm, watch it."""
    address = folder / "address"
    url = str(hosted.http.base_url).rstrip("/")
    command = ["--feed", f"{url}/v1/jobs/clicks", "--listen", "127.0.0.1:0", "--address-file", str(address)]
    run = Asked(url.partition("//")[2])
    with process(folder, "replica", "headrace.service", "replica", *command):
        replica = Asked(until(lambda: address.read_text() or None, "the replica", folder))
        until(lambda: version(replica), "its first version", folder)
        time.sleep(WARM_S)
        before, begin_s = (run.get("/metrics"), replica.get("/metrics")), time.time()
        log = hosted.jobs / "clicks" / "store" / "log"
        log = LogTail(log, *max(filter(None, map(file_numbers, log.iterdir()))))
        seen, closed = watch(replica, seconds + 5.0, log)  # the last events become servable
        after = run.get("/metrics"), replica.get("/metrics")
    told = {}
    for name, at in (("headrace_learning_delay_seconds", 0), ("headrace_replica_freshness_seconds", 1)):
        pair = buckets(before[at], name), buckets(after[at], name)
        told[name] = {f"p{q:g}_s": round(quantile(*pair, q / 100), 3) for q in (50, 99)}
    return {"begin_s": begin_s, "seen": seen, "closed": closed, "versions": len(seen) - 1} | told


def summary(delay_s: F64, seconds: float) -> dict:
    """What is told of the delays."""
    return {
        **{f"p{q:g}_s": round(float(np.percentile(delay_s, q)), 3) for q in (50, 90, 99, 99.9, 100)},
        "events_per_s": round(len(delay_s) / seconds, 1),
        "target_p50_s": TARGET_P50_S, "target_p99_s": TARGET_P99_S,
        "load_1_min": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", default="300ms")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--items", type=int, default=0)
    parser.add_argument("--produce", metavar="SERVERS")
    for option in ("--topic", "--until", "--kept"):
        parser.add_argument(option)
    told = parser.parse_args()
    if told.produce:
        produce(told.produce, told.topic, told.rate, Path(told.until), Path(told.kept))
    else:
        print(json.dumps(figures(told.wait, told.seconds, told.rate, told.items), indent=1))


if __name__ == "__main__":
    main()
