"""Tables and plots of measured runs: `python -m tests.bench.hybrid.figures [--results F]`.

Writes the tables between the marks of docs/paper.md, and plots to docs/images. Runs nothing.
"""

import argparse
import math
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.bench.hybrid.__main__ import FIGURE_8, FIGURE_10, MORE, PARTS
from tests.bench.hybrid.results import RESULTS, Results
from tests.bench.hybrid.setups import RING
from tests.bench.hybrid.tables import NAMES, PAPER_SLICES, saved, seconds_of, tables
from tests.machines.network import ROOT

PAGE, IMAGES = ROOT / "docs" / "paper.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
PAPER_SAVES = {
    "dcn": (9, 32.5),
    "wide_deep": (37, 52),
    "deep_crossing": (33, 50),
    "deep_crossing_1024": (61, math.nan),
}
"""Percent of the time of PS-Lite and of TensorFlow's parameter servers that the paper's hybrid saves with 8 workers.

nan where it does not tell: no bar is drawn."""
PAPER_BY_WORKERS = {4: 0, 6: 0, 8: 9, 16: 30}
"""The same against PS-Lite for DCN, by workers."""


def _saved_plot(results: Results) -> Figure:
    """Figures 7 and 9: the time that hybrid saves."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    models = ("dcn", "wide_deep", "deep_crossing", "deep_crossing_1024")
    series: dict[str, list[float]] = {
        "paper, PS-Lite (asynchronous)": [PAPER_SAVES[model][0] for model in models],
        "paper, TensorFlow": [PAPER_SAVES[model][1] for model in models],
    }
    for strategy in ("servers, async", "servers", RING):
        setups = [
            next((s for s in results.setups() if (s.model, s.strategy, s.trainers, s.rate) == key), None)
            for key in ((model, strategy, 8, "1gbit") for model in models)
        ]
        series[f"ours, {strategy}"] = [_or_nan(None if s is None else saved(results, s)) for s in setups]
    for number, (name, values) in enumerate(series.items()):
        axes.bar([at + 0.16 * (number - 2) for at in range(len(models))], values, 0.16, label=name)
    axes.set_xticks(range(len(models)), [NAMES[model] for model in models])
    axes.set_ylabel("time saved by hybrid, %")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.legend(fontsize="small")
    return figure


def _or_nan(value: float | None) -> float:
    """The value; nan where there is none, so that no bar is drawn."""
    return math.nan if value is None else value


def _slices_plot(results: Results) -> Figure:
    """Figure 10: time by the size of slices."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    whole = results.median(FIGURE_10[0], "both_ms")
    ours = {
        int(setup.strategy[-1]): median / whole
        for setup in (*FIGURE_10[1:], MORE[-1])
        if "fifo" not in setup.strategy and whole and (median := results.median(setup, "both_ms"))
    }
    axes.plot([10**n for n in sorted(ours)], [ours[n] for n in sorted(ours)], "o-", label="ours")
    axes.plot([10**n for n in PAPER_SLICES], [s / PAPER_SLICES[7] for s in PAPER_SLICES.values()], "s--", label="paper")
    axes.set_xscale("log")
    axes.set_xlabel("floats in a message")
    axes.set_ylabel("time of a step, of one message")
    axes.legend()
    return figure


def _workers_plot(results: Results) -> Figure:
    """Figure 8: the time that hybrid saves for DCN, by workers."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    every = [*FIGURE_8, *MORE, *PARTS["figure-7"]]
    for strategy in ("servers, async", "servers", RING):
        found = {
            setup.trainers: value
            for setup in every
            if setup.model == "dcn" and setup.strategy == strategy and (value := saved(results, setup)) is not None
        }
        axes.plot(sorted(found), [found[n] for n in sorted(found)], "o-", label=f"ours, {strategy}")
    axes.plot(list(PAPER_BY_WORKERS), list(PAPER_BY_WORKERS.values()), "s--", label="paper, PS-Lite")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("trainers")
    axes.set_ylabel("time saved by hybrid, %")
    axes.legend(fontsize="small")
    return figure


def _curves_plot(results: Results) -> Figure:
    """Loss and AUC of Deep Crossing against samples and against seconds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for setup in PARTS["figure-7"]:
        if setup.model != "deep_crossing":
            continue
        for result in results.of(setup)[:1]:
            samples = [point[0] for point in result.curve]
            seconds = [seconds_of(setup, result, each) for each in samples]
            for column, places in enumerate((samples, seconds)):
                axes[0][column].plot(places, [point[1] for point in result.curve], ".-", label=setup.strategy)
                axes[1][column].plot(places, [point[2] for point in result.curve], ".-", label=setup.strategy)
    for row, name in enumerate(("loss", "AUC")):
        axes[row][0].set_ylabel(name)
    for column, name in enumerate(("samples", "seconds")):
        axes[1][column].set_xlabel(name)
    if axes[0][0].lines:
        axes[0][0].legend(fontsize="small")
    return figure


PLOTS = {
    "hybrid-saved": _saved_plot,
    "hybrid-slices": _slices_plot,
    "hybrid-workers": _workers_plot,
    "hybrid-curves": _curves_plot,
}


def main() -> None:
    """Write tables and plots."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--results", type=Path, default=RESULTS)
    results = Results(arguments.parse_args().results)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{rest.partition(END)[2]}")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "hybrid"}  # text as text; the same file at every run
    for name, plot in PLOTS.items():
        plot(results).savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
