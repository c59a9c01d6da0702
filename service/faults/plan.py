"""Which worker is to die, and where: pure. Who makes it so is service.faults.acting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from millrace.points import Point

CHIEF = "trainer-0"
OF_TRAINERS = frozenset({Point.BEFORE_CLOSE})
"""Points that every trainer comes to."""
OF_SHARDS = frozenset(
    {Point.PARTLY_PUSHED, Point.SNAPSHOT_TAKEN, Point.ROWS_WRITTEN, Point.CHECKPOINT_MADE, Point.RESTORE_LINKED}
)
"""Points that every shard comes to, or the trainer with an embedded one. The others are the chief's."""
OF_OPERATIONS = frozenset({Point.OPERATION_LOGGED, Point.OPERATED})
"""Points that a chief comes to where something happens at closes beside learning."""
EXPORTER = "exporter"
"""The process that makes exports, a child of the chief's: no generation ends with it."""
OF_EXPORTERS = frozenset({Point.EXPORT_BEGUN, Point.EXPORT_ROWS, Point.EXPORT_MANIFEST, Point.EXPORT_DONE})
"""Points that an exporter comes to."""
OF_EXPORTS = OF_EXPORTERS | {Point.EXPORT_CUT}
"""Points that are come to where there are exports."""
EVERYBODY = "everybody"
"""All workers of a generation at once: a machine that was cut off."""
OFTEN = frozenset({Point.PLAN_LOGGED, Point.LOG_WRITTEN, Point.LOG_SYNCED, Point.PARTLY_PUSHED, Point.CLOSED})
"""Points that a generation comes to again and again."""
MAX_HIT = 3
"""At which time of coming to such a point a worker dies, at most."""
MAX_START_S = 0.8
"""Half of the random instants are so long after a generation's start at most,"""
MAX_CLOSES, MAX_DELAY_S = 3, 0.05
"""half so many new passes, and then so long. Longer ones would use the stream up."""
MAX_FILES = 2
"""At which file of an export an exporter dies, at most: its first has one, with what was deleted two."""
EXPORTER_SHARE = EXPORTING_SHARE = 0.25
"""Of the deaths at random instants of a job with exports: those of the exporter; of the others, those a moment after an
export was cut,"""
MAX_EXPORTING_S = 0.4
"""which is so long at most."""
STOPPED_SHARE = 0.2
"""Of the deaths at random instants, those that are none: the worker is stopped, taken for dead, and goes on later."""


@dataclass(frozen=True, slots=True)
class AtPoint:
    """A worker kills itself where it comes to a point for the `hit`-th time."""

    worker: str
    point: Point
    hit: int = 1


@dataclass(frozen=True, slots=True)
class AtInstant:
    """A worker, EVERYBODY or the EXPORTER is killed `delay_s` after its generation began, or did so much.

    What follows a death of the EXPORTER's comes to the same generation, and is counted from there.
    """

    worker: str
    closes: int
    delay_s: float
    stopped: bool = False
    """It is only stopped, and goes on beside the generation that takes its place."""
    exports: int = 0
    """Cut, beside the passes closed."""


Death = AtPoint | AtInstant


def workers_of(num_trainers: int, num_shards: int) -> list[str]:
    """The names of a job's workers; the chief is the first."""
    return [f"trainer-{rank}" for rank in range(num_trainers)] + [f"shard-{number}" for number in range(num_shards)]


@dataclass(frozen=True, slots=True)
class Busy:
    """What a job does beside learning."""

    mirrored: bool = False
    """Commits are copied."""
    operated: bool = False
    """Tables shrink, or the like."""
    exporting: bool = False
    """There are exports."""


def places(num_trainers: int, num_shards: int, busy: Busy) -> list[tuple[Point, str]]:
    """Every point with every worker that comes to it."""
    workers = workers_of(num_trainers, num_shards)
    trainers, shards = workers[:num_trainers], workers[num_trainers:] or workers

    def at(point: Point) -> Sequence[str]:
        if point in OF_EXPORTERS:
            return [EXPORTER]
        return trainers if point in OF_TRAINERS else shards if point in OF_SHARDS else [CHIEF]

    never = set[Point]()
    never |= set() if busy.mirrored else {Point.UPLOADED}
    never |= set() if busy.exporting else OF_EXPORTS
    never |= set() if busy.exporting or busy.operated else OF_OPERATIONS
    return [(point, worker) for point in Point if point not in never for worker in at(point)]


def deaths(seed: int, num_trainers: int, num_shards: int, busy: Busy) -> Iterator[Death]:
    """Deaths without end: every place in turn, in an order of its own each time, a random instant after each."""
    random = Random(seed)
    everywhere, workers = places(num_trainers, num_shards, busy), workers_of(num_trainers, num_shards)
    while True:
        random.shuffle(everywhere)
        for point, worker in everywhere:
            most = MAX_HIT if point in OFTEN else MAX_FILES if point is Point.EXPORT_ROWS else 1
            yield AtPoint(worker, point, random.randint(1, most) if most > 1 else 1)
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
