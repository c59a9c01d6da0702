"""A job that is resized again and again while its workers are killed, and the same job left alone.

`python -m tests.faults.resized_job --kills 50 --seed 1` kills workers at random instants, those that stand by too, and
prints what it did.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.errors import HeadraceError
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.child import local_starter
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.store import WORKERS, claimed
from headrace.service.cluster.worker_plan import preloaded
from headrace.service.faults.injection import AT_ONCE
from headrace.service.spec.job import LoadedJob, load_job
from tests.integration.stream_job import SPEC, write_job
from tests.jobs import changed

COMPARED = ("events", "samples", "rejected", "positions", "metrics", "digest", "passes")
SLOWLY, SEEN = "slowly", "seen"
"""While a file SLOWLY is there, a new pass takes as many seconds as it says: enough for resizes and deaths on the way.
Passes that are trained again hurry: the folder SEEN knows them."""
PIPE = f"""
if [ ! -e {SLOWLY} ]; then exec cat; fi
segment=$(mktemp -p {SEEN}); cat > $segment
seen={SEEN}/$(cksum < $segment | tr ' ' -)
if [ ! -e $seen ]; then sleep $(cat {SLOWLY}); fi
touch $seen; cat $segment; rm $segment
"""
PACES_S = (0.3, 1.0)
"""How long a new pass takes, at first and after PATIENCE_S of one resize: a busy machine must not end the stream."""
PATIENCE_S = 5.0
NUM_LINES, LINES_PER_KILL = 1600, 200
RESIZE_S = 120.0
"""Longest time for one resize, deaths included."""

Size = Mapping[str, int]
Faults = Callable[[int, str], Any]


def written(folder: Path, num_lines: int = NUM_LINES) -> Path:
    """The job file, with its stream and its pipe."""
    (folder / "pipe.sh").write_text(PIPE)
    (folder / SEEN).mkdir()
    return write_job(folder, num_lines=num_lines, spec=changed(SPEC, {"pipe.command": ["sh", "pipe.sh"]}))


def job_at(file: Path, store: str, cluster: str, *settings: str) -> LoadedJob:
    """The job in a store of its own, with small passes and commits for resizes and the end alone."""
    fixed = [f"store.path={store}", f"cluster={cluster}", "commit={every='600s', keep=1000}", "passes.max_events=32"]
    return load_job(file, [*fixed, "train.threads=1", "train.batch_size=8", "train.matmul='mkl'", *settings])


class Resizer:
    """Asks for one size after another; a request that failed is made anew. Then the job may hurry to its end."""

    def __init__(self, job: LoadedJob, sizes: Iterable[Size]) -> None:
        self.acted: list[Size] = []
        self.failures: list[str] = []
        self._job, self._sizes, self._slowly = job, sizes, job.folder / SLOWLY
        self._pace_s = 0.0
        self._over = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on a thread."""
        self._pace(PACES_S[0])
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._slowly.unlink(missing_ok=True)

    def _pace(self, pause_s: float) -> None:
        if pause_s != self._pace_s:
            self._pace_s = pause_s
            write_whole(REAL, self._slowly, str(pause_s).encode())

    def _work(self) -> None:
        for number, size in enumerate(self._sizes):
            deadline = Deadline.after(RESIZE_S)
            while not (self._over.is_set() or deadline.passed()):
                if self._asked(f"resize-{number}-{len(self.failures)}", size, deadline):
                    self.acted.append(size)
                    break
        self._slowly.unlink()

    def _asked(self, id_: str, size: Size, deadline: Deadline) -> bool:
        """Ask under one id until the resize has acted; False where it failed, and needs another id."""
        request = {"do": "ask", "operation": {"op": "resize", "id": id_, **size}}
        patience = Deadline.after(PATIENCE_S)
        while not (self._over.is_set() or deadline.passed()):
            try:
                with JobClient(self._job.store).rank0() as client:
                    if client.operate(request, Deadline.after(5))["version"] is not None:
                        return True
            except HeadraceError as error:
                if "its new workers failed" in str(error):
                    self.failures.append(str(error))
                    return False
            self._pace(PACES_S[patience.passed()])
            self._over.wait(0.05)
        return False


def run(
    job: LoadedJob, sizes: Iterable[Size] = (), faults: Faults = lambda generation, worker: (), said: list | None = None
) -> tuple[list[str], Resizer]:
    """Run `job` to its end in an empty store, resized; the lines it said, and what became of the sizes."""
    said = [] if said is None else said
    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=True))
        folder = held.enter_context(run_folder(store / WORKERS))
        starter = held.enter_context(local_starter(preloaded(job.cluster)))
        launcher = held.enter_context(ProcessLauncher(starter))
        resizer, plans = Resizer(job, sizes), GenerationPlans(job, folder, spare=True)
        runner = JobRunner(
            job.spec.name,
            plans.phases(),
            lambda worker, text: said.append(f"{worker}: {text}"),
            launcher=launcher,
            restarts=AT_ONCE,
            faults=faults,
            standbys=plans,
            status_interval_s=0.05,
        )
        with resizer.working() if sizes else ExitStack():
            outcome = runner.run()
        assert outcome.code == 0, (outcome, said[-30:])
    return said, resizer


def report(job: LoadedJob) -> dict[str, Any]:
    """The figures at the end that resizes and deaths must not change."""
    found = json.loads((job.store / "report.json").read_text())
    return {key: found[key] for key in COMPARED}


def workers_in(store: Path) -> dict[tuple[int, str], int]:
    """Process numbers of the workers of the job in a store, by generation and name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b" ", b"\0").split(b"\0")  # a title is one text
        except (FileNotFoundError, ProcessLookupError):
            continue
        for word in words:
            if word.startswith(os.fsencode(store / WORKERS)):
                file = Path(os.fsdecode(word))
                found[int(file.parent.name[1:]), file.stem] = int(path.parent.name)
    return found


class RandomDeaths:
    """Kills workers at random instants: one of any generation, or a whole generation."""

    def __init__(self, seed: int, store: Path, most: int, pause_s: float = 3.0) -> None:
        self.killed: list[tuple[int, str]] = []
        self.num_kills = 0
        self._random, self._store, self._most, self._pause_s = Random(seed), store, most, pause_s
        self._over = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Kill on a thread."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @property
    def done(self) -> bool:
        """Whether all deaths have happened."""
        return self.num_kills >= self._most

    def _work(self) -> None:
        while not self.done and not self._over.wait(self._random.uniform(0.2, 2 * self._pause_s)):
            self._kill()

    def _kill(self) -> None:
        pids = workers_in(self._store)
        if not pids:
            return
        chosen = self._random.choice(sorted(pids))
        whole = self._random.random() < 0.2
        names = [each for each in sorted(pids) if each == chosen or (whole and each[0] == chosen[0])]
        for name in names:
            try:
                os.kill(pids[name], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(name)
        self.num_kills += 1


def sizes_until(done: Callable[[], bool], seed: int, role: str, choices: range, least: int) -> Iterator[Size]:
    """Sizes in random order, each another one than before, until all deaths have happened."""
    draw, last, number = Random(seed), choices.stop, 0
    while number < least or not done():
        last = draw.choice([each for each in choices if each != last])
        number += 1
        yield {role: last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = written(Path(name), LINES_PER_KILL * given.kills)
        calm, killed = (job_at(file, store, "{trainers=1, shards=1}") for store in ("calm", "killed"))
        run(calm)
        deaths = RandomDeaths(given.seed, killed.store, given.kills)
        said: list[str] = []
        with deaths.working():
            _, resizer = run(killed, sizes_until(lambda: deaths.done, given.seed, "shards", range(4), 4), said=said)
        same = report(killed) == report(calm)
        taken = sum("takes over" in line for line in said)
        print(f"seed {given.seed}: {deaths.num_kills} kills of {len(deaths.killed)} workers: {deaths.killed}")
        print(f"{len(resizer.acted)} resizes acted, {taken} by workers that stood by, {len(resizer.failures)} failed")
        print(f"digest {report(killed)['digest']}: {'the same' if same else 'ANOTHER'}")
        sys.exit(not same)


if __name__ == "__main__":
    main()
