"""The documentation builds without a warning: every page is in the menu, every link and anchor leads somewhere."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {
    "reference/job-file.html": ("max_bad_fraction", "delete_after_days"),
    "reference/service-file.html": ("bootstrap_servers",),
    "reference/cli.html": ("headrace commits pin", "--fresh"),
    "reference/rest.html": ("/v1/jobs/{job}/tables/{table}/shrink", "Idempotency-Key"),
    "reference/python.html": ("generate_columns", "first_order_BF", "MultiSlot"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def build(root, folder):
    """The build as `make docs` does it, into `folder`. (With --quiet it would count no warning, and never fail.)"""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False, env=env)


@pytest.mark.long
@pytest.mark.parametrize("page", GENERATED)
def test_what_is_generated_is_there(site, page):
    text = (site / page).read_text()
    assert [word for word in GENERATED[page] if word not in text] == []


@pytest.mark.long
def test_no_page_has_an_anchor_twice(site):
    for page in site.rglob("*.html"):
        anchors = Counter(re.findall(r'<h\d id="([^"]+)"', page.read_text()))
        assert [anchor for anchor, count in anchors.items() if count > 1] == [], page.name


@pytest.mark.long
def test_no_page_loads_anything_from_another_site(site):
    """A reader without a network sees the same pages, and nobody learns what is read."""
    loads = ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http', "@import url(http")
    assert [page.name for page in site.rglob("*.html") if any(load in page.read_text() for load in loads)] == []


@pytest.mark.long
def test_a_link_or_an_anchor_that_leads_nowhere_fails_the_build(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: ['{ROOT}']"))
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("[a page](missing.md) and [an anchor](concepts.md#missing)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "missing.md" in built.stderr and "#missing" in built.stderr
