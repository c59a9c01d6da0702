"""The exports of a run, from its log and from its folders, for a comparison of two runs; and checks of each export.

Two runs with equal closes have equal exports, where streams wait for their turn (exports.<stream>.on_late).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headrace import documents
from headrace.done_markers import DONE, MARKERS
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commits, hash_of
from headrace.trainer.exports.destination import HOLDER, STAGES
from headrace.trainer.exports.pointers import DONEFILE
from headrace.trainer.exports.reader import CURRENT, MANIFEST
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log import read_history

OperationT = TypeVar("OperationT", log_records.ExportOperation, log_records.ExportedOperation)
CUT = ("type", "version", "timeline", "parent", "why", "all")
"""Fields of a logged export that must be equal in two runs."""
CUT_WORDS = " as it was cut"
"""End of the description of those fields."""
MAKING, SAMPLED = ("made_at", "passed_at", "head"), ("golden", "files")
"""Fields of manifests that may differ: when an export was made, which generation named it the current one, and the
samples of the golden predictions. A trainer takes the samples that it saw last, and one that has just started saw few.
Files are compared by themselves."""
GOLDEN = "golden.parquet"

Exported = Mapping[str, Any]
"""Compared values, by a description for people."""


def exported_of(job: LoadedJob, log: Path) -> Exported:
    """All values that must be equal in two runs. `log`: a folder with every record ever logged."""
    found: dict[str, Any] = {}
    for each in _operations(log, log_records.ExportOperation):
        found[f"{each.stream} {each.timeline}/{each.name}{CUT_WORDS}"] = {key: getattr(each, key) for key in CUT}
    for stream, folder in _folders(job):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != GOLDEN:
                found[f"{stream} {path.relative_to(folder)}"] = _content(path)
    return found


def export_violations(job: LoadedJob, log: Path) -> Iterator[str]:
    """Violations of what holds for exports once a run has ended, in words."""
    cut = Counter((each.stream, each.timeline, each.name) for each in _operations(log, log_records.ExportOperation))
    ends = list(_operations(log, log_records.ExportedOperation))
    over = Counter((each.stream, each.timeline, each.name) for each in ends)
    for key in sorted(cut.keys() | over.keys()):
        if (cut[key], over[key]) != (1, 1):
            yield f"export {' '.join(key)} was cut {cut[key]} times and ended {over[key]} times"
    for each in ends:
        if each.outcome != "complete":
            yield f"export {each.stream} {each.name} failed: {each.error}"
    for stream, folder in _folders(job):
        yield from (f"{stream}: {trouble}" for trouble in _incomplete(folder))
    leased = [f"{name} for {who}" for name, whos in Commits(job.store).holders().items() for who in whos]
    yield from (f"commit {lease} is still held" for lease in leased if f"for {HOLDER}" in lease)
    yield from (f"{path.name} is left in {STAGES}" for path in (job.store / STAGES).glob("*-[0-9]*"))


def _incomplete(folder: Path) -> Iterator[str]:
    """Exports of a stream without _DONE or unlike their manifests; wrong lines in DONEFILE and names in CURRENT."""
    done = {str(path.parent.relative_to(folder)) for marker in MARKERS for path in folder.glob(f"*/*/{marker}")}
    for path in sorted(folder.glob("*/*")):
        name = str(path.relative_to(folder))
        if name not in done:
            yield f"{name} has no {DONE}"
            continue
        manifest = documents.read_object(path / MANIFEST)
        files = manifest["files"]
        if manifest["golden"]["ok"] is False:
            yield f"{name} does not give its golden predictions: {manifest['golden']['why']}"
        there = {each.name for each in path.iterdir()} - {MANIFEST, *MARKERS}
        if there != set(files):
            yield f"{name} differs from its manifest in {sorted(there ^ set(files))}"
        yield from (f"{name}/{file} is damaged" for file in there & set(files) if _differs(path / file, files[file]))
    lines = (folder / DONEFILE).read_text(encoding="utf-8").splitlines() if done else []
    listed = Counter(documents.parse_object(line, DONEFILE)["path"] for line in lines)
    yield from (f"{path} is in {DONEFILE} {count} times" for path, count in listed.items() if count > 1)
    yield from (f"{path} is not in {DONEFILE}" for path in sorted(done - listed.keys()))
    chain = documents.read_object(folder / CURRENT)["chain"] if (folder / CURRENT).exists() else []
    yield from (f"{CURRENT} names {path}, which does not exist" for path in chain if path not in done)


def _differs(path: Path, listed: Mapping[str, Any]) -> bool:
    stored = hash_of(path)
    return (stored.sha256, stored.num_bytes) != (listed["sha256"], listed["bytes"])


def _content(path: Path) -> Any:
    """The content of a file that must be equal in two runs."""
    if path.name in (MANIFEST, CURRENT):
        manifest = {key: value for key, value in documents.read_object(path).items() if key not in MAKING + SAMPLED}
        return manifest | {
            "gates": {name: gate for name, gate in manifest.get("gates", {}).items() if name != "golden"}
        }
    if path.name == DONEFILE:
        return [
            documents.parse_object(line, DONEFILE)["path"] for line in path.read_text(encoding="utf-8").splitlines()
        ]
    return hash_of(path).sha256


def _folders(job: LoadedJob) -> Iterator[tuple[str, Path]]:
    for stream, section in job.spec.exports.items():
        assert section.path is not None, "service.faults.rounds sets it"
        yield stream, Path(section.path) / job.spec.name


def _operations(log: Path, cls: type[OperationT]) -> Iterator[OperationT]:
    return (each.content for each in read_history(log).operations if isinstance(each.content, cls))


def differing(wanted: Exported, found: Exported) -> list[str]:
    """The differences, in words: the first few, and the number of the others."""
    wrong = [what for what in sorted({*wanted, *found}) if wanted.get(what) != found.get(what)]
    more = [f"{len(wrong) - 3} more differences of exports"] if len(wrong) > 4 else []
    return [*(wrong[:3] if more else wrong), *more]
