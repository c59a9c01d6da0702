"""A long run squeezed: the simulated stream at full speed, commits every 5 s, a kill every minute on average.

HEADRACE_SOAK_S is how long it runs, 1800 s unless set; the same passes are trained again undisturbed afterwards.
Numbers are printed: run it with -s to see them.
"""

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.integration.running_job import RunningJob

SECONDS = float(os.environ.get("HEADRACE_SOAK_S", "1800"))
KILL_EVERY_S, LOOK_S, SETTLED_S, SEED = 60.0, 1.0, 8.0, 1
"""Mean pause between kills; between looks at memory; after a kill until memory is looked at again."""
JOB = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "clicks" / "job.toml"
SETTINGS = (
    "sources.clicks.rate=0",
    "sources.clicks.item_life=1000000000",  # items that die leave rows behind, which is growth, and no leak
    "commit={every='5s', keep=2}",
    "cluster={trainers=2, shards=2, max_restarts=1000, restart_window='1s'}",
    "train.threads=1",
    "metrics.halves=false",
)
SAME = ("digest", "events", "samples", "rejected", "positions", "passes", "metrics")
FLAT_A_MINUTE = {"rss_mb": 2.0, "descriptors": 0.5, "disk_mb": 2.0, "files": 2.0}
"""Growth over the second half that counts as none: an hour of it would be seen elsewhere, too."""


@dataclass
class Looks:
    """What was seen of each process, and of the store, over time."""

    seen: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def note(self, who: str, at_s: float, **figures: float) -> None:
        for what, value in figures.items():
            self.seen.setdefault((who, what), []).append((at_s, value))

    def a_minute(self, who: str, what: str) -> tuple[float, float]:
        """The last value, and its growth a minute over the second half."""
        at_N, value_N = np.array(self.seen[who, what]).T
        late = at_N > at_N[-1] / 2
        return value_N[-1], 60 * float(np.polyfit(at_N[late], value_N[late], 1)[0])


def look(job: RunningJob, looks: Looks, at_s: float) -> None:
    """Note what every process of the job holds, and the store."""
    launcher = {"launcher": job.process.pid, "nursery": nursery(job.process.pid)}
    for who, pid in (launcher | job.workers()).items():
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            looks.note(who, at_s, rss_mb=int(status["VmRSS"].split()[0]) / 1e3, descriptors=held)
        except (FileNotFoundError, ProcessLookupError, KeyError, TypeError):  # it has ended
            continue
    sizes = {}
    for folder, _, names in os.walk(job.store):
        for name in names:
            try:
                found = (Path(folder) / name).stat()
            except FileNotFoundError:
                continue
            sizes[found.st_ino] = found.st_size
    looks.note("store", at_s, disk_mb=sum(sizes.values()) / 1e6, files=len(sizes))


def nursery(launcher: int) -> int | None:
    """The process that forks the workers."""
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in path.read_text().split():
            if b"headrace.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None


def disturbed(folder: Path, seconds: float) -> tuple[dict, Looks, list[str]]:
    """Run for so long, with kills; its report, what was seen, whom it lost."""
    job, draw, looks, killed = started(folder), random.Random(SEED), Looks(), []
    try:
        begin_s = time.monotonic()
        next_s = draw.expovariate(1 / KILL_EVERY_S)
        last_s = 0.0
        while (at_s := time.monotonic() - begin_s) < seconds:
            assert job.process.poll() is None, "".join(job.said[-30:])
            workers = job.workers()
            if at_s >= next_s and workers:
                name = draw.choice(sorted(workers))
                os.kill(workers[name], signal.SIGKILL)
                killed.append(name)
                last_s, next_s = at_s, at_s + draw.expovariate(1 / KILL_EVERY_S)
            if at_s - last_s > SETTLED_S:
                look(job, looks, at_s)
            time.sleep(LOOK_S)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(120)
        return job.report, looks, killed
    finally:
        job.kill()


def started(folder: Path, events: int = 1 << 40) -> RunningJob:
    """The job on its way; what it says is kept, and read so that it never waits."""
    folder.mkdir()
    job = RunningJob(JOB, folder, *SETTINGS, f"sources.clicks.events={events}")
    threading.Thread(target=lambda: job.said.extend(job.process.stdout), daemon=True).start()
    return job


def undisturbed(folder: Path, events: int) -> dict:
    job = started(folder, events)
    try:
        assert job.process.wait(3 * SECONDS + 120) == 0, "".join(job.said[-30:])
        return job.report
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS + 600)
def test_a_long_run_with_commits_and_kills_stays_flat_and_ends_as_the_undisturbed_one(tmp_path):
    killed_report, looks, killed = disturbed(tmp_path / "killed", SECONDS)
    assert killed_report is not None and killed, "it was to be killed, and to end in order"
    growth = {(who, what): looks.a_minute(who, what) for who, what in sorted(looks.seen)}
    print(
        f"\n{len(killed)} kills in {SECONDS:g} s, {killed_report['passes']} passes, {killed_report['samples']} samples"
    )
    for (who, what), (last, slope) in growth.items():
        print(f"{who:10} {what:12} {last:10.1f}  {slope:+8.2f} a minute")
    calm = undisturbed(tmp_path / "calm", killed_report["events"])
    print(json.dumps({"digest": calm["digest"], "kills": killed}))
    assert {key: killed_report[key] for key in SAME} == {key: calm[key] for key in SAME}
    assert not {at: slope for at, (_, slope) in growth.items() if slope > FLAT_A_MINUTE[at[1]] and SECONDS >= 600}
