"""Measured features of a job as text: tables of what they gain and cost, and lines below them. Pure.

service.planning.job_features measures them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.service.planning.toml_text import slot_lines


@dataclass(frozen=True, slots=True)
class SuggestionTable:
    """A table of features, slots or rules of admission."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """As text: the first column to the left, the others to the right."""
        cells = [self.titles, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *others in cells:
            parts = [
                first.ljust(widths[0]),
                *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True)),
            ]
            yield "  ".join(parts).rstrip()


def tables_of(message: Mapping[str, Any]) -> list[SuggestionTable]:
    """The tables of a `Suggestions.message`: features that pay, slots, rules of admission."""

    def worth(each: Mapping[str, Any]) -> tuple[str, str]:
        return f"{each['auc']:+.4f}", f"{each['p']:.4f}"

    added = [(each["slot"]["name"], *worth(each), f"{each['rows']:,}") for each in message["features"]]
    total = max(1, sum(each["rows"] for each in message["slots"].values()))
    slots = [
        (name, *worth(each), f"{each['saved']:,}", f"{each['saved'] / total:.1%}", "drop" if each["drop"] else "")
        for name, each in sorted(message["slots"].items(), key=lambda item: (item[1]["auc"], item[0]))
    ]
    admission = [
        (
            *(f"{times} times", *worth(each), f"{each['rows']:,}", f"{each['saved']:,}"),
            f"{each['saved'] / max(1, message['rows']):.1%}",
        )
        for times, each in message["admission"].items()
    ]
    return [
        SuggestionTable(("features that pay, each on top of those before", "AUC", "p", "costs rows"), added),
        SuggestionTable(("slot", "AUC without it", "p", "saves rows", "of all", ""), slots),
        SuggestionTable(("admit an id after", "AUC", "p", "rows left", "saves rows", "of all"), admission),
    ]


def lines_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The lines below the tables of a `Suggestions.message`."""
    which = f"{'newest' if message['newest'] else 'first'} {message['events']:,} events"
    yield f"{message['samples']:,} samples of the {which}, {message['rejected']:,} rejected. AUC: that of a linear"
    yield f"model in the second half, predicted before it was learnt; {message['auc']:.4f} with the slots as they are."
    yield "p: of the difference in log loss. A deep model may gain less from crosses: headrace sweep tells. Rows: of"
    yield "these events; headrace size tells those of a longer stream."
    added, rows = sum(each["rows"] for each in message["features"]), message["rows"]
    dropped = {name: each["saved"] for name, each in message["slots"].items() if each["drop"]}
    if added:
        yield f"The features that pay cost {added:,} rows beside the {rows - added:,} of the slots."
    if dropped:
        share = sum(dropped.values()) / max(1, rows - added)
        yield f"Without {', '.join(dropped)}: {sum(dropped.values()):,} rows fewer, {share:.1%} of those of the slots."
    for each in message["features"]:
        yield from ("", *slot_lines(each["slot"]))
