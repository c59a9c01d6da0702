"""Simulated streams unlike that of the example clicks: to choose defaults by, and to verify what was chosen.

`python -m tests.bench.worlds ratings --samples 60000 --seed 1 > ratings.jsonl` writes one: an event is a JSON object, a
line and a sample. `job_of` is the part of a job file that reads it: without a program, every field a slot of its own.
The same name, seed and number give the same bytes.

Ids and moments come from a generator of random numbers; every trait of an id is a hash of (seed, trait, id), so an id
keeps it. `click` is drawn by the logistic function of a sum of traits.

Shapes: N samples.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.sources.simulated import START_S
from headrace.dataset.sources.simulated_world import DAY_S, hashed, spread

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]
"""Whole numbers are ids, fractions dense values; `ts` and those of META are neither."""

META = ("click", "watch_s")
REGIMES = 6
"""Periods of *regimes*: at the begin of each, half of its fields mean something new."""
OWN_ID = 1 << 40
"""Ids that are seen once or twice are drawn below it."""


@dataclass(frozen=True)
class Draws:
    """Random numbers and traits of one world."""

    seed: int
    random: np.random.Generator

    def ids(self, size: int, num: int, skew: float = 1.0) -> I64:
        """(N,) ids below `size`; the larger the skew, the more often the small ones."""
        return (size * self.random.random(num) ** skew).astype(np.int64)

    def trait(self, name: str, *ids: I64) -> F64:
        """(N,) a trait of ids, or of tuples of them: bell-shaped, of mean 0 and variance 1."""
        key_N = np.zeros(len(ids[0]), np.uint64)
        for part, id_N in enumerate(ids):
            key_N = hashed(self.seed, crc32(name.encode()) + part, key_N ^ id_N.astype(np.uint64))
        return spread(key_N)

    def attribute(self, name: str, size: int, *ids: I64) -> I64:
        """(N,) an attribute of ids below `size`; small ones are had by more."""
        chance_N = np.clip(0.5 + self.trait(name, *ids) / 3.5, 0, 1 - 1e-9)
        return (size * chance_N**2).astype(np.int64)

    def clicks(self, logit_N: F64) -> I64:
        """(N,) 1 with the chance that the logit says."""
        return (self.random.random(len(logit_N)) < 1 / (1 + np.exp(-logit_N))).astype(np.int64)

    def runs(self, size: int, num: int, mean: float) -> tuple[I64, I64]:
        """(N,) ids that come in runs of a mean length, and the number of the run."""
        length = self.random.geometric(1 / mean, size=int(2 * num / mean) + 10)
        run_N = np.repeat(np.arange(len(length)), length)[:num]
        return self.ids(size, len(length), 1.5)[run_N], run_N


def few_ids(draws: Draws, num: int) -> Columns:
    """Eight fields of 5 to 200 ids, each seen often; pairs of them decide as much as they do alone."""
    sizes = {"shelf": 40, "hour": 24, "device": 5, "campaign": 200, "region": 50, "age": 10, "slot": 12, "theme": 30}
    ids = {name: draws.ids(size, num, 1.5) for name, size in sizes.items()}
    logit = -1.5 + sum(0.3 * draws.trait(name, id_N) for name, id_N in ids.items())
    for one, other in (("shelf", "region"), ("campaign", "device"), ("theme", "age")):
        logit += 0.5 * draws.trait(one + other, ids[one], ids[other])
    return {**ids, "price": draws.random.gamma(2.0, 1.0, num), "click": draws.clicks(logit)}


def many_ids(draws: Draws, num: int) -> Columns:
    """Ten fields: two of ids seen once, three with a long tail of rare ids, five of few ids."""
    ids = {
        "request": draws.ids(OWN_ID, num),
        "cookie": draws.ids(OWN_ID, num // 2 + 1)[draws.ids(num // 2 + 1, num)],
        "page": draws.ids(200_000, num, 4.0),
        "query": draws.ids(400_000, num, 3.0),
        "advert": draws.ids(50_000, num, 3.0),
        **{name: draws.ids(size, num, 2.0) for name, size in (("site", 3000), ("seller", 500), ("country", 60))},
        **{name: draws.ids(size, num, 1.0) for name, size in (("position", 8), ("device", 5))},
    }
    strength = {"page": 0.6, "query": 0.5, "advert": 0.7, "site": 0.5, "seller": 0.4, "position": 0.5, "device": 0.2}
    logit = -1.8 + sum(by * draws.trait(name, ids[name]) for name, by in strength.items())
    logit += 0.4 * draws.trait("site and seller", ids["site"], ids["seller"])
    return {**ids, "click": draws.clicks(logit)}


def ratings(draws: Draws, num: int) -> Columns:
    """Users rate some forty items at a time; a rating is the sum of what user, item, and taste for its genre add."""
    user, _ = draws.runs(3000, num, 40.0)
    item = draws.ids(4000, num, 2.0)
    genre = draws.attribute("genre", 18, item)
    rating = 3.5 + 0.45 * draws.trait("user", user) + 0.5 * draws.trait("item", item)
    for taste in range(4):
        rating += 0.2 * draws.trait(f"user {taste}", user) * draws.trait(f"item {taste}", item)
    rating += 0.25 * draws.trait("user and genre", user, genre) + 0.85 * draws.random.normal(size=num)
    return {"user": user, "item": item, "genre": genre, "click": (rating >= 4).astype(np.int64)}  # noqa: PLR2004


OF_USERS = {"age": 8, "gender": 3, "city": 400, "phone": 900, "system": 30, "network": 5, "carrier": 12, "signup": 40}
OF_USERS |= {"friends": 20, "follows": 30, "spends": 15, "language": 25, "interest": 60, "second_interest": 60}
OF_VIDEOS = {"author": 9000, "music": 5000, "category": 70, "tag": 1500, "second_tag": 1500, "format": 6, "filter": 80}
OF_VIDEOS |= {"place": 700, "quality": 5, "captions": 2, "kind": 9, "length": 12}
OF_MOMENTS = {"hour": 24, "weekday": 7, "tab": 4, "rank": 30, "battery": 10, "refresh": 20, "version": 45, "test": 8}


def videos(draws: Draws, num: int) -> Columns:
    """Short videos, watched one after another: 37 fields of 2 to 60,000 ids, and new videos all the time.

    `click` is a video watched for most of its length, `watch_s` how long.
    """
    user, session = draws.runs(20_000, num, 15.0)
    video = (np.arange(num) * 0.25).astype(np.int64) + draws.ids(20_000, num, 2.0)
    columns = {"user": user, "video": video, "session": session}
    columns |= {name: draws.attribute(name, size, user) for name, size in OF_USERS.items()}
    columns |= {name: draws.attribute(name, size, video) for name, size in OF_VIDEOS.items()}
    columns |= {name: draws.ids(size, num) for name, size in OF_MOMENTS.items()}
    length_s = 5.0 * 1.35 ** columns["length"]
    logit = -0.4 + 0.45 * draws.trait("user", user) + 0.5 * draws.trait("video", video) - 0.12 * columns["length"]
    strength = {"author": 0.4, "category": 0.3, "music": 0.2, "tab": 0.3, "hour": 0.15, "rank": 0.2, "network": 0.15}
    logit += sum(by * draws.trait(name, columns[name]) for name, by in strength.items())
    for one, other in (("interest", "category"), ("age", "category"), ("user", "category"), ("city", "place")):
        logit += 0.3 * draws.trait(one + other, columns[one], columns[other])
    watched = draws.clicks(logit)
    share = np.where(watched, 0.8 + 0.4 * draws.random.random(num), 0.8 * draws.random.random(num) ** 2)
    dense = {"length_s": np.log1p(length_s), "shown_before": draws.random.gamma(1.0, 2.0, num)}
    return {**columns, **dense, "click": watched, "watch_s": np.round(share * length_s, 2)}


def regimes(draws: Draws, num: int) -> Columns:
    """Ten fields; REGIMES times, from one event to the next, five of them mean something else."""
    sizes = (2000, 800, 300, 300, 100, 100, 40, 40, 10, 10)
    ids = {f"field_{place}": draws.ids(size, num, 2.0) for place, size in enumerate(sizes)}
    regime = np.arange(num) * REGIMES // num
    logit = np.full(num, -1.2)
    for place, (name, id_N) in enumerate(ids.items()):
        logit += 0.45 * (draws.trait(name, id_N, regime) if place % 2 else draws.trait(name, id_N))
    return {**ids, "click": draws.clicks(logit)}


def rare(draws: Draws, num: int) -> Columns:
    """Twelve fields; one sample in two hundred is a click."""
    sizes = {"user": 30_000, "item": 3000, "seller": 400, "site": 1000, "page": 8000, "hour": 24, "device": 5}
    sizes |= {"region": 80, "size": 10, "age": 9, "campaign": 150, "format": 6}
    ids = {name: draws.ids(size, num, 2.0) for name, size in sizes.items()}
    strength = {"user": 0.6, "item": 0.7, "seller": 0.6, "site": 0.6, "campaign": 0.6, "region": 0.3, "format": 0.3}
    logit = -6.35 + sum(by * draws.trait(name, ids[name]) for name, by in strength.items())
    return {**ids, "click": draws.clicks(logit)}


def shop(draws: Draws, num: int) -> Columns:
    """A shop: visits of some eight products each, with a budget and a mood that last for the visit."""
    visitor, visit = draws.runs(25_000, num, 8.0)
    product = draws.ids(6000, num, 2.5)
    ids = {"visitor": visitor, "product": product, "brand": draws.attribute("brand", 300, product)}
    ids |= {"shelf": draws.attribute("shelf", 45, product), "source": draws.attribute("source", 12, visit)}
    ids |= {"place": np.arange(num) % 24, "coupon": draws.ids(6, num, 3.0), "store": draws.ids(80, num, 1.5)}
    price = np.exp(1.5 + 0.8 * draws.trait("price", product))
    budget = np.exp(1.7 + 0.6 * draws.trait("budget", visit))
    logit = -1.6 + 0.5 * draws.trait("visitor", visitor) + 0.6 * draws.trait("mood", visit)
    logit += 0.5 * draws.trait("product", product) + 0.3 * draws.trait("brand", ids["brand"])
    logit += 0.5 * draws.trait("visitor and shelf", visitor, ids["shelf"]) - 0.5 * np.abs(np.log(price / budget))
    return {**ids, "price": np.log1p(price), "click": draws.clicks(logit)}


def adverts(draws: Draws, num: int) -> Columns:
    """Adverts on pages: fifteen fields; advertisers come and go, and a page and a campaign suit each other or not."""
    campaign = (np.arange(num) * 0.004).astype(np.int64) + draws.ids(400, num, 1.5)
    ids = {"campaign": campaign, "advertiser": draws.attribute("advertiser", 120, campaign)}
    ids |= {name: draws.ids(size, num, 2.0) for name, size in (("page", 4000), ("user", 60_000), ("city", 250))}
    ids |= {"section": draws.attribute("section", 25, ids["page"]), "theme": draws.attribute("theme", 40, campaign)}
    ids |= {name: draws.ids(size, num) for name, size in (("hour", 24), ("slot", 9), ("browser", 7), ("width", 15))}
    ids |= {name: draws.ids(size, num, 3.0) for name, size in (("referrer", 2000), ("language", 20), ("model", 500))}
    strength = {"campaign": 0.5, "advertiser": 0.4, "page": 0.4, "user": 0.3, "slot": 0.4, "model": 0.2, "hour": 0.2}
    logit = -2.6 + sum(by * draws.trait(name, ids[name]) for name, by in strength.items())
    for one, other in (("section", "theme"), ("page", "advertiser"), ("city", "theme")):
        logit += 0.45 * draws.trait(one + other, ids[one], ids[other])
    return {**ids, "seen": draws.random.gamma(1.0, 1.5, num), "click": draws.clicks(logit)}


def lessons(draws: Draws, num: int) -> Columns:
    """Pupils solve some thirty exercises at a time, or not: ability and difficulty say most, and skills of a pupil."""
    pupil, lesson = draws.runs(2500, num, 30.0)
    exercise = draws.ids(1500, num, 1.5)
    ids = {"pupil": pupil, "exercise": exercise, "skill": draws.attribute("skill", 60, exercise)}
    ids |= {"school": draws.attribute("school", 90, pupil), "tries": draws.ids(4, num, 3.0)}
    logit = 0.4 + 0.9 * draws.trait("pupil", pupil) + 0.9 * draws.trait("exercise", exercise)
    logit += 0.4 * draws.trait("pupil and skill", pupil, ids["skill"]) + 0.3 * draws.trait("lesson", lesson)
    logit += 0.3 * draws.trait("school", ids["school"]) - 0.3 * ids["tries"]
    return {**ids, "click": draws.clicks(logit)}


def letters(draws: Draws, num: int) -> Columns:
    """Letters to receivers who open one in twelve: ten fields, campaigns of a day, and receivers with a habit."""
    receiver = draws.ids(20_000, num, 1.5)
    campaign = (np.arange(num) * 0.002).astype(np.int64) + draws.ids(30, num)
    ids = {"receiver": receiver, "campaign": campaign, "sender": draws.attribute("sender", 70, campaign)}
    ids |= {"subject": draws.attribute("subject", 35, campaign), "client": draws.attribute("client", 9, receiver)}
    ids |= {"region": draws.attribute("region", 50, receiver), "hour": draws.ids(24, num, 0.7)}
    ids |= {"weekday": np.arange(num) // 20_000 % 7, "list": draws.ids(15, num, 2.0), "layout": draws.ids(4, num)}
    strength = {"receiver": 0.8, "campaign": 0.4, "sender": 0.4, "client": 0.3, "hour": 0.2, "list": 0.3}
    logit = -3.0 + sum(by * draws.trait(name, ids[name]) for name, by in strength.items())
    logit += 0.4 * draws.trait("receiver and sender", receiver, ids["sender"])
    logit += 0.4 * draws.trait("subject and region", ids["subject"], ids["region"])
    return {**ids, "click": draws.clicks(logit)}


def offers(draws: Draws, num: int) -> Columns:
    """Offers of private sellers that live for a while, found by a query: twelve fields, four of them of the offer."""
    offer = (np.arange(num) * 0.05).astype(np.int64) + draws.ids(2500, num, 1.5)
    visitor, _ = draws.runs(15_000, num, 12.0)
    ids = {"visitor": visitor, "offer": offer, "seller": draws.attribute("seller", 1200, offer)}
    ids |= {"kind": draws.attribute("kind", 110, offer), "state": draws.attribute("state", 5, offer)}
    ids |= {"town": draws.attribute("town", 300, visitor), "query": draws.ids(5000, num, 2.5)}
    ids |= {name: draws.ids(size, num) for name, size in (("rank", 40), ("hour", 24), ("app", 3), ("test", 6))}
    ids["photos"] = draws.attribute("photos", 12, offer)
    strength = {"offer": 0.6, "seller": 0.3, "kind": 0.4, "visitor": 0.4, "state": 0.3, "photos": 0.3, "query": 0.3}
    logit = -1.9 - 0.03 * ids["rank"] + sum(by * draws.trait(name, ids[name]) for name, by in strength.items())
    for one, other in (("query", "kind"), ("visitor", "kind"), ("town", "seller")):
        logit += 0.4 * draws.trait(one + other, ids[one], ids[other])
    return {**ids, "age_days": draws.random.gamma(1.5, 4.0, num), "click": draws.clicks(logit)}


Make = Callable[[Draws, int], Columns]
CHOOSING: Mapping[str, Make] = {"few_ids": few_ids, "many_ids": many_ids, "ratings": ratings}
"""Defaults may be chosen by these."""
HELD_OUT: Mapping[str, Make] = {
    **{"videos": videos, "regimes": regimes, "rare": rare, "shop": shop, "adverts": adverts},
    **{"lessons": lessons, "letters": letters, "offers": offers},
}
"""Nothing is chosen by these: they say whether a choice holds elsewhere."""
WORLDS = {**CHOOSING, **HELD_OUT}
PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "few_ids": (("shelf", "region"), ("campaign", "device"), ("theme", "age")),
    "many_ids": (("site", "seller"),),
    "ratings": (("user", "genre"),),
    "videos": (("interest", "category"), ("age", "category"), ("user", "category"), ("city", "place")),
    "shop": (("visitor", "shelf"),),
    "adverts": (("section", "theme"), ("page", "advertiser"), ("city", "theme")),
    "lessons": (("pupil", "skill"),),
    "letters": (("receiver", "sender"), ("subject", "region")),
    "offers": (("query", "kind"), ("visitor", "kind"), ("town", "seller")),
}
"""The pairs of fields whose ids have a trait together."""


def make(name: str, num: int, seed: int = 1) -> Columns:
    """The columns of `num` samples, their time first: a day has 20,000."""
    random = np.random.default_rng([seed, crc32(name.encode())])
    return {"ts": START_S + np.arange(num) * (DAY_S / 20_000), **WORLDS[name](Draws(seed, random), num)}


def events(columns: Columns) -> Iterator[bytes]:
    """Each sample as a line of JSON."""
    names = list(columns)
    for values in zip(*(column.tolist() for column in columns.values()), strict=True):
        fields = (round(value, 4) if isinstance(value, float) else value for value in values)
        yield json.dumps(dict(zip(names, fields, strict=True)), separators=(",", ":")).encode() + b"\n"


def job_of(name: str) -> dict[str, Any]:
    """The job of a world, but for source and store; all that learning depends on has its default."""
    columns = make(name, 1)
    meta = [column for column in columns if column in META]
    dense = [column for column, values in columns.items() if values.dtype.kind == "f" and column not in (*META, "ts")]
    sparse = [column for column in columns if column not in (*dense, *meta, "ts")]
    slots: list[dict[str, Any]] = [{"names": sparse}, {"names": meta, "kind": "meta"}]
    slots[1:1] = [{"names": dense, "kind": "dense"}] if dense else []
    return {
        "name": name.replace("_", "-"),
        "seed": 1,
        "pipe": {"kind": "columns"},
        "slots": slots,
        "tasks": [{"name": "ctr", "label": "click"}],
        "model": {"name": "deepfm"},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("world", choices=sorted(WORLDS))
    arguments.add_argument("--samples", type=int, default=60_000)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    sys.stdout.buffer.writelines(events(make(given.world, given.samples, given.seed)))


if __name__ == "__main__":
    main()
