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
OF_EXPORTERS = frozenset(point for point in Point if point.startswith("export-"))
"""Points of a process that is no worker: nothing of the job ends with it."""
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
    """A worker, or EVERYBODY, is killed `delay_s` after its generation began, or closed so many new passes."""

    worker: str
    closes: int
    delay_s: float
    stopped: bool = False
    """It is only stopped, and goes on beside the generation that takes its place."""


Death = AtPoint | AtInstant


def workers_of(num_trainers: int, num_shards: int) -> list[str]:
    """The names of a job's workers; the chief is the first."""
    return [f"trainer-{rank}" for rank in range(num_trainers)] + [f"shard-{number}" for number in range(num_shards)]


def places(num_trainers: int, num_shards: int, *, mirrored: bool, operated: bool = False) -> list[tuple[Point, str]]:
    """Every point with every worker that comes to it. `operated`: whether tables shrink, or the like."""
    workers = workers_of(num_trainers, num_shards)
    trainers, shards = workers[:num_trainers], workers[num_trainers:] or workers

    def at(point: Point) -> Sequence[str]:
        return trainers if point in OF_TRAINERS else shards if point in OF_SHARDS else [CHIEF]

    never = OF_EXPORTERS | (frozenset() if operated else OF_OPERATIONS)
    points = [point for point in Point if point not in never and (mirrored or point is not Point.UPLOADED)]
    return [(point, worker) for point in points for worker in at(point)]


def deaths(seed: int, num_trainers: int, num_shards: int, *, mirrored: bool, operated: bool = False) -> Iterator[Death]:
    """Deaths without end: every place in turn, in an order of its own each time, a random instant after each."""
    random = Random(seed)
    everywhere = places(num_trainers, num_shards, mirrored=mirrored, operated=operated)
    workers = workers_of(num_trainers, num_shards)
    while True:
        random.shuffle(everywhere)
        for point, worker in everywhere:
            yield AtPoint(worker, point, random.randint(1, MAX_HIT) if point in OFTEN else 1)
            closes = random.choice([0, random.randint(1, MAX_CLOSES)])
            delay_s = random.uniform(0, MAX_DELAY_S if closes else MAX_START_S)
            stopped = random.random() < STOPPED_SHARE
            yield AtInstant(random.choice([*workers, EVERYBODY]), closes, delay_s, stopped)
