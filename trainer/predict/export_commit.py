"""Converts an export to a commit in a scratch folder, which shards and the model can load. Imports no torch.

trainer.importing does the import. This module checks that the export is whole and has exactly the slots of the job: a
warm start may import a part, a prediction may not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.lifecycle.day_decay import DayDecay
from headrace.pserver.protocol.shards import F32
from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.reader import ReadableExport, chain_of, open_export
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.exports.slot_files import Statistics, replay, slot_files_of
from headrace.trainer.importing.export_source import ExportSource
from headrace.trainer.importing.first_commit import RememberedRows, make_first_commit
from headrace.trainer.importing.selection import ImportSelection, TensorSelection
from headrace.trainer.spec.history_tables import history_tables, statistics_section


def as_commit(address: str, job: TrainerJob, raw: Mapping[str, Any], scratch: Path) -> tuple[Path, dict[str, Any]]:
    """Folder of a new commit below `scratch`, and facts of the export.

    Raises ExportUnusable, ParentMissing, BadInput, SpecError.
    """
    export = open_export(address, scratch / "fetched")
    schema = Schema.of(job.slots)
    check_fits(export, job, schema)
    source = ExportSource(export)
    tensors = TensorSelection(tuple(source.dense()), {}, ())  # the model checks these names when it loads them
    choice = ImportSelection.of(schema, job.tables, (), None)
    (scratch / "store").mkdir(parents=True)
    memories = remembered_rows(export, schema)
    done = make_first_commit(scratch / "store", job, raw, source, choice, tensors, memories)
    facts = {name: export.manifest[name] for name in ("job", "timeline", "version", "kind", "name")}
    return done.commit, {"export": export.place.address, **facts}


def remembered_rows(export: ReadableExport, schema: Schema) -> dict[str, RememberedRows]:
    """The histories, counters and statistics of rows after an export, by table. Raises SpecError where its chain does
    not have them."""
    chain, sections, found = chain_of(export), history_tables(schema), {}
    for files in slot_files_of(schema):
        for each in chain:
            if not files.is_in(each):
                raise SpecError(
                    f"{each.place.address}: has no {files.kind} of slot {files.slot!r}, and predictions need them; "
                    "use a base of a stream that exports all tables, or a commit",
                    "version",
                )
        chunks = replay(chain, files)
        if isinstance(files, Statistics):
            chunks = _present(chunks, files.of_export(export).version)
        section = statistics_section() if isinstance(files, Statistics) else sections[files.table]
        found[files.table] = RememberedRows(section, files.group, chunks)
    return found


def _present(chunks: Iterator[RowChunk], version: DayDecay) -> Iterator[RowChunk]:
    """Statistics as they are on the day of a version."""
    return (replace(each, vector_RD=version.present(_rows(each))) for each in chunks)


def _rows(chunk: RowChunk) -> F32:
    assert chunk.vector_RD is not None, "of slot files"
    return chunk.vector_RD


def check_fits(export: ReadableExport, job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError where the export was made for other slots, tables or tasks than the job's."""
    model = export.model()
    wanted = describe(schema, job.tables, job.tasks, ExportSection())
    where = export.place.address
    for what in ("slots", "tasks"):
        theirs, ours = ({each["name"]: each for each in described.get(what, ())} for described in (model, wanted))
        if differ := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
            raise SpecError(
                f"{where}: its {what} {', '.join(differ[:5])} differ from the job's; use an export of the job itself",
                what,
            )
    for name in wanted["tables"]:
        if not model.get("tables", {}).get(name, {}).get("exported"):
            raise SpecError(
                f"{where}: has no rows of table {name!r}, and predictions need them; "
                "use a stream that exports all tables",
                f"tables.{name}",
            )
