"""The results of fault runs: a table of deaths, a line that sums them up, and JSON. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from headrace.service.faults.deaths import CHIEF, AtFailpoint, AtInstant
from headrace.service.faults.injection import DeathRecord
from headrace.service.faults.operator import carried_out
from headrace.service.faults.rounds import Round

HOW_MEASURED = (
    "in: from the death to the first new close in the log (of the exporter: to the first complete export); "
    "median and longest, without the deaths that another death followed sooner"
)


def place_of(died: DeathRecord) -> tuple[str, str]:
    """The place of a death, and the worker."""
    match died.death:
        case _ if died.elsewhere is not None:
            return died.elsewhere, CHIEF
        case AtFailpoint(worker, point):
            return ("", "") if died.point is None else (point, worker)
        case AtInstant(worker, stopped=stopped, exports=exports):
            when = "at random, exporting" if exports else "at random"
            return "stopped and back" if stopped else when, worker


def table_of(rounds: Sequence[Round], compared: str) -> Table:
    """A row for each place and worker."""
    rows: dict[tuple[str, str], list[tuple[DeathRecord, Round]]] = defaultdict(list)
    for each in rounds:
        for died in each.died:
            rows[place_of(died)].append((died, each))
    table = Table(caption=f"{HOW_MEASURED}\nidentical: {compared}", caption_justify="left")
    for name in ("point", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("kills", "recovered", "in", "at most", "identical"):
        table.add_column(name, justify="right")
    for (point, worker), found in sorted(rows.items()):
        times = [died.recovered_s for died, _ in found if died.recovered_s is not None]
        took = (f"{median(times):.1f} s", f"{max(times):.1f} s") if times else ("-", "-")
        counts = [len(found), sum(each.ended for _, each in found)]
        table.add_row(point, worker, *map(str, counts), *took, str(sum(each.identical for _, each in found)))
    for place in sorted({(death.point, death.worker) for each in rounds for death in each.missed} - rows.keys()):
        table.add_row(*place, "never", "", "", "", "")
    return table


def total_line(rounds: Sequence[Round]) -> str:
    """The sum of all rounds in one line."""
    kills = sum(len(each.died) for each in rounds)
    recovered = sum(len(each.died) for each in rounds if each.ended)
    identical = sum(len(each.died) for each in rounds if each.identical)
    line = f"{kills} kills, {recovered} recovered, {identical} identical"
    exports = sum(each.num_exports for each in rounds)
    requests = sum(carried_out(each.requests) for each in rounds)
    more = [f"{exports} exports"] * bool(exports) + [f"{requests} requests acted"] * bool(requests)
    return "; ".join([line, *more])


def message_of(found: Round) -> dict[str, Any]:
    """A round as JSON: its deaths by place and worker, and what differs."""
    deaths = [(*place_of(died), died.recovered_s) for died in found.died]
    return {
        "store": str(found.store),
        "identical": found.identical,
        "ended": found.ended,
        "deaths": [{"point": point, "role": worker, "recovered_s": took} for point, worker, took in deaths],
        "not_reached": [{"point": missed.point, "role": missed.worker} for missed in found.missed],
        "wrong": found.wrong,
        "ended_otherwise": {str(number): reason for number, reason in found.unasked.items()},
        "exports": found.num_exports,
        "requests": carried_out(found.requests),
    }
