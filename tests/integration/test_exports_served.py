"""What a job exports while it runs is served by the example that knows nothing of Headrace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.stream_job import SPEC, headrace, write_job

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "deploy" / "examples" / "serving" / "serve.py"
EXPORTS = """
[exports.serving]
delta = "10ms"
clock = "wall"

[exports.half]
delta = "10ms"
clock = "wall"
dtype = "float16"

[exports.small]
clock = "wall"
dtype = "int8"
base_threshold = 0.5
"""
SEQUENCE = SPEC.replace('pooling = "mean"', 'pooling = "none"\nmax_len = 2\nkeep = "tail"')


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "shards"),
    [pytest.param(SPEC, 0, marks=pytest.mark.slow), (SEQUENCE, 2)],
    ids=["mean", "sequence-2-shards"],
)
def test_every_stream_of_a_job_is_served_by_the_example(tmp_path, spec, shards):
    path = write_job(tmp_path, spec=spec.replace("[store]", EXPORTS + "\n[store]"))
    settings = (f"cluster.shards={shards}", "cluster.trainers=2") if shards else ()
    ended = headrace(path, *settings)
    assert ended.code == 0, ended.output
    for stream in ("serving", "half", "small"):
        folder = tmp_path / "store" / "exports" / stream / "small"
        current = json.loads((folder / "current.json").read_text())
        manifest = json.loads((folder / current["path"] / "manifest.json").read_text())
        assert manifest["onnx"] == {"ok": True, "why": ""} and manifest["golden"]["ok"]
        command = [sys.executable, str(SERVE), str(folder)]
        served = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert served.returncode == 0, served.stdout + served.stderr
        assert "32 golden samples" in served.stdout
