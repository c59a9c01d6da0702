"""Tables of measured runs, as Markdown."""

from collections.abc import Iterator, Sequence

from tests.bench.hybrid.__main__ import FIGURE_10, MORE, PARTS
from tests.bench.hybrid.cluster import BATCH, Measured
from tests.bench.hybrid.results import Results
from tests.bench.hybrid.setups import MODELS, ON_SERVERS, RING, STRATEGIES, Setup, dense_traffic_mb, rows_traffic_mb

NAMES = {
    "dcn": "DCN",
    "wide_deep": "Wide & Deep",
    "deep_crossing": "Deep Crossing 128",
    "deep_crossing_1024": "Deep Crossing 1024",
    "deep_crossing_7": "Deep Crossing, 7 units of 256",
    "small": "a small model",
}
PAPER_SLICES = {3: 100, 4: 95, 5: 94, 7: 102}
"""Seconds of figure 10 by the exponent of the slice's floats. The last one is one message: first in, first out."""
HEAD = (
    "model, trainers",
    "",
    "computing",
    "exchange",
    "both",
    "saved by hybrid",
    "MB a step",
    "dense, by formula",
    "rows, by formula",
    "AUC",
)


def tables(results: Results) -> str:
    """All tables, as Markdown."""
    planned = [
        setup
        for part, setups in PARTS.items()
        if part != "figure-10"
        for setup in setups
        if setup.model != "deep_crossing_7"
    ]
    order = list(MODELS)
    every = sorted(planned, key=lambda setup: (order.index(setup.model), setup.trainers, setup.rate != "1gbit"))
    counts = [results.num_of(setup) for setup in (*planned, *FIGURE_10, MORE[-1]) if results.num_of(setup)]
    rounds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    made = f"Medians of {rounds} runs each on {', '.join(results.machines())}. Times in ms a step."
    parts = (lines(results, every), slice_lines(results), curve_lines(results))
    return "\n\n".join([made, *("\n".join(part) for part in parts)]) + "\n"


def saved(results: Results, setup: Setup) -> float | None:
    """Percent of a setup's time that hybrid saves on the same machines, by the medians of both."""
    hybrid = Setup(setup.model, "hybrid", setup.trainers, setup.shards, setup.rate, setup.delay_ms, setup.steps)
    ours, theirs = results.median(hybrid, "both_ms"), results.median(setup, "both_ms")
    return None if ours is None or theirs is None or setup == hybrid else 100 * (1 - ours / theirs)


def by_formula(results: Results, setup: Setup) -> float | None:
    """Dense traffic of a step, as a part of what the paper's formula says."""
    hybrid = Setup(setup.model, "hybrid", setup.trainers, setup.shards, setup.rate, setup.delay_ms, setup.steps)
    whole, all_mb = results.median(hybrid, "all_mb"), results.median(setup, "all_mb")
    own = results.median(hybrid, "trainers_mb")
    narrow = any(word in each for word in ("bfloat16", "geo", "compression") for each in STRATEGIES[setup.strategy])
    if whole is None or all_mb is None or own is None or narrow or setup.strategy == RING:
        return None
    return (all_mb - (whole - own)) / dense_traffic_mb(setup.model, setup.strategy, setup.trainers)


def rows_by_formula(results: Results, setup: Setup) -> float | None:
    """Traffic of the rows in a step, as a part of what the paper's formula says; known where dense sums are apart."""
    all_mb, own_mb = results.median(setup, "all_mb"), results.median(setup, "trainers_mb")
    wide = not any("bfloat16" in each or each == ON_SERVERS for each in STRATEGIES[setup.strategy])
    if all_mb is None or own_mb is None or not wide:
        return None
    if setup.strategy == RING:
        own_mb = dense_traffic_mb(setup.model, setup.strategy, setup.trainers)
    return (all_mb - own_mb) / rows_traffic_mb(setup.strategy, setup.trainers)


def lines(results: Results, setups: Sequence[Setup]) -> Iterator[str]:
    """A table of the setups that were measured."""
    yield from ("| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD))
    for setup in setups:
        if not results.num_of(setup):
            continue
        link = "" if setup.rate == "1gbit" else f", {setup.rate.removesuffix('bit')}bit/s"
        cells = [f"{NAMES[setup.model]}, {setup.trainers}{link}", setup.strategy]
        cells += [f"{results.median(setup, name):,.0f}" for name in ("compute_ms", "wire_ms", "both_ms")]
        cells += [_text(saved(results, setup), ".0f", " %"), f"{results.median(setup, 'all_mb'):,.0f}"]
        cells += [_text(each(results, setup), ".2f") for each in (by_formula, rows_by_formula)]
        cells += [f"{results.median(setup, 'auc'):.4f}"]
        yield f"| {' | '.join(cells)} |"


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def slice_lines(results: Results) -> Iterator[str]:
    """Figure 10 as a table: a step as a part of that with one message."""
    whole = results.median(FIGURE_10[0], "both_ms")
    yield from ("| floats in a message | computing | exchange | both | of one message | the paper |", "|" + "---|" * 6)
    for setup in (*FIGURE_10, MORE[-1]):
        both = results.median(setup, "both_ms")
        if both is not None and whole:
            power = int(setup.strategy[len("servers, slices of 1e")]) if "slices" in setup.strategy else 0
            theirs = PAPER_SLICES.get(power or 7) if "fifo" not in setup.strategy else None
            cells = [f"{results.median(setup, name):,.0f}" for name in ("compute_ms", "wire_ms", "both_ms")]
            cells += [f"{both / whole:.2f}", "" if theirs is None else f"{theirs / PAPER_SLICES[7]:.2f}"]
            yield f"| {setup.strategy.removeprefix('servers').removeprefix(', ') or 'all'} | {' | '.join(cells)} |"


def curve_lines(results: Results) -> Iterator[str]:
    """Loss and AUC of the last part of the samples, and the seconds until then."""
    yield from ("| model | | samples | seconds | loss | AUC |", "|" + "---|" * 6)
    for setup in PARTS["figure-7"]:
        for result in results.of(setup)[:1]:
            samples, loss, auc = result.curve[-1]
            cells = [NAMES[setup.model], setup.strategy, f"{samples:,}", f"{seconds_of(setup, result, samples):.1f}"]
            yield f"| {' | '.join(cells)} | {loss:.4f} | {auc:.4f} |"


def seconds_of(setup: Setup, result: Measured, samples: int) -> float:
    return float(samples / (BATCH * setup.trainers) * result.both_ms / 1000)
