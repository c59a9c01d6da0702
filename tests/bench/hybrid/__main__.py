"""The figures of the PS-Hybrid paper, measured again: `python -m tests.bench.hybrid --minutes 20 [--results F]`.

Its models at dim 128 on criteo, in test machines with links of 1 Gb/s. Runs the plan below, the most telling setups
first, and all of them once before any a second time. A result is in the file as soon as it is there: the same command
goes on where an earlier one ended. `python -m tests.bench.hybrid.figures` makes tables and plots of the file.

All processes share the cores of one machine: a step computes for long. Where that hides the wire, a lower rate restores
the paper's share. Needs root and iproute2. Avazu, the paper's second set of data, is not to be had.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tests.bench.hybrid import cluster, ring
from tests.bench.hybrid.cluster import Measured
from tests.bench.hybrid.results import RESULTS, Results
from tests.bench.hybrid.setups import MODELS, RING, STRATEGIES, Setup

AGAINST = ("hybrid", "servers, async", "servers", RING)
FIGURE_10 = [
    Setup("deep_crossing_7", strategy, trainers=2, shards=1, steps=12)
    for strategy in ("servers", *(f"servers, slices of 1e{n}" for n in (5, 4, 6, 3)), "servers, slices of 1e5, fifo")
]
FIGURE_7 = [
    *(Setup("deep_crossing", strategy) for strategy in AGAINST),
    *(Setup(model, strategy) for model in ("wide_deep", "dcn") for strategy in AGAINST[:3]),
    *(Setup(model, "hybrid, 8 times the rate") for model in ("deep_crossing", "wide_deep")),
]
FIGURE_9 = [Setup("deep_crossing_1024", strategy, steps=8) for strategy in AGAINST[:2]]
BETTER = [
    Setup("deep_crossing", strategy)
    for strategy in (
        "hybrid, staleness 1",
        "hybrid, early rows",
        "servers, slices of 1e5",
        "servers, async, slices of 1e5",
        "hybrid, staleness 1, bfloat16",
        "hybrid, early rows, bfloat16",
        "hybrid, sums in bf16",
        "hybrid, sums in bf16, staleness 1, bfloat16",
        "hybrid, dgc",
    )
]
FIGURE_8 = [Setup("dcn", strategy, trainers) for trainers in (4, 2, 16) for strategy in AGAINST[:2]]
SLOWER = [Setup("deep_crossing", strategy, rate=rate) for rate in ("300mbit", "100mbit") for strategy in AGAINST[:2]]
MORE = [
    *(Setup(model, RING) for model in ("wide_deep", "dcn")),
    *(Setup("deep_crossing_1024", strategy, steps=8) for strategy in AGAINST[2:]),
    *(Setup("dcn", strategy, trainers) for trainers in (4, 2, 16) for strategy in AGAINST[2:]),
    Setup("deep_crossing_7", "servers, slices of 1e7", trainers=2, shards=1, steps=12),
]
PARTS: dict[str, Sequence[Setup]] = {
    "figure-10": FIGURE_10,
    "figure-7": FIGURE_7,
    "figure-9": FIGURE_9,
    "better": BETTER,
    "figure-8": FIGURE_8,
    "slower": SLOWER,
    "more": MORE,
}
"""In the order of their value."""


def measured(setup: Setup) -> Measured:
    """One run."""
    run = ring.measured if setup.strategy == RING else cluster.measured
    return run(setup.cluster, setup.steps, setup.settings)


def run_all(setups: Sequence[Setup], results: Results, rounds: int, minutes: float) -> None:
    """Run until all have so many results, or until the time is over: then the run that goes on is the last one."""
    until_s = time.monotonic() + 60 * minutes
    for number, setup in product(range(rounds), setups):
        if results.num_of(setup) > number:
            continue
        if time.monotonic() > until_s:
            print("The time is over; the same command goes on.")
            return
        begin_s = time.monotonic()
        try:
            results.add(setup, result := measured(setup))
        except Exception as error:  # noqa: BLE001  # the other setups are measured all the same
            result = f"failed: {str(error)[-2000:]}"
        name = f"{setup.model}, {setup.strategy}, {setup.trainers} trainers, {setup.rate}"
        print(f"{name}: {result} (a run of {time.monotonic() - begin_s:.0f} s)", flush=True)


def main() -> None:
    """Run the plan, or the setups that are asked for."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--minutes", type=float, default=20)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS))
    arguments.add_argument("--model", choices=MODELS, nargs="*", help="instead of the plan")
    arguments.add_argument("--strategy", choices=STRATEGIES, nargs="*", default=list(STRATEGIES))
    arguments.add_argument("--trainers", type=int, nargs="*", default=[8])
    arguments.add_argument("--shards", type=int, default=2)
    arguments.add_argument("--rate", default="1gbit", help="of each machine's link, both ways, such as 100mbit")
    arguments.add_argument("--delay-ms", type=float, default=0.0, help="of the link of the second half of the trainers")
    arguments.add_argument("--steps", type=int, default=15)
    given = arguments.parse_args()
    setups = [setup for part in given.part for setup in PARTS[part]]
    if given.model:
        rest = (given.shards, given.rate, given.delay_ms, given.steps)
        asked = product(given.model, given.trainers, given.strategy)
        setups = [Setup(model, strategy, trainers, *rest) for model, trainers, strategy in asked]
    run_all(setups, Results(given.results), given.rounds, given.minutes)


if __name__ == "__main__":
    main()
