"""A job that is resized again and again, and killed on the way, ends like one that nobody touched.

Deaths at points of the hand-over, each in a generation of its own; and random deaths of workers and of everybody.
"""

import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice, pairwise
from random import Random

import pytest

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, NotYet, Unavailable
from millrace.failpoints import LAST_WORDS, ArmedFailpoint, Failpoint
from millrace.rpc.job_client import JobClient, NotRunning
from service.cluster.generation_plans import GenerationPlans
from service.cluster.job_run import preloaded
from service.cluster.job_runner import JobRunner
from service.cluster.launchers import LauncherSettings, open_launcher
from service.cluster.run_folder import run_folder
from service.cluster.store import WORKERS, claimed
from service.faults.deaths import CHIEF
from service.faults.injection import AT_ONCE
from service.spec.job import load_job
from tests.integration.running_job import workers_of
from tests.integration.stream_job import write_job
from trainer.journal.job_history import JobHistory
from trainer.journal.log import RecordKind, read

COMPARED = ("events", "samples", "rejected", "positions", "metrics", "digest", "passes")
POINTS = (
    (CHIEF, Failpoint.OPERATION_LOGGED, 1),  # decided, and nothing else
    (CHIEF, Failpoint.OPERATED, 2),  # closed
    (CHIEF, Failpoint.DENSE_WRITTEN, 1),  # the last commit of a generation is not whole
    ("shard-0", Failpoint.CHECKPOINT_MADE, 1),
    (CHIEF, Failpoint.COMMITTED, 1),  # it is
    (CHIEF, Failpoint.CLAIMED, 1),  # the next generation
    ("shard-0", Failpoint.RESTORE_LINKED, 1),
    (CHIEF, Failpoint.RESTORED, 1),
    (CHIEF, Failpoint.OPERATION_LOGGED, 1),
)


NUM_RESIZES = 14
"""Enough for all points: in a generation that ends, the next request may be logged, too."""


def some_of(role, *numbers):
    """Sizes to ask for, in turn."""
    return [{role: number} for number in islice(cycle(numbers), NUM_RESIZES)]


class Resizer:
    """Asks for one size after another; each request is repeated under its id until it has acted."""

    def __init__(self, store, sizes):
        self.store, self.sizes, self.acted = store, sizes, []
        self._over = threading.Event()

    @contextmanager
    def working(self):
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _work(self):
        for number, size in enumerate(self.sizes):
            request = {"do": "ask", "operation": {"op": "resize", "id": f"resize-{number}", **size}}
            while not self._over.is_set() and self._version(request) is None:
                self._over.wait(0.02)
            self.acted.append(size)

    def _version(self, request):
        try:
            with JobClient(self.store).rank0() as client:
                return client.operate(request, Deadline.after(5))["version"]
        except (Unavailable, DeadlineExceeded, NotYet, NotRunning):
            return None


def run(job, sizes=(), faults=lambda generation, worker: ()):
    """Run `job` to its end in an empty store, resized; the lines it said, and the sizes that acted."""
    said: list[str] = []
    with ExitStack() as held:
        store = held.enter_context(claimed(job.store, job.spec.name, fresh=True))
        folder = held.enter_context(run_folder(store / WORKERS))
        launcher = held.enter_context(open_launcher(LauncherSettings(preload=preloaded(job.cluster))))
        resizer = Resizer(store, sizes)
        runner = JobRunner(
            job.spec.name,
            GenerationPlans(job, folder).phases(),
            lambda worker, text: said.append(f"{worker}: {text}"),
            launcher=launcher,
            restarts=AT_ONCE,
            faults=faults,
        )
        with resizer.working():
            outcome = runner.run()
        assert outcome.code == 0, (outcome, said[-30:])
    return said, resizer.acted


def job_at(folder, store, cluster):
    return load_job(
        folder / "job.toml",
        [f"store.path={store}", f"cluster={cluster}", "commit={every='600s', keep=1000}", "passes.max_events=16",
         "train.threads=1", "train.batch_size=8", "train.matmul='mkl'"],
    )  # fmt: skip


def report(job):
    found = json.loads((job.store / "report.json").read_text())
    return {key: found[key] for key in COMPARED}


def deaths_at(points: Sequence[tuple[str, Failpoint, int]]):
    """The failpoints of each generation: the first dies at the first point, and so on."""

    def faults(generation, worker):
        if generation > len(points) or points[generation - 1][0] != worker:
            return ()
        return (ArmedFailpoint(point=points[generation - 1][1], hit=points[generation - 1][2]),)

    return faults


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_death_at_every_point_of_a_resize_of_shards_changes_nothing(tmp_path):
    write_job(tmp_path, num_lines=900)
    calm, killed = (job_at(tmp_path, store, "{trainers=1, shards=1}") for store in ("calm", "killed"))
    run(calm)
    said, acted = run(killed, some_of("shards", 2, 3, 1), deaths_at(POINTS))
    assert report(killed) == report(calm)
    died = [line for line in said if LAST_WORDS in line]
    assert [line.rpartition(" ")[2] for line in died] == [point.value for _, point, _ in POINTS], died
    assert len(acted) > 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_death_at_every_point_of_a_resize_of_trainers_loses_no_event(tmp_path):
    """A closed pass is the same again in every replay, or the job would stop; its trainers are as many as logged."""
    write_job(tmp_path, num_lines=900)
    job = job_at(tmp_path, "killed", "{trainers=1, shards=1}")
    points = [each for each in POINTS if each[1] is not Failpoint.OPERATED]
    said, acted = run(job, some_of("trainers", 3, 2, 1), deaths_at(points))
    assert len([line for line in said if LAST_WORDS in line]) == len(points) and len(acted) > 3
    history = JobHistory.of(read(job.store / "log"))
    plans = [plan.content for _, plan in sorted(history.plans.items())]
    assert {len(plan.segments) for plan in plans} == {1, 2, 3}
    segments = sorted((s.partition, s.begin, s.end) for plan in plans for rank in plan.segments for s in rank)
    for (name, _, end), (other, begin, _) in pairwise(segments):  # the log is pruned before the first commit
        assert name != other or begin == end, "every event once, and none left out"
    assert report(job)["events"] == 3 * 900 - 21


class RandomDeaths:
    """Kills a worker, or all of them, some time after each start of a generation."""

    def __init__(self, seed, store):
        self._random, self._store, self.killed = Random(seed), store, []
        self._over = threading.Event()
        self._started = threading.Event()
        self.generation = 0

    def faults(self, generation, worker):
        """Called for each worker that starts."""
        self.generation = generation
        self._started.set()
        return ()

    @contextmanager
    def working(self, most):
        thread = threading.Thread(target=self._work, args=(most,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._started.set()
            thread.join()

    def _work(self, most):
        while len(self.killed) < most:
            self._started.wait()
            self._started.clear()
            if self._over.wait(self._random.uniform(0, 4.0)):
                return
            pids = workers_of(self._store)
            chosen = sorted(pids) if self._random.random() < 0.2 else sorted(pids)[:0]
            chosen = chosen or ([self._random.choice(sorted(pids))] if pids else [])
            for name in chosen:
                try:
                    os.kill(pids[name], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed.append((self.generation, name))


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_deaths_among_resizes_change_nothing(tmp_path, seed):
    write_job(tmp_path, num_lines=900)
    calm, killed = (job_at(tmp_path, store, "{trainers=1, shards=1}") for store in ("calm", "killed"))
    run(calm)
    deaths = RandomDeaths(seed, killed.store)
    with deaths.working(5):
        draw = Random(seed)
        _, acted = run(killed, ({"shards": draw.randrange(0, 4)} for _ in range(8)), deaths.faults)
    assert report(killed) == report(calm), (seed, deaths.killed)
    assert len(acted) > 3
    kinds = [record for record in read(killed.store / "log") if record.kind is RecordKind.OPERATION]
    assert sum(record.body["op"] == "resize" for record in kinds) >= len(acted) - 1
