"""What a service's readers cost training, and how soon they are answered while it goes on.

`headrace serve` with one job: the clicks example, embedded, its stream arriving faster than it can be learnt, so that
it trains as fast as the machine lets it. All clients are one process of their own, and their CPU is not to count: it
has the policy SCHED_IDLE, so that it runs where nobody else wants a core, and waits where somebody does.

Slowdown: 200 clients, each asking every 10 s for one of ROUTES in turn over a connection of its own, and 20 streams of
events, are there for BLOCK_S, then away for BLOCK_S, again and again within one run: the figure is the median, over
pairs of blocks side by side, of events learnt a second with them to without. A block's rate is taken between two
closes. Beside it CPU seconds a second of the service, of the launcher and of all workers, with and without.

Latency: 100 requests a second, at random times that do not wait for answers, of ROUTES in turn; a late answer counts
from when it was due. Who asks must not wait for a core here, or its own waiting would be measured: it goes first where
that is allowed (headrace.priority), and is of the service's session; the other clients are of their own.

`python -m tests.bench.load [--pairs 4] [--passes 0]` prints the figures as JSON. `--pairs 0 --passes 1500` prints the
latency alone, beside a job that has closed 1,500 passes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from headrace.deadline import Deadline
from headrace.priority import prioritized
from headrace.service.jobs.folder import JobFolder
from tests.bench.hosted import EXAMPLE, ROOT, START_S, service
from tests.bench.serving import Asker, cpu_s, least_busy
from tests.integration.hosted_service import HostedService

ROUTES = {
    "job": "/v1/jobs/clicks",
    "jobs": "/v1/jobs",
    "metrics": "/v1/jobs/clicks/metrics",
    "history": "/v1/jobs/clicks/metrics/history?last=50",
    "tables": "/v1/jobs/clicks/tables",
    "commits": "/v1/jobs/clicks/commits",
    "log": "/v1/jobs/clicks/log",
    "prometheus": "/metrics",
}
CLIENTS, EVERY_S, STREAMS = 200, 10.0, 20
RATE, LATENCY_S, CONNECTIONS = 100.0, 20.0, 4
WARM_S, BLOCK_S, PAIRS = 6.0, 8.0, 4
MAX_EVENTS, PASSES_S = 2000, 600.0
MAX_SLOWDOWN, TARGET_P99_MS = 0.05, 50.0
LOOK_S = 0.02


def spec(max_events: int = MAX_EVENTS) -> dict:
    """The clicks example, whose events come as fast as they are read, in passes short enough to time blocks by."""
    raw = tomllib.loads((EXAMPLE / "job.toml").read_text())
    del raw["store"]
    raw["sources"]["clicks"]["rate"] = 1e7
    return raw | {"passes": {"max_events": max_events, "cut": "count"}}


# -- the clients' process


def request_of(path: str) -> bytes:
    """As it is sent."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


@dataclass
class Readers:
    """The clients and streams of the first figure."""

    host: str
    port: int
    took: list[float] = field(default_factory=list)
    wrong: list[bytes] = field(default_factory=list)
    num_events: int = 0

    async def poll(self, number: int) -> None:
        """One client, for ever."""
        loop, paths = asyncio.get_running_loop(), list(ROUTES.values())
        await asyncio.sleep(number * EVERY_S / CLIENTS)
        _, asker = await loop.create_connection(lambda: Asker(self.took, self.wrong), self.host, self.port)
        due_s, turn = time.perf_counter(), number
        try:
            while True:
                asker.ask(due_s, request_of(paths[turn % len(paths)]))
                due_s, turn = due_s + EVERY_S, turn + 1
                await asyncio.sleep(due_s - time.perf_counter())
        finally:
            asker.transport.close()

    async def listen(self) -> None:
        """One stream, for ever."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request_of("/v1/jobs/clicks/metrics/stream"))
            async for line in reader:
                self.num_events += line.startswith(b"event: ")
        finally:
            writer.close()


async def read(host: str, port: int) -> None:
    """Be there from a line on standard input to the next; then tell what was answered."""
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        readers = Readers(host, port)
        tasks = [asyncio.create_task(readers.poll(number)) for number in range(CLIENTS)]
        tasks += [asyncio.create_task(readers.listen()) for _ in range(STREAMS)]
        await loop.run_in_executor(None, sys.stdin.readline)
        broken = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        told = {"answers": len(readers.took), "events": readers.num_events}
        print(json.dumps(told | {"wrong": len(readers.wrong) + len(broken)}), flush=True)


async def ask(host: str, port: int) -> dict[str, dict[str, float]]:
    """The second figure: latency by route."""
    loop, took = asyncio.get_running_loop(), {name: list[float]() for name in ROUTES}
    wrong: list[bytes] = []
    askers = {
        name: [
            (await loop.create_connection(lambda name=name: Asker(took[name], wrong), host, port))[1]
            for _ in range(CONNECTIONS)
        ]
        for name in ROUTES
    }
    due_D = np.cumsum(np.random.default_rng(4).exponential(1 / RATE, int(RATE * LATENCY_S)))
    begin_s, names = time.perf_counter() + 0.5, list(ROUTES)
    for number, due_s in enumerate((begin_s + due_D).tolist()):
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        name = names[number % len(names)]
        least_busy(askers[name]).ask(due_s, request_of(ROUTES[name]))
    end = Deadline.after(10)
    while sum(map(len, took.values())) < len(due_D) and not end.passed():  # noqa: ASYNC110  # it does nothing else
        await asyncio.sleep(0.01)
    unanswered = len(due_D) - sum(map(len, took.values()))
    told = {name: quantiles(each) for name, each in {**took, "all": sum(took.values(), [])}.items()}
    told["all"] |= {"unanswered": unanswered, "wrong": len(wrong)}
    return told


def quantiles(took: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {f"p{q}_ms": round(1e3 * float(np.percentile(took, q)), 1) for q in (50, 99)} if took else {}


# -- the bench


@dataclass
class Block:
    """What was used and learnt between two closes."""

    seconds: float
    events: float
    cpu_s: dict[str, float]

    @property
    def rate(self) -> float:
        return self.events / self.seconds


class Watch:
    """How far the job is, and what its processes and the service used."""

    def __init__(self, hosted: HostedService) -> None:
        self._hosted = hosted
        launcher = JobFolder(hosted.jobs / "clicks").process().pid
        self._pids = {"service": [hosted.process.pid], "launcher": [launcher], "workers": list(below(launcher))}

    def mark(self) -> tuple[float, int, dict[str, float]]:
        """At the next close: when, events so far, CPU seconds so far."""
        events, deadline = self._events(), Deadline.after(20)
        while (now := self._events()) == events:
            deadline.check("waiting for a close")
            time.sleep(LOOK_S)
        return time.perf_counter(), now, {name: sum(map(cpu_s, pids)) for name, pids in self._pids.items()}

    def _events(self) -> int:
        return int(self._hosted.ask("GET", "/jobs/clicks")["events"] or 0)

    def block(self) -> Block:
        """One of BLOCK_S."""
        begin_s, events, used = self.mark()
        time.sleep(BLOCK_S)
        end_s, now, then = self.mark()
        return Block(end_s - begin_s, now - events, {name: then[name] - used[name] for name in used})


def below(pid: int) -> Iterator[int]:
    """Processes that it started, and those that they did."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    wanted = [pid]
    while wanted:
        found = [child for child, parent in parents.items() if parent in wanted]
        yield from found
        wanted = found


@contextlib.contextmanager
def clients(address: str) -> Iterator[subprocess.Popen[str]]:
    """The clients' process, idle until it is told."""
    command = [sys.executable, "-m", "tests.bench.load", "--read", address]
    pipe = subprocess.PIPE
    made = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    os.sched_setscheduler(made.pid, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield made
    finally:
        made.kill()
        made.communicate()


def say(pipe: IO[str]) -> None:
    pipe.write("\n")
    pipe.flush()


def slowdown(hosted: HostedService, address: str, pairs: int) -> dict:
    """The first figure."""
    watch, with_them, without, answered = Watch(hosted), list[Block](), list[Block](), list[dict]()
    with clients(address) as readers:
        for number in range(pairs):
            for there in (True, False) if number % 2 else (False, True):  # so that a drift is nobody's
                if there:
                    say(readers.stdin)
                    time.sleep(1.0)  # streams are opened
                    with_them.append(watch.block())
                    say(readers.stdin)
                    answered.append(json.loads(readers.stdout.readline()))
                else:
                    without.append(watch.block())
    ratio = statistics.median(a.rate / b.rate for a, b in zip(with_them, without, strict=True))
    cores = {
        name: [
            round(statistics.median(b.cpu_s[name] / b.seconds for b in blocks), 3) for blocks in (with_them, without)
        ]
        for name in ("service", "launcher", "workers")
    }
    per_event = [statistics.median(b.cpu_s["workers"] / b.events for b in blocks) for blocks in (with_them, without)]
    return {
        "slowdown": round(1 - ratio, 4),
        "max_slowdown": MAX_SLOWDOWN,
        "events_per_s, with and without": [round(statistics.median(b.rate for b in x)) for x in (with_them, without)],
        "ratios": [round(a.rate / b.rate, 3) for a, b in zip(with_them, without, strict=True)],
        "cores used, with and without": cores,
        "workers' CPU an event, ratio": round(per_event[0] / per_event[1], 4),
        "answers": sum(each["answers"] for each in answered),
        "stream_events": sum(each["events"] for each in answered),
        "wrong": sum(each["wrong"] for each in answered),
        "load_1_min": round(os.getloadavg()[0], 1),
    }


def latency(address: str) -> dict:
    """The second figure."""
    command = [sys.executable, "-m", "tests.bench.load", "--ask", address]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LATENCY_S + 40)
    return json.loads(done.stdout.splitlines()[-1]) | {"target_p99_ms": TARGET_P99_MS}


def figures(pairs: int = PAIRS, passes: int = 0) -> dict[str, dict]:
    """Both; without pairs the latency alone. It is measured once the job has closed so many passes."""
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as hosted:
        hosted.ask("POST", "/jobs", {"spec": spec(), "base": str(Path(name) / "data")})
        hosted.until("/jobs/clicks", lambda told: (told["version"] or 0) > 5, START_S)
        time.sleep(WARM_S)
        address = str(hosted.http.base_url).partition("//")[2].rstrip("/")
        found = {"200 clients and 20 streams beside training": slowdown(hosted, address, pairs)} if pairs else {}
        hosted.until("/jobs/clicks", lambda told: told["version"] >= passes, PASSES_S)
        for path in ROUTES.values():  # the first answers read the whole log
            hosted.http.get(path).raise_for_status()
        begun = hosted.ask("GET", "/jobs/clicks")["version"]
        found["GET, 100 requests/s while training"] = latency(address)
        ended = hosted.ask("GET", "/jobs/clicks")["version"]
        found["GET, 100 requests/s while training"] |= {"passes": [begun, ended]}
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--read", metavar="HOST:PORT")
    parser.add_argument("--ask", metavar="HOST:PORT")
    told = parser.parse_args()
    host, _, port = (told.read or told.ask or "").partition(":")
    if told.read:
        asyncio.run(read(host, int(port)))
    elif told.ask:
        with prioritized():
            print(json.dumps(asyncio.run(ask(host, int(port)))))
    else:
        print(json.dumps(figures(told.pairs, told.passes), indent=1))


if __name__ == "__main__":
    main()
