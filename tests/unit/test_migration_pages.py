"""The pages for those who come from another system show lines that a job file may have."""

import re
from pathlib import Path

import pytest

from headrace.config import validate
from headrace.dataset.formats.multislot_parser import MultiSlotParser
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.service.spec.job import load_job

ROOT = Path(__file__).parents[2]
JOB = ROOT / "deploy" / "examples" / "criteo" / "job.toml"
PAGES = ("ddp", "horovod", "tf-distribute")
PROMISED = {
    "ddp": ("no_sync", "torch.manual_seed", "rank == 0", "sorted again by index", "torchrun"),
    "horovod": ("backward_passes_per_step", "per-rank seeds", "hvd.rank() == 0", "hvd.allgather", "horovodrun"),
    "tf-distribute": (
        *("MirroredStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"),
        *("evaluator task", "gather of predictions", "tf.random.set_seed", "logs of the chief"),
    ),
}
"""Words of the first column of each page that the issue names."""


FLEET = "paddle", "Launching, and strategies of Fleet"
"""The page and the section whose lines are those of a job file, too."""


def rows(page, section=""):
    """The cells of each row of a page's table, or of that in a section."""
    text = (ROOT / "docs" / "coming-from" / f"{page}.md").read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in found][1:]


def settings(cell):
    """The lines of a job file in a cell, as `--set` takes them."""
    return [line.replace(" = ", "=", 1) for line in re.findall(r"`([^`]+ = [^`]+)`", cell)]


TABLES = (*((page,) for page in PAGES), FLEET)
LINES = sorted({tuple(found) for table in TABLES for _, cell, *_ in rows(*table) if (found := settings(cell))})


@pytest.mark.parametrize("lines", LINES, ids=" and ".join)
def test_a_line_of_a_page_is_one_of_a_job_file(lines, tmp_path):
    more = {"cluster.shards=1"} if any(line.startswith("train.mode") for line in lines) else set()
    job = load_job(JOB, [*lines, *sorted(more), f"store.path={tmp_path / 'store'}"])
    assert job.spec.name == "criteo"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_a_user_looks_for(page):
    first = " ".join(cell for cell, *_ in rows(page))
    assert [words for words in PROMISED[page] if words not in first] == []
    assert all(len(row) in (2, 3) for row in rows(page))
    assert all(cell == "none" or settings(cell) or cell == "the same line" for _, cell, *_ in rows(page))


def test_each_strategy_of_fleet_has_a_line():
    found = rows(*FLEET)
    assert all(len(row) in (2, 3) and settings(row[1]) for row in found)
    first = " ".join(cell for cell, *_ in found)
    strategies = ("dgc", "amp", "recompute", "gradient_merge", "lars", "lamb", "pipeline", "use_hierarchical_allreduce")
    assert [name for name in strategies if f"strategy.{name}" not in first] == [] and "fleetrun" in first


def lines_of_paddle():
    """The rows of the page's table of lines: the line, and what Headrace makes of it."""
    text = (ROOT / "docs" / "coming-from" / "paddle.md").read_text()
    return re.findall(r"^\| `([01] [^`]+)` \| [^|]+ \| ([^|:]+?)(?:: [^|]+)? \|$", text, re.MULTILINE)


@pytest.mark.parametrize(("line", "said"), lines_of_paddle())
def test_a_line_that_paddle_reads_otherwise_is_what_the_page_says(line, said):
    slots = [{"name": "user"}, {"name": "price", "kind": "dense"}, {"name": "click", "kind": "meta"}]
    parser = MultiSlotParser(Schema.of(validate(SlotsSpec, {"slots": slots}).slots))
    samples, bad = parser.parse(f"{line}\n".encode())
    assert [each.reason.value for each in bad] == ([] if said == "taken" else [said])
    assert len(samples.event_B) == (said == "taken")


def test_the_page_has_the_lines_that_users_of_paddle_meet():
    said = dict(lines_of_paddle())
    assert len(said) == 10 and set(said.values()) == {"unparsable", "wrong count", "non-finite value", "taken"}
