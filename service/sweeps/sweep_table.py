"""The results of a sweep as a table for people. Pure."""

from collections.abc import Sequence

from rich.table import Table

from headrace.service.history.paired_test import PairedResult
from headrace.service.sweeps.sweep_runs import SweepResult

EXPLAINED = (
    "AUC, GAUC and logloss: of all samples of the run, predicted before they were learnt. Differences: means over the "
    "passes that the setting and the first one closed, with the p-value of a paired test (as `headrace compare`); of "
    "twenty settings without any effect, one has p below 0.05. A test needs six passes at least. samples/s: the first "
    "run also ran source and pipe."
)
SECOND = " AUC 2nd: of the last half of the samples alone."


def table_of(results: Sequence[SweepResult], *, second_half: bool = False) -> Table:
    """A row for each setting and task; `second_half`: with the AUC of the last half of the samples, too."""
    several = len(results[0].metrics) > 1
    table = Table(caption=EXPLAINED + (SECOND if second_half else ""), caption_justify="left")
    table.add_column("setting")
    if several:
        table.add_column("task")
    second = ["AUC 2nd"] if second_half else []
    for name in ("AUC", "GAUC", "logloss", *second, "samples/s", "rows", "AUC vs first", "p", "GAUC vs first", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        for task, found in each.metrics.items():
            figures = [_number(found.get(name)) for name in ("auc", "gauc", "logloss")]
            figures += [_number(each.last_half.get(task, {}).get("auc"))] * second_half
            against = [cell for metric in ("auc", "gauc") for cell in _difference(_paired(each, task, metric))]
            first = [each.setting.name, *([task] if several else [])]
            table.add_row(*first, *figures, f"{each.samples_per_s:,.0f}", f"{each.rows:,}", *against)
    return table


def _paired(result: SweepResult, task: str, metric: str) -> PairedResult | None:
    found = () if result.against_first is None else result.against_first.results
    return next((each for each in found if (each.task, each.metric) == (task, metric)), None)


def _difference(found: PairedResult | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.difference:+.4f}", f"{found.p:.4f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
