"""The world of the simulated stream: its users and items, their tastes, and how likely a click is.

The logit of a click is a sum of parts that a factorisation model can learn: a constant, the appeal of the item, the
topic on this device and at this hour, and the match of the user's taste with the item. Appeal and tastes swing slowly
(`drift`), and items are replaced (`item_life`), so a model that stops learning gets worse.

Nothing is stored: every trait is a hash of (seed, kind of trait, owner).

Shapes: E events, S items shown, D width of a taste.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.keys import GOLDEN

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

DAY_S = 86_400
EVENTS_A_DAY = 100_000
"""Events of all partitions in a day of event time."""
NUM_TOPICS, NUM_DEVICES, NUM_HOURS, NUM_TASTES = 20, 4, 24, 4

BASE_LOGIT = -1.9
APPEAL, TOPIC, TASTE = 1.1, 0.8, 0.9
"""Standard deviations of the parts of a logit."""
SWING_DAYS = 6.0
"""Average period, in days, of the swing of appeal and taste at drift 1."""


def hashed(seed: int, what: int, whose: U64 | I64) -> U64:
    """64 random bits for each of `whose`: splitmix64's finaliser of seed, kind of trait and number."""
    with np.errstate(over="ignore"):
        value = whose.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64((seed * 1_000_003 + what * 7919) % (1 << 64))
        for _ in range(2):
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value


def uniform(bits: U64) -> F64:
    """64 random bits to [0, 1)."""
    unit: F64 = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit


def spread(bits: U64) -> F64:
    """64 random bits to a bell-shaped value of mean 0 and variance 1: the sum of the four 16-bit parts."""
    parts = [(bits >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
    total: F64 = np.sum([part.astype(np.float64) for part in parts], axis=0) / 65536.0
    bell: F64 = (total - 2.0) * 3.0**0.5
    return bell


def draws(seed: int, partition: int, chunk: int, count: int) -> F64:
    """`count` uniform numbers for one chunk, from Philox, whose raw output is fixed by its definition."""
    generator = np.random.Philox(key=[seed % (1 << 64), (partition << 48) + chunk])
    return uniform(generator.random_raw(count))


@dataclass(frozen=True, slots=True)
class EventContent:
    """The content of some events."""

    user_E: I64
    device_E: I64
    hour_E: I64
    item_ES: I64
    topic_ES: I64
    clicked_ES: I64
    logit_ES: F64


@dataclass(frozen=True)
class World:
    """Traits by hash. Its repr is part of a partition's identity: keep the names."""

    seed: int
    partitions: int
    users: int
    items: int
    item_life: int
    shown: int
    drift: float

    def scene(self, partition: int, index_E: I64, draw_EK: F64) -> EventContent:
        """The events with numbers `index_E`, from 2 + 2 * shown uniform draws each."""
        day_E = index_E / EVENTS_A_DAY
        hour_E = (index_E * 24 // EVENTS_A_DAY) % 24
        user_E = self._user(partition, index_E, draw_EK[:, 0])
        device_E = self._device(user_E, draw_EK[:, 1])
        item_ES = self._items(index_E, draw_EK[:, 2 : 2 + self.shown])
        topic_ES = self.topic(item_ES)
        logit_ES = self.logit(user_E, device_E, hour_E, item_ES, day_E)
        clicked_ES = draw_EK[:, 2 + self.shown :] < 1.0 / (1.0 + np.exp(-logit_ES))
        return EventContent(user_E, device_E, hour_E, item_ES, topic_ES, clicked_ES.astype(np.int64), logit_ES)

    def _user(self, partition: int, index_E: I64, draw_E: F64) -> I64:
        """Each user is in one partition; some are far more active; a new user takes the place of one that leaves."""
        here = max(1, self.users // self.partitions)
        place_E = (here * draw_E**1.5).astype(np.int64) * self.partitions + partition
        return self._tenant(place_E, index_E, 10 * self.item_life, max(self.users, self.partitions), 1)

    def _items(self, index_E: I64, draw_ES: F64) -> I64:
        """A popular place is shown far more often than others; the item that has it changes."""
        place_ES = (self.items * draw_ES**2).astype(np.int64)
        return self._tenant(place_ES, index_E[:, None], self.item_life, self.items, 2)

    def _tenant(self, place: I64, index: I64, life: int, places: int, what: int) -> I64:
        """Number of the user or item that has a place at event `index`; each place has its own length of life."""
        bits = hashed(self.seed, what, place)
        life_here = (life * (0.5 + uniform(bits))).astype(np.int64) + 1
        born = (uniform(hashed(self.seed, what + 10, place)) * life_here).astype(np.int64)
        return place + places * ((index + born) // life_here)

    def _device(self, user_E: I64, draw_E: F64) -> I64:
        """The user's own device in four of five events, else any device."""
        own_E = hashed(self.seed, 3, user_E) % np.uint64(NUM_DEVICES)
        any_E = np.minimum((draw_E * 5 - 4) * NUM_DEVICES, NUM_DEVICES - 1)
        return np.where(draw_E < 0.8, own_E.astype(np.int64), any_E.astype(np.int64))

    def topic(self, item: I64) -> I64:
        """The topic of each item."""
        return (hashed(self.seed, 4, item) % np.uint64(NUM_TOPICS)).astype(np.int64)

    def logit(self, user_E: I64, device_E: I64, hour_E: I64, item_ES: I64, day_E: F64) -> F64:
        """(E, S) the logit of a click on each item shown."""
        topic_ES, day_ES = self.topic(item_ES), np.broadcast_to(day_E[:, None], item_ES.shape)
        appeal_ES = self._swinging(20, item_ES, day_ES)
        on_device_ES = self._swinging(30, topic_ES * NUM_DEVICES + device_E[:, None], day_ES)
        at_hour_ES = spread(hashed(self.seed, 40, topic_ES * NUM_HOURS + hour_E[:, None]))
        taste_ES = np.zeros(item_ES.shape)
        for d in range(NUM_TASTES):
            liking_E = self._swinging(50 + 4 * d, user_E, day_E)
            taste_ES += liking_E[:, None] * spread(hashed(self.seed, 80 + d, topic_ES))
        topic_part_ES = TOPIC * 0.5**0.5 * (on_device_ES + at_hour_ES)
        logit_ES: F64 = BASE_LOGIT + APPEAL * appeal_ES + topic_part_ES + TASTE * NUM_TASTES**-0.5 * taste_ES
        return logit_ES

    def _swinging(self, what: int, whose: I64, day: F64) -> F64:
        """A trait of variance 1: half of it is constant, half swings, each owner at its own pace and phase."""
        still = spread(hashed(self.seed, what, whose))
        if not self.drift:
            return still
        pace = self.drift / SWING_DAYS * (0.5 + uniform(hashed(self.seed, what + 1, whose)))
        phase = uniform(hashed(self.seed, what + 2, whose))
        swung: F64 = still * 0.5**0.5 + np.sin(2.0 * np.pi * (day * pace + phase))
        return swung
