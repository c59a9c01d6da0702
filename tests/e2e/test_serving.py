"""What the examples export is served without Headrace, with the golden predictions of their trainers."""

import subprocess
import sys

import pytest

from tests.e2e.test_examples import CRITEO, EXAMPLES, NEWS, criteo_data, first_lines, news_data, paths, report_of


def served(folder):
    command = [sys.executable, str(EXAMPLES / "serving" / "serve.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout


def exported(example, override, store, delta, *more):
    """Run an example with a stream of exports."""
    report_of(EXAMPLES / example / "job.toml", store, override, f"exports.serving.{delta}", *more)
    folder = store / "exports" / "serving" / example
    kinds = sorted(path.parent.name.partition("-")[2] for path in folder.glob("*/*/_DONE"))
    return folder, kinds


@pytest.mark.long
@pytest.mark.data
@news_data
def test_news_is_served_from_a_base_and_a_delta(tmp_path):
    part = first_lines(NEWS, 5_000, tmp_path / "part.jsonl.gz")
    folder, kinds = exported("news", paths("impressions", part), tmp_path / "store", 'delta="2h"')
    assert kinds == ["base", "delta"] and "32 golden samples" in served(folder)


@pytest.mark.long
@pytest.mark.data
@criteo_data
def test_criteo_is_served_from_a_base_and_deltas(tmp_path):
    part = first_lines(CRITEO, 5_000, tmp_path / "part.txt.gz")
    more = ("passes.max_events=1000", 'exports.serving.clock="wall"')
    folder, kinds = exported("criteo", paths("lines", part), tmp_path / "store", 'delta="1ms"', *more)
    assert kinds[0] == "base" and "delta" in kinds and "32 golden samples" in served(folder)
