"""A job's progress and its end as lines of plain text, for terminals and logs. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.service.monitor.alarms import alarms, held_text
from headrace.service.monitor.status import Status

SHOWN_IDLE_S = 10.0
"""A line of progress names the time without events from here on."""
MAX_SLOTS = 20
"""Most slots of a table in a summary; the report has all."""

MEASURES = {"auc": "AUC", "logloss": "log loss", "rmse": "RMSE"}
"""Measures of a task; a summary shows the first that is defined."""
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


def progress_line(status: Status) -> str:
    """The progress of a job in one line."""
    parts = [
        status.text("state", "starting"),
        f"pass {count(status.number('pass'))}",
        f"events {count(status.number('events'))}",
        f"samples {count(status.number('samples'))}",
        f"{count(status.number('events_per_s'))} events/s",
        f"{count(status.number('samples_per_s'))} samples/s",
        f"lag {count(status.total('lag'))}",
        f"loss {ratio(status.number('loss'))}",
    ]
    idle_s = status.number("idle_s") or 0
    if idle_s >= SHOWN_IDLE_S and status.text("state", "") == "training":
        parts.append(f"no events for {idle_s:.0f} s")
    if (waited := status.number("pipe_wait")) is not None and waited >= SHOWN_PIPE_WAIT:
        parts.append(f"waits for the pipe {waited:.0%}")
    if (committed := status.part("commit").number("version")) is not None:
        parts.append(f"committed {count(committed)}")
    if exported := [f"{stream} {count(export.number('version'))}" for stream, export in status.exports().items()]:
        parts.append(f"exported {', '.join(exported)}")
    life = status.metrics("life")
    for task, window in status.metrics("window").items():
        parts.append(f"{task} AUC {ratio(window.get('auc'))} (life {ratio(life.get(task, {}).get('auc'))})")
    if rejected := status.total("rejected"):
        parts.append(f"rejected {count(rejected)}")
    if interface := status.text("interface"):
        parts.append(f"over {interface}: collectives are not encrypted")
    if strangers := status.total("refused"):
        parts.append(f"refused {count(strangers)} connections and calls")
    if status.raw.get("learning") is False:
        parts.append("predicts only")
    if resize := resize_text(status):
        parts.append(resize)
    if restarts := restarts_text(status):
        parts.append(restarts)
    return "  ".join(parts)


def status_changes(status: Status, before: Status | None) -> Iterator[str]:
    """Changes since the status before: alarms that began or ended, then progress."""
    now, then = alarms(status), {} if before is None else alarms(before)
    yield from (f"ALARM {text}" for alarm, text in now.items() if then.get(alarm) != text)
    yield from (f"alarm over: {text}" for alarm, text in then.items() if alarm not in now)
    line = progress_line(status)
    if before is None or line != progress_line(before):
        yield line


def export_line(stream: str, export: Status) -> str:
    """The newest export of a stream, and the one in progress, in one line."""
    parts = [f"exports {stream}: none yet"]
    if name := export.text("name"):
        parts = [f"exports {stream}: {name}", f"{age(export.number('age_s'))} ago"]
    if making := export.text("making"):
        parts.append(f"making {making}")
    return ", ".join(parts)


def restarts_text(status: Status) -> str:
    """The number of restarts and the last reason; empty where there was none."""
    if not (restarts := status.number("restarts")):
        return ""
    return f"restarts {count(restarts)} (last: {status.text('last_death', '-')})"


def resize_text(status: Status) -> str:
    """The resize that is being prepared: its numbers, and how far its workers are; empty without one."""
    resize = status.part("resizing")
    if not resize.raw:
        return ""
    numbers = f"{count(resize.number('trainers'))} trainers and {count(resize.number('shards'))} shards"
    moved = resize.number("moved")
    far = "" if moved is None else f", rows of version {count(moved)} moved"
    return f"resize to {numbers}: {resize.text('state')}{far}"


def summary_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A finished run as lines, from the chief's report."""
    status = Status(report)
    yield f"events    {count(status.number('events'))}"
    yield f"samples   {count(status.number('samples'))}"
    rejected = status.counts("rejected")
    reasons = f" ({', '.join(f'{name} {count(number)}' for name, number in rejected.items())})" if rejected else ""
    yield f"rejected  {count(sum(rejected.values()))}{reasons}"
    if left_out := status.counts("left_out"):
        yield f"left out  {', '.join(f'{count(number)} {name}' for name, number in left_out.items())}"
    if waiting := status.number("waiting"):
        yield f"waiting   {count(waiting)} impressions and clicks of the join, whose window has not ended"
    yield f"passes    {count(status.number('passes'))}"
    yield f"wall time {count_s(status.number('wall_s') or status.number('wall_time_s'))}"
    if spent := time_text(status):
        yield f"time      {spent}"
    spans = {name: status.metrics(name) for name in ("life", "window")}
    halves = report.get("halves")
    for name, half in halves.items() if isinstance(halves, Mapping) else ():
        spans[f"{name} half"] = Status({"metrics": {"half": half}}).metrics("half")
    if infer_first := status.part("metrics").part("infer_first").raw:
        spans["infer first"] = Status({"metrics": infer_first}).metrics("life")
    for task in dict.fromkeys(task for span in spans.values() for task in span):
        yield _task_line(task, {name: span[task] for name, span in spans.items() if task in span})
    for name, life in status.part("tensors").parts("life").items():
        if name.startswith(RECALL):
            window = status.part("tensors").part("window").part(name)
            yield f"{name}: life {ratio(life.number('mean'))}, window {ratio(window.number('mean'))}"
    for name, table in status.parts("tables").items():
        yield from _table_lines(name, table)
    for name, held in status.parts("held_shrinks").items():
        yield f"held      {held_text(name, held)}"
    if advice := status.text("advice"):
        yield f"advice    {advice}"
    if straggler := status.part("straggler").text("text"):
        yield f"straggler {straggler}"


def _task_line(task: str, spans: Mapping[str, Mapping[str, Any]]) -> str:
    """AUC of a task by span; the log loss of one that has no AUC, as of a softmax, or the RMSE of one without both."""
    defined = (name for name in MEASURES if any(found.get(name) is not None for found in spans.values()))
    measure = next(defined, "auc")
    figures = [f"{name} {ratio(found.get(measure))}" for name, found in spans.items()]
    return f"{MEASURES[measure]} {task}: {', '.join(figures)}"


def _table_lines(name: str, table: Status) -> Iterator[str]:
    """A table's rows and memory, then those of its slots, the largest first."""
    yield f"table     {name}: {_size_text(table.number('rows'), table.number('bytes'))}"
    rows, sizes = table.counts("rows_by_slot"), table.counts("bytes_by_slot")
    slots = sorted(rows, key=lambda slot: (-rows[slot], slot))
    width = max(map(len, slots[:MAX_SLOTS]), default=0)
    for slot in slots[:MAX_SLOTS]:
        yield f"  {slot:<{width}}  {_size_text(rows[slot], sizes.get(slot))}"
    if len(slots) > MAX_SLOTS:
        yield f"  and {len(slots) - MAX_SLOTS} more slots"


def _size_text(rows: float | None, size: float | None) -> str:
    return f"{count(rows)} rows" + ("" if size is None else f", {size / (1 << 20):,.1f} MiB")


def time_text(status: Status) -> str:
    """Shares of the time by part, the largest first; empty where they are not known."""
    seconds = status.counts("time_s")
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
