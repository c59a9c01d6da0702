"""What READMEs and documentation name exists: commands and options, keys of the spec, metrics, files, figures."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.pserver.config import TableSection
from headrace.pserver.rows.row_cache import BOOKKEEPING_BYTES, CacheBound
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.rows.table_rows import row_bytes_of
from headrace.service.cluster.store import MADE_BY_A_RUN
from headrace.service.spec.job import JobFile, job_of, load_job
from headrace.trainer.spec import change_classes
from tests.goldens import METRIC_FILES, commands, metrics

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "*/README.md", "trainer/*/README.md", "deploy/examples/*/README.md", "docs/*.md", "docs/*/*.md")
DOCS = sorted(path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern))
PACKAGES = ("service", "trainer", "pserver", "dataset", "headrace")
SECTIONS = ("commit", "store", "cluster", "passes", "pipe", "train", "dense", "tables", "sources", "metrics", "exports")
GENERATED = ("reference",)
"""Folders of the documentation whose pages the build makes."""
every_doc = pytest.mark.parametrize("doc", DOCS, ids=str)
TABLE = ROOT / "deploy" / "README.md"
durability = pytest.fixture(lambda: (ROOT / "docs" / "durability.md").read_text())


COMMANDS = commands()


def commands_named(text):
    """Every command line of the documentation that begins with `headrace`: its words after that."""
    blocks = re.findall(r"^ *```[^`\n]*\n(.*?)^ *```$", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        if match := re.match(r"(?:\S*/)?headrace ([a-z].*)", line.strip()):
            yield shlex.split(match[1], comments=True)


@every_doc
def test_every_command_and_option_named_is_there(doc):
    for words in commands_named((ROOT / doc).read_text()):
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        assert name in COMMANDS, f"{doc}: headrace {' '.join(words)}"
        own = words[: words.index("--")] if "--" in words else words  # what follows is another command's
        options = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert options <= COMMANDS[name], f"{doc}: headrace {' '.join(words)}"


def test_every_command_is_documented():
    pages = [doc for doc in DOCS if doc.parts[0] == "docs"]
    text = " ".join((ROOT / doc).read_text() for doc in pages)
    groups = {"", *(name.split()[0] for name in COMMANDS if " " in name)}
    words = set(re.findall(r"[\w-]+", text))
    assert [name for name in COMMANDS if name not in groups and name.split()[-1] not in words] == []


@every_doc
def test_every_make_target_is_there(doc):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"^    make (\w+)", (ROOT / doc).read_text(), re.M)
    named += re.findall(r"`make (\w+)", (ROOT / doc).read_text())
    assert set(named) <= targets


@every_doc
def test_every_file_named_is_there(doc):
    text = (ROOT / doc).read_text()
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml|txt|proto))`", text) + re.findall(r"\]\(([^):]+)\)", text)
    optional = {"report.json", "data/criteo_80k.txt.gz", "donefile.txt"}
    missing = [name for name in named if name not in optional and not found(doc, name.partition("#")[0])]
    assert missing == []


def found(doc, name):
    """A path counts from the document's folder or from the root; some belong to a user's job, or to each package."""
    if doc.name == "CONTRIBUTING.md" and name in ("config.py", "errors.py"):  # of each package that has one
        return True
    if doc.parts[0] == "docs" and Path(name).parent.name in GENERATED:  # `make docs` makes it, and checks the link
        return True
    if name in re.findall(r'^```\w+ title="(\S+)"$', (ROOT / doc).read_text(), re.M):  # the reader writes it
        return True
    return name in ("job.toml", "proposed.toml", "service.toml", "generator.py") or any(
        (folder / name).exists() for folder in (ROOT / doc.parent, ROOT)
    )


def keys_of(schema, definitions):
    """Every key of a JSON schema by its path; a mapping's names are "*"."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from keys_of(choice, definitions)
    inner = {**schema.get("properties", {})}
    for named in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()):
        if isinstance(named, dict):
            inner["*"] = named
    for name, child in inner.items():
        yield name
        yield from (f"{name}.{key}" for key in keys_of(child, definitions))


@pytest.fixture(scope="module")
def keys():
    schema = JobFile.model_json_schema()
    return set(keys_of(schema, schema["$defs"]))


@every_doc
def test_every_key_of_the_spec_named_is_there(doc, keys):
    text = re.sub(r"```.*?```", "", (ROOT / doc).read_text(), flags=re.S)
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_<>.]+)(?: =[^`]*)?`", text)
    named = [key for key in named if not key.endswith((".py", ".path/", ".safetensors", ".onnx"))]
    if doc.parts[0] != "trainer":  # there `metrics.x` and the like are modules
        assert [key for key in named if re.sub(r"<\w+>", "*", key) not in keys] == []


@every_doc
def test_every_setting_of_a_command_is_a_key(doc, keys):
    for key in re.findall(r"--set '?([a-z_.]+)=", (ROOT / doc).read_text()):
        names = key.split(".")
        if names[0] in ("tables", "sources", "exports"):
            names[1] = "*"
        assert ".".join(names) in keys or key.startswith("model.settings"), key


def test_what_a_changed_job_file_does_is_what_respec_does(durability):
    (at_once,) = re.findall(r"^\| at once \| (.*) \|$", durability, re.M)
    assert tuple(re.findall(r"`([^`]+)`", at_once)) == change_classes.AT_ONCE
    (never,) = re.findall(r"^\| never \| (.*?): rows are made", durability, re.M)
    assert tuple(re.findall(r"`([^`]+)`", never)) == (*change_classes.NEVER, *change_classes.NEVER_OF_TABLES)


def test_documented_defaults_are_those_of_the_spec(durability):
    schema = JobFile.model_json_schema()["$defs"]
    seconds = {"s": 1, "min": 60}
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\d+)(?: (s|min))? \|", durability, re.M)
    assert len(rows) >= 6
    for section, key, number, unit in rows:
        default = schema[f"{section.title()}Section"]["properties"][key]["default"]
        assert default == int(number) * seconds.get(unit, 1), f"{section}.{key}"
    cluster = schema["ClusterSection"]["properties"]
    assert (cluster["max_restarts"]["default"], cluster["restart_window"]["default"]) == (5, 600.0)


@every_doc
def test_every_metric_named_is_there(doc):
    there = {metric.name for file in METRIC_FILES for metric in metrics(file)}
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    assert set(re.findall(r"`(headrace_\w+)`", (ROOT / doc).read_text())) <= there


def test_the_table_of_metrics_is_that_of_the_golden_files():
    rows = re.findall(r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", TABLE.read_text(), re.M)
    there = [metric for file in METRIC_FILES for metric in metrics(file)]
    assert rows == [(one.name, one.kind, ", ".join(one.labels), one.what) for one in there]


def test_documented_memory_of_rows_is_that_of_the_code():
    text = (ROOT / "docs" / "tables.md").read_text()
    section = TableSection()
    width = int(section.first_order) + section.dim + len(optimizer_of(section).start_state)
    assert f"{width} for `dim = {section.dim}`" in text
    assert f"4 W + {row_bytes_of(0) + BOOKKEEPING_BYTES} bytes" in text
    assert f"a copy 4 W + {8 + 4 * HEAD}" in text
    (code, answer) = re.search(r'python -c "(.*)"\n(.*)\n', text).groups()
    expected, names = CacheBound.of(512 << 20, width), {"print": lambda value: None}
    exec(code, names)  # noqa: S102  # the page's own line
    assert answer == repr(expected) and f"CacheBound.of(512 << 20, {width})" in code


def test_everything_that_a_run_makes_is_drawn():
    (drawn,) = re.findall(r"^store\.path/\n(.*?)```", (ROOT / "docs" / "durability.md").read_text(), re.M | re.S)
    names = {name for name in MADE_BY_A_RUN if "." not in name} - {"model"}
    assert [name for name in sorted(names) if f"{name}/" not in drawn and f" {name} " not in drawn] == []


def test_the_reading_order_is_ten_files_of_an_evening():
    (text,) = re.findall(r"^## Read the code.*?(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    order = re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.M)
    lines = sum((ROOT / name).read_text().count("\n") for name in order)
    assert len(order) == 10 and lines < 2_500


def test_the_readme_is_read_in_a_few_minutes_and_shows_the_live_page():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (ROOT / picture).stat().st_size <= 150 * 1024


def test_the_events_of_the_readme_have_the_fields_that_its_job_names(tmp_path):
    """tests/e2e/test_tutorial.py trains it."""
    files = dict(re.findall(r'^```\w+ title="(\S+)"\n(.*?)^```', (ROOT / "README.md").read_text(), re.M | re.S))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    job = load_job(tmp_path / "job.toml")
    made = subprocess.run([sys.executable, "events.py"], cwd=tmp_path, capture_output=True, check=True, timeout=60)
    events = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(events) == 20_000
    names = {name for slot in job.spec.slots for name in [slot.name, *slot.names] if name}
    assert names | {job.spec.sources["clicks"].event_time.field} == set(events[0])


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_left_out_of_its_packages_readme(package):
    """A module is listed with its folder; in the README of its own folder, if there is one, by its file name."""
    missing = []
    for path in modules(package):
        room = ROOT / package / path.relative_to(ROOT / package).parts[0]
        folder = room if (room / "README.md").exists() else ROOT / package
        name = str(path.relative_to(folder))
        if name not in re.findall(r"^- `([\w/]+\.py)`: \S", (folder / "README.md").read_text(), re.M):
            missing.append(f"{folder.name}: {name}")
    assert missing == []


def modules(package):
    """The files of a package that a reader looks for: no generated ones, no migrations of tables."""
    silent = {"__init__", "__main__", "errors", "config"}
    paths = sorted((ROOT / package).rglob("*.py"))
    return [
        path for path in paths if path.stem not in silent and "_pb2" not in path.name and "versions" not in path.parts
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_is_in_its_readme_and_has_no_import_of_one_above_it(package):
    (section,) = re.findall(r"^## Rooms\n(.*?)^## ", (ROOT / package / "README.md").read_text(), re.M | re.S)
    listed = re.findall(r"^\| `(\w+)/` \| \S", section, re.M)
    folders = {path.parent for path in (ROOT / package).glob("*/__init__.py")}
    assert sorted(listed) == sorted(folder.name for folder in folders if not folder.is_symlink())
    dotted = "headrace" if package == "headrace" else f"headrace.{package}"
    above = [
        f"{room} imports {name}"
        for number, room in enumerate(listed)
        for path in sorted((ROOT / package / room).rglob("*.py"))
        for name in listed[:number]
        if re.search(rf"^\s*(from|import) {dotted}\.{name}\b", path.read_text(), re.M)
    ]
    assert above == []


AROUND = {
    "name": "shown",
    "sources": {"lines": {"kind": "files", "paths": ["x"]}},
    "pipe": {"kind": "columns"},
    "tasks": [{"name": "ctr", "label": "click"}],
    "model": {"name": "deepfm"},
    "store": {"path": "store"},
}


def blocks_with_slots():
    for page in ("histories", "model-zoo"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        yield from (
            tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.S) if "[[slots]]" in block
        )


@pytest.mark.parametrize("block", list(blocks_with_slots()))
def test_slots_with_histories_and_sequences_are_a_job_file_as_the_pages_show_them(block, tmp_path):
    names = {name for slot in block["slots"] for name in [slot.get("name"), *slot.get("names", [])]}
    more = [] if "click" in names else [{"name": "click", "kind": "meta"}]
    job = job_of({**AROUND, **block, "slots": block["slots"] + more}, tmp_path)
    for slot in job.spec.slots:  # as the pages say: text, alike in all, so that signs of one item agree
        assert slot.kind == "meta" or slot.values == "string"


def test_the_first_block_about_late_labels_is_a_whole_job_file(tmp_path):
    (block, *_) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "joins.md").read_text(), re.S)
    (tmp_path / "job.toml").write_text(block)
    assert load_job(tmp_path / "job.toml").spec.join.label == "click"


def test_every_page_is_in_the_menu():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    named = re.findall(r"^ +- (?:Overview: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(pages)


def test_the_pages_show_slots_four_times():
    assert len(list(blocks_with_slots())) == 4
