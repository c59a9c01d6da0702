"""A job's progress and its end as lines of plain text, for terminals and logs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.printable import counted
from headrace.service.monitor.alarms import alarms, held_text
from headrace.trainer.exposed_figures import numbers
from headrace.trainer.job_status import ElasticStatus, EvaluatorStatus, ExportStatus, Status, read
from headrace.trainer.run_report import ReportedTable, RunReport
from headrace.trainer.tuning_status import ChosenCrossesStatus, ChosenPairStatus, TriedStatus, TuningStatus

SHOWN_IDLE_S = 10.0
"""A line of progress names the time without events from here on."""
MAX_SLOTS = 20
"""Most slots of a table in a summary; the report has all."""

MEASURES = {"auc": "AUC", "logloss": "log loss", "rmse": "RMSE"}
"""Measures of a task; a summary shows the first that is defined."""
FOUND = ("index_recall", "popular_recall")
RECALL = "recall_at_"
"""Tensors that a summary shows, too."""
SHOWN_PIPE_WAIT = 0.1
"""A line of progress names the share of time that training waits for samples from here on."""


def count(value: float | None) -> str:
    """A count with separators of thousands, or a dash."""
    return "-" if value is None else f"{value:,.0f}"


def pending_text(table: Mapping[str, Any]) -> str:
    """The rows of a table that an export kept back, and by which thresholds, from its manifest."""
    by = ", ".join(f"{count(rows)} by {name}" for name, rows in table.get("pending_by", {}).items())
    return f"{count(table['pending'])} pending{by and f' ({by})'}"


def ratio(value: float | None) -> str:
    """A metric to four places, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def total(counts: Mapping[str, float]) -> float | None:
    """The sum of counts; None where there are none."""
    return sum(counts.values()) if counts else None


def progress_line(status: Status) -> str:
    """The progress of a job in one line."""
    if words := tuning_text(status.tuning):
        return words
    parts = [
        status.state,
        f"pass {count(status.pass_number)}",
        f"events {count(status.events)}",
        f"samples {count(status.samples)}",
        f"{count(status.events_per_s)} events/s",
        f"{count(status.samples_per_s)} samples/s",
        f"lag {count(total(status.lag))}",
        f"loss {ratio(status.loss)}",
    ]
    idle_s = status.idle_s or 0
    if idle_s >= SHOWN_IDLE_S and status.state == "training":
        parts.append(f"no events for {idle_s:.0f} s")
    if status.pipe_wait is not None and status.pipe_wait >= SHOWN_PIPE_WAIT:
        parts.append(f"waits for the pipe {status.pipe_wait:.0%}")
    if status.commit is not None and status.commit.version is not None:
        parts.append(f"committed {count(status.commit.version)}")
    if exported := [f"{stream} {count(export.version)}" for stream, export in status.exports.items()]:
        parts.append(f"exported {', '.join(exported)}")
    life = status.measures("life")
    for task, window in status.measures("window").items():
        parts.append(f"{task} AUC {ratio(window.get('auc'))} (life {ratio(life.get(task, {}).get('auc'))})")
        if window.get("index_recall") is not None:
            parts.append(f"recall {ratio(window['index_recall'])} (popular {ratio(window.get('popular_recall'))})")
    if status.evaluator is not None and status.evaluator.version is not None:
        parts.append(f"evaluated {count(status.evaluator.version)}")
    if rejected := total(status.rejected):
        parts.append(f"rejected {count(rejected)}")
    if status.interface:
        parts.append(f"over {status.interface}: collectives are not encrypted")
    if strangers := total(status.refused):
        parts.append(f"refused {count(strangers)} connections and calls")
    if not status.learning:
        parts.append("predicts only")
    if resize := resize_text(status):
        parts.append(resize)
    if status.elastic is not None:
        parts.append(elastic_text(status.elastic))
    if restarts := restarts_text(status):
        parts.append(restarts)
    return "  ".join(parts)


def left_text(status: Status) -> str:
    """How much of a stream that ends is done, and about how long the rest takes; empty where that is not known."""
    left, rate = total(status.lag), status.events_per_s
    if status.state != "training" or left is None or not status.events:
        return ""
    whole = status.events + left
    time = f", about {age(left / rate)} left" if rate and left else ""
    return f"{status.events / whole:.0%} of {count(whole)} events{time}"


def status_changes(status: Status, before: Status | None, *, ends: bool = False) -> Iterator[str]:
    """Changes since the status before: alarms that began or ended, then progress. `ends`: the stream does."""
    now, then = alarms(status), {} if before is None else alarms(before)
    yield from (f"ALARM {text}" for alarm, text in now.items() if then.get(alarm) != text)
    yield from (f"alarm over: {text}" for alarm, text in then.items() if alarm not in now)
    line = progress_line(status)
    if before is None or line != progress_line(before):
        left = left_text(status) if ends else ""
        yield f"{line}  {left}" if left else line


def export_line(stream: str, export: ExportStatus) -> str:
    """The newest export of a stream, and the one in progress, in one line."""
    parts = [f"exports {stream}: none yet"]
    if export.name:
        parts = [f"exports {stream}: {export.name}", f"{age(export.age_s)} ago"]
    if export.making:
        parts.append(f"making {export.making}")
    return ", ".join(parts)


def evaluator_line(found: EvaluatorStatus) -> str:
    """The newest score of the evaluator, in one line."""
    if found.version is None:
        return "evaluator: no version is scored yet"
    if found.error:
        return f"evaluator: version {count(found.version)} cannot be scored: {found.error}"
    tasks = (_task_line(task, {f"version {found.version}": numbers(row)}) for task, row in found.tasks.items())
    return f"evaluator: {'; '.join(tasks)} ({count(found.samples)} samples, {count(found.scored)} versions scored)"


def restarts_text(status: Status) -> str:
    """The number of restarts and the last reason; empty where there was none."""
    if not status.restarts:
        return ""
    return f"restarts {count(status.restarts)} (last: {'-' if status.last_death is None else status.last_death})"


def elastic_text(elastic: ElasticStatus) -> str:
    """The number of trainers of an elastic job, and its bounds."""
    spares = f", {count(elastic.spares)} more stand by" if elastic.spares else ""
    return f"{counted(elastic.present, 'trainer')} (of {count(elastic.min)} to {count(elastic.max)}{spares})"


def resize_text(status: Status) -> str:
    """The resize that is being prepared: its numbers, and how far its workers are; empty without one."""
    if (resize := status.resizing) is None:
        return ""
    workers = f"{counted(resize.trainers, 'trainer')} and {counted(resize.shards, 'shard')}"
    far = "" if resize.moved is None else f", rows of version {count(resize.moved)} moved"
    return f"resize to {workers}: {resize.state}{far}"


def tuning_text(tuning: TuningStatus | None) -> str:
    """How far the tuning of a new job is; empty where none goes on."""
    if tuning is None or not tuning.name:
        return ""
    return f"tuning: {tuning.step}"


def tried_lines(tried: Sequence[TriedStatus]) -> Iterator[str]:
    """The settings that were tried, as a table: each with its loss, the chosen one first."""
    width = max((len(each.name) for each in tried), default=0)
    for each in tried:
        measures = f"log loss {ratio(each.logloss)}  AUC {ratio(each.auc)}"
        yield f"  {each.name:<{width}}  {measures}  {count(each.events)} events"


def crosses_text(crosses: ChosenCrossesStatus) -> str:
    """The crosses that a job chose, in one line."""
    by = crosses.first_order_rate
    rate = f"; first-order weights learn at {by:g} times their rate" if by != 1 else ""
    if not crosses.pairs:
        return f"none pays by {count(crosses.samples)} samples{rate}"
    pairs = ", ".join(map(_pair_text, crosses.pairs))
    auc = f"AUC of a linear model {ratio(crosses.auc)}, {ratio(crosses.auc_with)} with them"
    return f"{pairs} are chosen by {count(crosses.samples)} samples ({auc}){rate}"


def pair_lines(crosses: ChosenCrossesStatus) -> Iterator[str]:
    """The pairs as a table: each with the fall of the log loss by it."""
    names = [_pair_text(each) for each in crosses.pairs]
    width = max(map(len, names), default=0)
    for name, pair in zip(names, crosses.pairs, strict=True):
        yield f"  {name:<{width}}  log loss -{pair.gain:.4f}"


def _pair_text(pair: ChosenPairStatus) -> str:
    return " x ".join(pair.of)


def choice_lines(tuning: TuningStatus | None) -> Iterator[str]:
    """The choices of a new job: its settings, beside those that it tried, and its crosses."""
    if tuning is not None and tuning.tried:
        yield f"tuned     {tuning.tried[0].name}; settings that were tried, the chosen one first:"
        yield from tried_lines(tuning.tried)
    if tuning is not None and tuning.crosses is not None:
        yield f"crosses   {crosses_text(tuning.crosses)}"
        yield from pair_lines(tuning.crosses)


def summary_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """A finished run as lines, from the content of its report.json."""
    report = read(RunReport, found)
    yield f"events    {count(report.events)}"
    yield f"samples   {count(report.samples)}"
    reasons = ", ".join(f"{name} {count(number)}" for name, number in report.rejected.items())
    yield f"rejected  {count(sum(report.rejected.values()))}{reasons and f' ({reasons})'}"
    if report.left_out:
        yield f"left out  {', '.join(f'{count(number)} {name}' for name, number in report.left_out.items())}"
    if report.waiting:
        yield f"waiting   {count(report.waiting)} impressions and clicks of the join, whose window has not ended"
    yield f"passes    {count(report.passes)}"
    yield f"wall time {count_s(report.wall_s)}"
    if spent := time_text(report.time_s):
        yield f"time      {spent}"
    spans = {"life": report.metrics.life, "window": report.metrics.window}
    spans |= {f"{name} half": half for name, half in (report.halves or {}).items()}
    if report.metrics.infer_first:
        spans["infer first"] = report.metrics.infer_first.life
    for task in dict.fromkeys(task for span in spans.values() for task in span):
        yield _task_line(task, {name: numbers(span[task]) for name, span in spans.items() if task in span})
        for measure in report.metrics.life.get(task, {}):
            if "@" in measure and measure.startswith(FOUND):
                of_spans = (
                    numbers(span.get(task)).get(measure) for span in (report.metrics.life, report.metrics.window)
                )
                yield "{}: life {}, window {}".format(measure, *map(ratio, of_spans))
    life, window = (report.tensors.get(span, {}) for span in ("life", "window"))
    for name in life:
        if name.startswith(RECALL):
            means = (numbers(tensors.get(name)).get("mean") for tensors in (life, window))
            yield "{}: life {}, window {}".format(name, *map(ratio, means))
    for name, table in report.tables.items():
        yield from _table_lines(name, table)
    for name, held in report.held_shrinks.items():
        yield f"held      {held_text(name, held)}"
    if report.evaluator is not None:
        yield evaluator_line(report.evaluator)
    yield from choice_lines(report.tuning)
    if report.advice:
        yield f"advice    {report.advice}"
    if report.straggler is not None:
        yield f"straggler {report.straggler.text}"


def _task_line(task: str, spans: Mapping[str, Mapping[str, Any]]) -> str:
    """AUC of a task by span; the log loss of one that has no AUC, as of a softmax, or the RMSE of one without both."""
    defined = (name for name in MEASURES if any(found.get(name) is not None for found in spans.values()))
    measure = next(defined, "auc")
    figures = [f"{name} {ratio(found.get(measure))}" for name, found in spans.items()]
    return f"{MEASURES[measure]} {task}: {', '.join(figures)}"


def _table_lines(name: str, table: ReportedTable) -> Iterator[str]:
    """A table's rows and memory, then those of its slots, the largest first."""
    yield f"table     {name}: {_size_text(table.rows, table.bytes)}"
    rows, sizes = table.rows_by_slot, table.bytes_by_slot
    slots = sorted(rows, key=lambda slot: (-rows[slot], slot))
    width = max(map(len, slots[:MAX_SLOTS]), default=0)
    for slot in slots[:MAX_SLOTS]:
        yield f"  {slot:<{width}}  {_size_text(rows[slot], sizes.get(slot))}"
    if len(slots) > MAX_SLOTS:
        yield f"  and {len(slots) - MAX_SLOTS} more slots"


def _size_text(rows: float | None, size: float | None) -> str:
    return f"{count(rows)} rows" + ("" if size is None else f", {size / (1 << 20):,.1f} MiB")


def time_text(seconds: Mapping[str, float]) -> str:
    """Shares of the time by part, the largest first; empty where they are not known."""
    total_s = sum(seconds.values())
    parts = sorted(seconds, key=lambda part: (-seconds[part], part)) if total_s else []
    return ", ".join(f"{part} {seconds[part] / total_s:.0%}" for part in parts if seconds[part] >= 0.005 * total_s)


def age(seconds: float | None) -> str:
    """An age in a unit that suits people."""
    if seconds is None:
        return "-"
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:,.0f} {unit}"
    return f"{seconds:.1f} s"


def count_s(seconds: float | None) -> str:
    """Seconds with their unit, or a dash."""
    return "-" if seconds is None else f"{seconds:.1f} s"


def labelled(worker: str, text: str) -> str:
    """A line of output with its worker's name, unless its beginning has it."""
    return text if f"{worker}:" in text[:48] else f"{worker}| {text}"
