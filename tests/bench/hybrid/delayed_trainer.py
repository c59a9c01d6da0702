"""The speed that each mode keeps with one trainer behind a slow link: `python -m tests.bench.hybrid.delayed_trainer`.

A job on four machines trains without and with the delay in turn, and a figure is the median of the ratios of two runs
of one round. A rate is over all passes but the first ones and the last one, closes included. Prints Markdown. Needs
root and iproute2.
"""

import argparse
import statistics
from dataclasses import replace

from tests.bench.hybrid.cluster import Cluster, running
from tests.bench.hybrid.setups import MODELS, ON_SERVERS
from tests.bench.mode_rates import closes_of

MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "staleness 1": ("train.staleness=1",),
    "async": (ON_SERVERS, 'train.mode="async"'),
    "geo, k_steps 10": (ON_SERVERS, 'train.mode="geo"', "train.k_steps=10"),
}
FIRST = 4
"""Passes that a rate leaves out: the first ones, in which the shares of the trainers settle.

It leaves out the last one, too: nothing is read beside it, so it is like no other."""


def rate(cluster: Cluster, settings: tuple[str, ...], batch: int, steps: int, passes: int) -> float:
    """Samples a second; a pass has `steps` steps of each trainer, were they equally fast."""
    events = steps * batch * cluster.trainers
    given = (f"passes.max_events={events}", f"train.batch_size={batch}", "train.matmul=mkl", *settings)
    with running(cluster, passes * events, given) as (job, launcher):
        closes = [close.at_s for close in closes_of(job.head.tmp / "store" / "log", launcher.process)]
        if launcher.process.returncode or len(closes) < passes:
            raise RuntimeError(job.said)
        print(
            "<!-- seconds a pass:",
            [round(b - a, 2) for a, b in zip(closes, closes[1:], strict=False)],
            "-->",
            flush=True,
        )
        return (passes - 1 - FIRST) * events / (closes[passes - 2] - closes[FIRST - 1])


def main() -> None:
    """Print a line for each mode."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    arguments.add_argument("--model", choices=MODELS, default="small")
    arguments.add_argument("--trainers", type=int, default=4)
    arguments.add_argument("--rate", default="1gbit", help="of each machine's link, both ways")
    arguments.add_argument("--delay-ms", type=float, default=50.0, help="of the link of the last trainer, both ways")
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--steps", type=int, default=320)
    arguments.add_argument("--passes", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    if given.passes < FIRST + 2:
        arguments.error(f"--passes is {given.passes}; at least {FIRST + 2}")
    quick = Cluster(trainers=given.trainers, rate=given.rate, alone=True)
    slow = replace(quick, delay_ms=given.delay_ms)
    print("| mode | samples a second | with the delay | kept |\n|---|---|---|---|")
    for mode in given.mode:
        rounds = [
            [
                rate(each, (*MODELS[given.model], *MODES[mode]), given.batch, given.steps, given.passes)
                for each in (quick, slow)
            ]
            for _ in range(given.rounds)
        ]
        kept = [after / before for before, after in rounds]
        before, after = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        spread = f"{statistics.median(kept):.0%} ({min(kept):.0%} to {max(kept):.0%})"
        print(f"| `{mode}` | {before:,.0f} | {after:,.0f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
