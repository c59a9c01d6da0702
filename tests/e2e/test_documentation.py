"""The documentation builds without a warning: every page is in the menu, every link and anchor leads somewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {
    "reference/job-file.html": ("max_bad_fraction", "delete_after_days"),
    "reference/service-file.html": ("bootstrap_servers",),
    "reference/cli.html": ("millrace commits pin", "--fresh"),
    "reference/rest.html": ("/v1/jobs/{job}/tables/{table}/shrink", "Idempotency-Key"),
    "reference/python.html": ("generate_columns", "first_order_BF", "MultiSlot"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", GENERATED)
def test_what_is_generated_is_there(site, page):
    text = (site / page).read_text()
    assert [word for word in GENERATED[page] if word not in text] == []


@pytest.mark.long
def test_no_page_loads_anything_from_another_site(site):
    """A reader without a network sees the same pages, and nobody learns what is read."""
    loads = ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http', "@import url(http")
    assert [page.name for page in site.rglob("*.html") if any(load in page.read_text() for load in loads)] == []
