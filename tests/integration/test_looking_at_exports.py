"""The tools on exports that a job made: the law of replay, through materialize, diff and a warm start."""

import json
import subprocess
import sys

import numpy as np
import pytest

from headrace.trainer.exports.reader import open_export
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = pytest.mark.timeout(300)

STREAMS = """
[exports.chain]
delta = "1ms"
clock = "wall"
dtype = "{dtype}"

[exports.bases]
base = "1ms"
clock = "wall"
dtype = "{dtype}"
"""


@pytest.fixture(scope="module", params=["float32", pytest.param("int8", marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    """A job that made a base and deltas in one stream, bases in the other."""
    folder = tmp_path_factory.mktemp("exports")
    path = write_job(folder, spec=SPEC + STREAMS.format(dtype=request.param))
    run = headrace(path, "passes.max_events=150")
    assert run.code == 0, run.output
    return path


def exports_of(job, stream):
    folder = job.parent / "store" / "exports" / stream / "small" / "t1"
    return sorted(path.parent for path in folder.glob("*/_DONE"))


def said(*arguments):
    command = [sys.executable, "-m", "headrace.service", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False)


def columns(path, scratch):
    chunks = list(open_export(str(path), scratch).check().rows("default"))
    names = ("sign_R", "key_R", "weight_R", "vector_RD", "scale_R")
    found = {name: [getattr(chunk, name) for chunk in chunks] for name in names}
    return {name: np.concatenate(parts) for name, parts in found.items() if parts[0] is not None}


@pytest.mark.long
def test_a_chain_materialized_is_the_base_exported_there_bit_for_bit(job, tmp_path):
    delta, base = exports_of(job, "chain")[-1], exports_of(job, "bases")[-1]
    assert (delta.name.partition("-")[2], base.name.partition("-")[2]) == ("delta", "base")
    out = tmp_path / "whole"  # what each says of the end: passes without events between them change no row
    done = said("materialize", delta, "--out", out)
    assert done.returncode == 0, done.stderr
    ours, theirs = columns(out, tmp_path / "s"), columns(base, tmp_path / "s")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    told, wanted = (json.loads((path / "manifest.json").read_text()) for path in (out, base))
    assert told.keys() == wanted.keys()
    assert told["tables"]["default"].keys() == wanted["tables"]["default"].keys()
    for name in ("rows", "tombstones", "by_slot", "model_rows", "dim", "first_order", "dtype"):
        assert told["tables"]["default"][name] == wanted["tables"]["default"][name], name
    assert said("diff", delta, base).returncode == 0


@pytest.mark.long
def test_every_export_is_sound_and_a_deltas_rows_moved(job):
    for path in (*exports_of(job, "chain"), *exports_of(job, "bases")):
        done = said("inspect", path, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        if path.name.endswith("-delta"):
            assert found["movers"]["default"]["changed"] + found["movers"]["default"]["new"] > 0
    done = said("inspect", job.parent / "store" / "exports" / "chain" / "small")
    assert done.returncode == 0 and "sound: every file is as written" in done.stdout


@pytest.mark.slow
def test_a_job_starts_warm_from_an_export_of_another(job):
    last = exports_of(job, "chain")[-1]
    settings = ["--set", "store.path=warm"]
    done = said("import", job, last, *settings)
    assert done.returncode == 0, done.stderr
    assert "dense: loaded " in done.stdout and "initialised" not in done.stdout and "ignored" not in done.stdout
    run = headrace(job, store="warm")
    assert run.code == 0, run.output
    assert run.report["samples"] > 0
