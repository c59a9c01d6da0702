"""The gates of an export: each compares a fact with a limit, and all must pass before current.json names it. Pure.

An export that fails stays on disk, and its manifest says why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.trainer.exports.scores import Score
from headrace.trainer.guard_config import EvaluatorGate, GatesSection


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFacts:
    """The facts that gates compare with limits."""

    window: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Metrics of the window, by task."""
    model_rows: int = 0
    """Rows of the model at this version, in all exported tables."""
    current_rows: int | None = None
    """Rows of the current export; None where there is none."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Root mean square of the exported weights, by table."""
    not_finite: int = 0
    """Exported weights that are NaN or infinite."""
    golden: tuple[bool, str] | None = None
    """Whether the export reproduces the golden predictions, and an explanation; None: there are none."""
    clicks_unmatched: float | None = None
    """The share of a join's recent clicks without an impression; None where there are few, or no join."""
    guards: Sequence[str] = ()
    """Slots outside bounds that hold exports, in words."""
    rollback: str = ""
    """Why the stream is rolled back; "" where it is not."""
    score: Score | None = None
    """The evaluator's score of this version; None: there is none yet."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One comparison."""

    passed: bool
    value: Any
    """The fact."""
    limit: Any
    why: str
    """Explanation where it did not pass."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        content = {"passed": self.passed, "value": self.value, "limit": self.limit}
        return content if self.passed else content | {"why": self.why}


def check_gates(section: GatesSection, facts: GateFacts) -> dict[str, GateResult]:
    """Every gate that is set, by name. Those for finite weights and rollbacks are always set."""
    gates = {"finite": _gate(facts.not_finite == 0, facts.not_finite, 0, "exported weights are no finite numbers")}
    if section.min_auc is not None:
        gates["min_auc"] = _of_tasks(facts.window, "auc of the window", section.min_auc, math.inf)
    if section.min_recall is not None:
        gates["min_recall"] = _of_tasks(facts.window, "index_recall of the window", section.min_recall, math.inf)
    if section.beats_popular:
        gates["beats_popular"] = _beats_popular(facts.window)
    if section.calibration is not None:
        gates["calibration"] = _of_tasks(facts.window, "calibration of the window", *section.calibration)
    if (least := section.min_rows) is not None:
        gates["min_rows"] = _gate(facts.model_rows >= least, facts.model_rows, least, "rows are fewer than")
    if section.max_row_change is not None:
        gates["max_row_change"] = _row_change(facts, section.max_row_change)
    if (most := section.max_norm) is not None:
        high = {table: norm for table, norm in facts.norms.items() if not norm <= most}  # NaN is high
        said = f"root mean square of the weights of {', '.join(high)} is above"
        gates["max_norm"] = _gate(not high, dict(facts.norms), most, said)
    if (share := section.max_clicks_unmatched) is not None and (lost := facts.clicks_unmatched) is not None:
        why = f"{lost:.2%} of recent clicks found no impression, more than"
        gates["max_clicks_unmatched"] = GateResult(lost <= share, lost, share, f"{why} {share:g} of them")
    if section.guards and facts.guards:
        gates["guards"] = GateResult(False, list(facts.guards), [], f"guards: {'; '.join(facts.guards)}")
    if facts.rollback:
        gates["rollback"] = GateResult(False, facts.rollback, "", f"rolled back: {facts.rollback}")
    if section.evaluator is not None:
        gates["evaluator"] = _evaluated(section.evaluator, facts.score)
    if section.golden and facts.golden is not None:
        ok, why = facts.golden
        gates["golden"] = GateResult(ok, why, True, f"golden: {why}")
    return gates


def _of_tasks(found: Mapping[str, Mapping[str, Any]], said: str, low: float, high: float) -> GateResult:
    """Every task that has the metric must be within the limits. Where no task has it, the gate fails.

    `said` begins with the metric's name.
    """
    measure = said.partition(" ")[0]
    values = {task: row[measure] for task, row in found.items() if row.get(measure) is not None}
    wrong = {task: value for task, value in values.items() if not low <= value <= high}
    limit = _limit(low, high)
    if not values:
        return GateResult(False, None, limit, f"{said}: no task has one yet")
    text = ", ".join(f"{value:.6g} ({task})" for task, value in wrong.items())
    if isinstance(limit, list):
        beyond = f"is not within {low:g} and {high:g}"
    else:
        beyond = f"is below {low:g}" if math.isinf(high) else f"is above {high:g}"
    return GateResult(not wrong, values, limit, f"{said} {beyond}: {text}")


def _beats_popular(window: Mapping[str, Mapping[str, Any]]) -> GateResult:
    found = [(row.get("index_recall"), row.get("popular_recall")) for row in window.values()]
    known = [(recall, popular) for recall, popular in found if recall is not None and popular is not None]
    if not known:
        return GateResult(False, None, None, "index_recall of the window: the job has none yet")
    recall, popular = known[0]
    why = f"index_recall of the window, {recall:.6g}, is below that of the most clicked items, {popular:.6g}"
    return GateResult(recall >= popular, recall, popular, why)


def _limit(low: float, high: float) -> float | list[float]:
    """As a manifest has it: both where both are finite."""
    if math.isinf(high):
        return low
    return high if math.isinf(low) else [low, high]


def _evaluated(section: EvaluatorGate, score: Score | None) -> GateResult:
    limits = section.limits()
    shown = {measure: _limit(*bounds) for measure, bounds in limits.items()}
    if score is None:
        return GateResult(False, None, shown, f"the evaluator has not scored this version within {section.wait:g} s")
    if score.error:
        return GateResult(False, None, shown, f"the evaluator cannot score this version: {score.error}")
    found = {
        measure: _of_tasks(score.tasks, f"{measure} of the evaluator", *bounds) for measure, bounds in limits.items()
    }
    why = "; ".join(each.why for each in found.values() if not each.passed)
    return GateResult(not why, {measure: each.value for measure, each in found.items()}, shown, why)


def _row_change(facts: GateFacts, limit: float) -> GateResult:
    if facts.current_rows is None:
        return GateResult(True, None, limit, "")
    change = abs(facts.model_rows - facts.current_rows) / max(facts.current_rows, 1)
    why = f"rows went from {facts.current_rows:,} to {facts.model_rows:,}: by more than {limit:g} of them"
    return GateResult(change <= limit, change, limit, why)


def _gate(passed: bool, value: Any, limit: Any, said: str) -> GateResult:
    text = f"{value:,} {said}" if isinstance(value, int) else said
    return GateResult(passed, value, limit, f"{text} {limit:,}" if limit else text)
