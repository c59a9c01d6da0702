"""What a run exported: as its log tells it, and as it lies there at the end; and what of it may never be.

Two runs of which closes are alike have the same, where streams wait their turn (exports.<stream>.on_late).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from millrace import documents
from service.spec import LoadedJob
from trainer.commits import Commits, hash_of
from trainer.exports.ordering import STAGES
from trainer.exports.pointing import DONEFILE
from trainer.exports.reading import CURRENT, MANIFEST
from trainer.exports.retention import HOLDER
from trainer.history import History
from trainer.log import read
from trainer.markers import DONE, MARKERS
from trainer.records import ExportedOperation, ExportOperation

OperationT = TypeVar("OperationT", ExportOperation, ExportedOperation)
CUT = ("type", "version", "timeline", "parent", "why", "all")
"""What the log says of an export that is cut, and must be the same."""
TIMES, SAMPLED = ("made_at", "passed_at"), ("golden", "files")
"""What manifests say and may differ: when, and of which samples the golden predictions are. A trainer takes those that
it saw last, and one that has just started saw few. Files are compared themselves."""
GOLDEN = "golden.parquet"

Exported = Mapping[str, Any]
"""By what is told: of a stream, of a folder, of a file."""


def exported_of(job: LoadedJob, log: Path) -> Exported:
    """All that is to be the same in two runs. `log`: every record that there ever was."""
    found: dict[str, Any] = {}
    for each in _operations(log, ExportOperation):
        found[f"{each.stream} {each.timeline}/{each.name} as it was cut"] = {key: getattr(each, key) for key in CUT}
    for stream, folder in _folders(job):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != GOLDEN:
                found[f"{stream} {path.relative_to(folder)}"] = _content(path)
    return found


def troubles(job: LoadedJob, log: Path) -> Iterator[str]:
    """What may never be once a run has ended, in words."""
    cut = Counter((each.stream, each.timeline, each.name) for each in _operations(log, ExportOperation))
    ends = list(_operations(log, ExportedOperation))
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
    """Of a stream: what has no _DONE, or is not as its manifest says; what is told twice, or points nowhere."""
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
            yield f"{name} has {sorted(there ^ set(files))} otherwise than its manifest"
        yield from (f"{name}/{file} is damaged" for file in there & set(files) if _differs(path / file, files[file]))
    lines = (folder / DONEFILE).read_text(encoding="utf-8").splitlines() if done else []
    told = Counter(documents.parse_object(line, DONEFILE)["path"] for line in lines)
    yield from (f"{path} is in {DONEFILE} {count} times" for path, count in told.items() if count > 1)
    yield from (f"{path} is not in {DONEFILE}" for path in sorted(done - told.keys()))
    chain = documents.read_object(folder / CURRENT)["chain"] if (folder / CURRENT).exists() else []
    yield from (f"{CURRENT} names {path}, which is not there" for path in chain if path not in done)


def _differs(path: Path, told: Mapping[str, Any]) -> bool:
    stored = hash_of(path)
    return (stored.sha256, stored.num_bytes) != (told["sha256"], told["bytes"])


def _content(path: Path) -> Any:
    """What two runs must have in common of a file."""
    if path.name in (MANIFEST, CURRENT):
        told = {key: value for key, value in documents.read_object(path).items() if key not in TIMES + SAMPLED}
        return told | {"gates": {name: gate for name, gate in told.get("gates", {}).items() if name != "golden"}}
    if path.name == DONEFILE:
        return [
            documents.parse_object(line, DONEFILE)["path"] for line in path.read_text(encoding="utf-8").splitlines()
        ]
    return hash_of(path).sha256


def _folders(job: LoadedJob) -> Iterator[tuple[str, Path]]:
    for stream, section in job.spec.exports.items():
        assert section.path is not None, "a run's own: service.faults.rounds"
        yield stream, Path(section.path) / job.spec.name


def _operations(log: Path, cls: type[OperationT]) -> Iterator[OperationT]:
    return (each.content for each in History.of(read(log)).operations if isinstance(each.content, cls))


def differing(wanted: Exported, found: Exported) -> list[str]:
    """What differs, in words: the first few, and how many."""
    wrong = [what for what in sorted({*wanted, *found}) if wanted.get(what) != found.get(what)]
    more = [f"{len(wrong) - 3} more of exports"] if len(wrong) > 4 else []
    return [*(wrong[:3] if more else wrong), *more]
