"""The examples that come with Headrace, and copies of them in a user's folder."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.durable import writing
from headrace.errors import SpecError

DEPLOY = Path(headrace.__file__).with_name("deploy")
EXAMPLES = DEPLOY / "examples"
MONITORING = "monitoring"
"""The name of what Prometheus and Grafana read: alerts and dashboards."""
_LEFT_OUT = shutil.ignore_patterns("data", "__pycache__")


def examples() -> dict[str, str]:
    """Name -> the title of its README, in the order of names."""
    found = {folder.name: folder / "README.md" for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()}
    titles = {name: _title(readme) for name, readme in found.items()}
    return titles | {MONITORING: "alerts for Prometheus and dashboards for Grafana"}


@dataclass(frozen=True, slots=True)
class Example:
    """An example job."""

    name: str
    title: str
    folder: Path
    toml: str
    """Its job file."""


def example_jobs() -> list[Example]:
    """The examples that have a job file."""
    folders = [folder for folder in sorted(EXAMPLES.iterdir()) if (folder / "job.toml").is_file()]
    return [Example(each.name, _title(each / "README.md"), each, (each / "job.toml").read_text()) for each in folders]


def copy_example(name: str, to: Path) -> list[Path]:
    """Copy an example into a new or empty folder: its files. Raises SpecError; Unwritable."""
    if name not in (known := examples()):
        raise SpecError(f"there is no example {name!r}; known are {', '.join(known)}", "NAME")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SpecError(f"{to} is not an empty folder; name another one", "DIR")
    folders = [DEPLOY / "prometheus", DEPLOY / "grafana"] if name == MONITORING else [EXAMPLES / name]
    with writing(to):
        for folder in folders:
            at = to / folder.name if name == MONITORING else to
            shutil.copytree(folder, at, ignore=_LEFT_OUT, dirs_exist_ok=True)
    return sorted(path for path in to.rglob("*") if path.is_file())


def _title(readme: Path) -> str:
    found = re.match(r"# (?:\w+: )?(.+)", readme.read_text())
    return found[1] if found else ""
