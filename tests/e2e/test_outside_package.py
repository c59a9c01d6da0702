"""A package of others adds one of each kind, and a job trains with them as with Headrace's own."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

OUTSIDE = Path(__file__).parents[1] / "outside"
SPEC = """
name = "outside"
[sources.events]
kind = "ramp"
events = 300
[pipe]
kind = "columns"
format = "pairs"
[[slots]]
name = "number"
[[slots]]
name = "click"
kind = "meta"
[[tasks]]
name = "ctr"
label = "click"
[tables.default]
dim = 4
admission = [{ kind = "clicked", clicks = 1 }]
optimizer = { kind = "heavy_ball", decay = 0.5 }
first_order_optimizer = { lr = 0.01 }
[model]
name = "scaled"
[model.settings]
scale = 0.5
[metrics]
own = ["share_above_half", "expected_calibration_error"]
[train]
mode = "plain"
[dense]
strategy = "normed"
[dense.optimizer]
kind = "signs"
lr = 0.01
[dense.schedule]
kind = "steps"
first = 150
[exports.small]
dtype = "int16"
[cluster]
launcher = "noting"
[store]
path = "store"
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder of a job, and one on the path in which the package is installed, as `pip install --target` does."""
    folder, target = (tmp_path_factory.mktemp(name) for name in ("job", "installed"))
    (folder / "job.toml").write_text(SPEC)
    project = tomllib.loads((OUTSIDE / "pyproject.toml").read_text())["project"]
    shutil.copytree(OUTSIDE / "outside_kinds", target / "outside_kinds")
    info = target / f"outside_kinds-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder, target


def headrace(world, *words, installed=True):
    folder, target = world
    path = os.pathsep.join(filter(None, [str(target) if installed else "", os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "headrace.service", *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.long
def test_a_job_of_a_package_of_others_is_checked_and_trained(world):
    checked = headrace(world, "spec", "check", "job.toml")
    assert checked.returncode == 0, checked.stderr
    ended = headrace(world, "run", "job.toml")
    assert ended.returncode == 0, ended.stderr
    report = json.loads((world[0] / "store" / "report.json").read_text())
    assert report["events"] == report["samples"] == 300
    assert (world[0] / "noted").read_text() == "trainer-0"
    (rows,) = (world[0] / "store" / "exports" / "small").rglob("rows-default*.parquet")
    table = pq.read_table(rows)
    assert len(table) == 150 and table.schema.field("vector").type.value_type == pa.int16()
    measured = report["metrics"]["life"]["ctr"]
    assert 0 <= measured["share_above_half"] <= 1 and 0 <= measured["expected_calibration_error"] <= 1


def test_its_settings_are_in_the_schema(world):
    schema = json.loads(headrace(world, "spec", "schema").stdout)
    assert schema["$defs"]["RampSource"]["properties"]["events"]["description"] == "Number of events."
    assert schema["$defs"]["HeavyBall"]["properties"]["decay"]["default"] == 0.9


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sources.events.events=0", "sources.events.events: "),
        ("sources.events.kind=rump", "did you mean 'ramp'?"),
        ("model.settings.scale=0", "model.settings.scale: "),
        ('metrics.own=["share_above_hall"]', "metrics.own.0: no metric 'share_above_hall'; did you mean 'share_above"),
        ("pipe.message=a", 'message is for formats with a schema; format = "pairs" has none'),
        ("tables.default.admission.0.clicks=0", "tables.default.admission.0.clicks: "),
        ("train.staleness=1", 'mode = "plain" has none'),
        ("dense.clip_norm=1", 'strategy = "normed" does not work with clip_norm'),
        ('exports.small.dtype="int61"', "or 'int16' (got 'int61')"),
        ("cluster.shards=1", "cluster.shards: the noting launcher starts no shards"),
    ],
)
def test_its_settings_are_in_messages(world, override, words):
    refused = headrace(world, "spec", "check", "job.toml", "--set", override)
    assert refused.returncode and words in refused.stderr


def test_without_the_package_its_kinds_are_unknown(world):
    refused = headrace(world, "spec", "check", "job.toml", installed=False)
    assert refused.returncode and "'ramp' is none of 'files', 'kafka', 'simulated'" in refused.stderr
