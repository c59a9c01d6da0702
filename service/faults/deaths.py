"""Draws the deaths of fault runs: which worker dies, and where or when. Pure.

service.faults.injection carries them out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from headrace.failpoints import Failpoint

RANK_0 = "trainer-0"
OF_TRAINERS = frozenset({Failpoint.BEFORE_CLOSE})
"""Failpoints that every trainer reaches."""
OF_SHARDS = frozenset(
    {
        Failpoint.PARTLY_PUSHED,
        Failpoint.SNAPSHOT_TAKEN,
        Failpoint.ROWS_WRITTEN,
        Failpoint.CHECKPOINT_MADE,
        Failpoint.PART_UPLOADED,
        Failpoint.ROWS_HANDED,
        Failpoint.RESTORE_LINKED,
    }
)
"""Failpoints that every shard, or the trainer with an embedded one, reaches. All others are rank 0's."""
OF_RESIZES = frozenset({Failpoint.ROWS_HANDED, Failpoint.HANDED_OVER})
"""Failpoints that are reached only where a job is resized while it runs."""
OF_OPERATIONS = frozenset({Failpoint.OPERATION_LOGGED, Failpoint.OPERATED})
"""Failpoints that a rank 0 reaches only where operations act at closes."""
EXPORTER = "exporter"
"""The process that makes exports, a child of rank 0. Its death does not end the generation."""
OF_EXPORTERS = frozenset(
    {Failpoint.EXPORT_BEGUN, Failpoint.EXPORT_ROWS, Failpoint.EXPORT_MANIFEST, Failpoint.EXPORT_DONE}
)
"""Failpoints that an exporter reaches."""
OF_EXPORTS = OF_EXPORTERS | {Failpoint.EXPORT_CUT}
"""Failpoints that are reached only where there are exports."""
EVERYBODY = "everybody"
"""All workers of a generation at once, as on a machine that is cut off."""
OFTEN = frozenset(
    {Failpoint.PLAN_LOGGED, Failpoint.LOG_WRITTEN, Failpoint.LOG_SYNCED, Failpoint.PARTLY_PUSHED, Failpoint.CLOSED}
)
"""Failpoints that a generation reaches repeatedly."""
MAX_HIT = 3
"""A worker dies when it reaches such a failpoint for the first, second, ... or this time."""
MAX_START_S = 0.8
"""Half of the random instants come at most so long after the start of a generation."""
MAX_CLOSES, MAX_DELAY_S = 3, 0.05
"""The other half come at most so long after so many new passes. Later ones would use up the stream."""
MAX_FILES = 2
"""An exporter dies at this file of an export at the latest: the first export has one, those with tombstones two."""
EXPORTER_SHARE = EXPORTING_SHARE = 0.25
"""Shares of the deaths at random instants, for a job with exports: those of the exporter; of the others, those shortly
after the cut of an export."""
MAX_EXPORTING_S = 0.4
"""Longest time from the cut of an export to such a death."""
STOPPED_SHARE = 0.2
"""Share of the random instants at which the worker is only stopped, taken for dead, and continued later."""


@dataclass(frozen=True, slots=True)
class AtFailpoint:
    """A worker dies when it reaches a failpoint for the `hit`-th time."""

    worker: str
    point: Failpoint
    hit: int = 1


@dataclass(frozen=True, slots=True)
class AtInstant:
    """A worker, EVERYBODY or the EXPORTER is killed `delay_s` after its generation began, or closed or cut so much.

    After a death of the EXPORTER the generation continues: the next death is counted from there.
    """

    worker: str
    closes: int
    """New passes that the generation has closed before."""
    delay_s: float
    stopped: bool = False
    """The worker is only stopped, and continues beside the generation that replaces it."""
    exports: int = 0
    """Exports that the generation has cut before."""


Death = AtFailpoint | AtInstant


def workers_of(num_trainers: int, num_shards: int, num_readers: int = 0) -> list[str]:
    """The names of a job's workers; rank 0 is the first."""
    counts = {"trainer": num_trainers, "shard": num_shards, "reader": num_readers}
    return [f"{role}-{number}" for role, count in counts.items() for number in range(count)]


@dataclass(frozen=True, slots=True)
class JobFeatures:
    """The work of a job beside learning."""

    mirrored: bool = False
    """Commits are copied to a mirror."""
    operated: bool = False
    """Operations act on tables."""
    exporting: bool = False
    """There are exports."""
    uploaded: bool = False
    """The files of commits are objects, and a fence decides which commits count."""
    readers: int = 0
    """Number of readers. Where there are several, the death of one does not end the generation."""


def failpoint_places(num_trainers: int, num_shards: int, busy: JobFeatures) -> list[tuple[Failpoint, str]]:
    """Every failpoint with every worker that reaches it."""
    workers = workers_of(num_trainers, num_shards)
    trainers, shards = workers[:num_trainers], workers[num_trainers:] or workers

    def at(point: Failpoint) -> Sequence[str]:
        if point in OF_EXPORTERS:
            return [EXPORTER]
        return trainers if point in OF_TRAINERS else shards if point in OF_SHARDS else [RANK_0]

    never = set(OF_RESIZES)
    never |= set() if busy.mirrored else {Failpoint.UPLOADED}
    never |= set() if busy.uploaded else {Failpoint.PART_UPLOADED, Failpoint.FENCED}
    never |= set() if busy.exporting else OF_EXPORTS
    never |= set() if busy.exporting or busy.operated else OF_OPERATIONS
    return [(point, worker) for point in Failpoint if point not in never for worker in at(point)]


def deaths(seed: int, num_trainers: int, num_shards: int, busy: JobFeatures) -> Iterator[Death]:
    """Endless deaths: every failpoint and worker in turn, in a new order each time, and a random instant after each."""
    random = Random(seed)
    everywhere = failpoint_places(num_trainers, num_shards, busy)
    workers = workers_of(num_trainers, num_shards, busy.readers)
    while True:
        random.shuffle(everywhere)
        for point, worker in everywhere:
            most = MAX_HIT if point in OFTEN else MAX_FILES if point is Failpoint.EXPORT_ROWS else 1
            yield AtFailpoint(worker, point, random.randint(1, most) if most > 1 else 1)
            if busy.exporting and worker != EXPORTER and random.random() < EXPORTER_SHARE:
                yield _exporting(random, EXPORTER)
            victim = random.choice([*workers, EVERYBODY])
            if busy.exporting and random.random() < EXPORTING_SHARE:
                yield _exporting(random, victim)
            else:
                yield _anywhere(random, victim)


def _anywhere(random: Random, worker: str) -> AtInstant:
    closes = random.choice([0, random.randint(1, MAX_CLOSES)])
    delay_s = random.uniform(0, MAX_DELAY_S if closes else MAX_START_S)
    return AtInstant(worker, closes, delay_s, random.random() < STOPPED_SHARE)


def _exporting(random: Random, worker: str) -> AtInstant:
    return AtInstant(worker, 0, random.uniform(0, MAX_EXPORTING_S), exports=1)
