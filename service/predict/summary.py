"""A prediction and its metrics as lines for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.service.monitor.lines import count

SHOWN = ("auc", "gauc", "logloss", "normalized_entropy", "calibration", "mse", "mae", "mean_label", "mean_prediction")


def summary_of_prediction(manifest: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> Iterator[str]:
    """The version, the rejected events by reason, and a line of metrics for each task and slice."""
    version = manifest["version"]
    what = version.get("commit") or version.get("export")
    yield f"version {version['version']} of {version['job']}, {what}"
    for reason, number in manifest["rejected"].items():
        yield f"rejected: {count(number)} {reason}"
    for task, found in (metrics or {}).get("tasks", {}).items():
        yield f"{task}: {metrics_line(found)}"
        for slot, values in found.get("slices", {}).items():
            for value, sliced in values.items():
                if sliced["count"]:
                    yield f"  {slot} {value}: {metrics_line(sliced)}"


def metrics_line(found: Mapping[str, Any]) -> str:
    """The metrics that are defined, in one line."""
    shown = [f"{name} {found[name]:.6g}" for name in SHOWN if found.get(name) is not None]
    return f"{count(found['count'])} samples  " + "  ".join(shown)
