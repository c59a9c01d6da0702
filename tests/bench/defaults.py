"""How well jobs learn with all defaults, and what single settings would change, beside a linear learner.

`python -m tests.bench.defaults` fills the tables of trainer/README.md: AUC of the second half of each stream, every
sample predicted before it is learnt, of the model deepfm with sets of defaults, and of logistic regression that takes a
sample at a time with one setting for all streams, and by hindsight. `--changes` also measures all defaults but one, on
the streams that defaults may be chosen by. Figures that are there are not made again, but with `--again`; `--only news`
takes streams, `--print` writes no page. No figure depends on how fast it goes.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headrace.config import validate
from headrace.dataset.samples.batch import Ragged
from headrace.dataset.spec.schema import Schema
from headrace.trainer.config import TrainerJob
from headrace.trainer.spec.defaults import rows_learn
from tests.bench.linear import Linear
from tests.bench.model_figures import Changes, write_between
from tests.bench.streams import CHOOSING, STREAMS
from tests.bench.w1 import ROOT
from tests.bench.worlds import PAIRS, WORLDS
from tests.bench.zoo import Zoo, measured

PAGE = ROOT / "trainer" / "README.md"
RESULTS = ROOT / "tests" / "bench" / "results" / "defaults.json"
BEGIN, END = "<!-- defaults: begin -->\n", "<!-- defaults: end -->\n"
SETS: Mapping[str, Changes] = {
    "set 4": {"defaults": 4},
    "set 5, no crosses": {"defaults": 5},
    "set 5": {"defaults": 5, "crosses": {"events": 20_000}},
    "set 6": {"defaults": 6},
}
"""Sets 2 and 3 learn deepfm as set 4 does. `crosses` has the newest defaults in every set, but beside a key of it."""
CHANGED, *CHOOSING_CROSSES = list(SETS)[-3:]
"""The set that changes are compared with; and those that choose crosses, as a new job does."""
NEWEST = CHOOSING_CROSSES[-1]
LINEAR = {"linear": Linear(), "linear, all crosses": Linear(crosses=True)}
HINDSIGHT = "linear, by hindsight"
"""With the pairs of which a world is made, at the best of these multiples of its rate."""
RATES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


def changes_of(num_slots: int) -> dict[str, Changes]:
    """What is changed in a job with all defaults, by name."""

    def rows(**scales: float) -> Changes:
        learn = rows_learn(num_slots)
        for part, by in scales.items():
            learn[part]["lr"] *= by
        return {"tables": {"default": learn}}

    vector, first_order = "optimizer", "first_order_optimizer"
    return {
        **{f"rate of vectors x {by:g}": rows(**{vector: by}) for by in (0.5, 2.0)},
        **{f"rate of first-order weights x {by:g}": rows(**{first_order: by}) for by in (0.5, 2.0)},
        **{f"`init_range` {by:g}": {"tables": {"default": {"init_range": by}}} for by in (0.001, 0.05, 0.1)},
        **{f"`batch_size` {size}": {"train": {"batch_size": size}} for size in (64, 1024)},
        **{f"rate of Adam {by:g}": {"dense": {"optimizer": {"kind": "adam", "lr": by}}} for by in (0.001, 0.01)},
        **{f"`dim` {dim}": {"tables": {"default": {"dim": dim}}} for dim in (8, 32)},
    }


CHANGES = tuple(changes_of(1))
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by stream and name."""


def lines_of(stream: str, zoo: Zoo, changed: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each figure of a stream, and what measures it."""
    job = validate(TrainerJob, zoo.streams.spec(stream))
    changes = changes_of(len(Schema.of(job.slots).sparse)) if changed and stream in CHOOSING else {}
    for name, change in {**SETS, **changes}.items():
        yield name, partial(zoo.model, stream, change, crosses=name in CHOOSING_CROSSES)
    for name, learner in LINEAR.items():
        yield name, partial(zoo.learner, stream, learner)
    if stream in WORLDS:
        yield HINDSIGHT, partial(by_hindsight, stream, zoo)


def by_hindsight(stream: str, zoo: Zoo) -> dict[str, Any]:
    """Figures of the best linear model that knows which pairs of fields say more together."""
    samples = zoo.streams.samples(stream)
    sparse = dict(samples.sparse)
    for one, other in PAIRS.get(stream, ()):
        parts = [sparse[name].values_N for name in (one, other)]
        pair_B = np.unique(np.stack(parts), axis=1, return_inverse=True)[1].ravel()
        sparse[f"{one} {other}"] = Ragged(pair_B.astype(np.uint64), sparse[one].offset_B1)
    known = replace(samples, sparse=sparse)
    found = (zoo.learner(stream, Linear(rate=by * Linear.rate), known) for by in RATES)
    return max(found, key=lambda each: float(each["auc"]))


def tables_of(results: Results) -> str:
    """Both tables as Markdown, of the figures that are there."""

    def auc(stream: str, name: str) -> float:
        return float(results[stream].get(name, {}).get("auc", "nan"))

    streams = [stream for stream in STREAMS if NEWEST in results.get(stream, {})]
    names = [*SETS, *LINEAR, HINDSIGHT]
    lines = ["", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for stream in streams:
        cells = [f"{auc(stream, name):.4f}".replace("nan", "-") for name in names]
        lines.append(f"| {stream}{'' if stream in CHOOSING else ', held out'} | {' | '.join(cells)} |")
    streams = [stream for stream in streams if set(CHANGES) & results[stream].keys()]
    if streams:
        lines += ["", f"| change of {CHANGED} | {' | '.join(streams)} |", "|---" * (len(streams) + 1) + "|"]
    for name in (name for name in CHANGES if any(name in results[stream] for stream in streams)):
        gains = [auc(stream, name) - auc(stream, CHANGED) for stream in streams]
        lines.append(f"| {name} | {' | '.join(f'{gain:+.4f}' for gain in gains)} |".replace("+nan", "-"))
    return "\n".join([*lines, "", ""])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="*", choices=STREAMS, default=STREAMS)
    arguments.add_argument("--changes", action="store_true", help="also all defaults but one")
    arguments.add_argument("--again", action="store_true", help="also what has figures")
    arguments.add_argument("--print", dest="prints", action="store_true", help="do not write the page")
    given = arguments.parse_args()
    lines = partial(lines_of, changed=given.changes)
    results = measured(RESULTS, given.only, lines, lambda name, it: f"{name} {it['auc']:.4f}", again=given.again)
    if not given.prints:
        write_between(PAGE, BEGIN, END, lambda _: tables_of(results))
    print(tables_of(results))


if __name__ == "__main__":
    main()
