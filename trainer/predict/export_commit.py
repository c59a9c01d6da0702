"""Converts an export to a commit in a scratch folder, which shards and the model can load. Imports no torch.

trainer.importing does the import. This module checks that the export is whole and has exactly the slots of the job: a
warm start may import a part, a prediction may not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.reader import Export, chain_of, open_export
from headrace.trainer.exports.slot_files import replay, slot_files_of
from headrace.trainer.importing.export_source import ExportSource
from headrace.trainer.importing.first_commit import RememberedRows, make_first_commit
from headrace.trainer.importing.selection import ImportSelection, TensorSelection
from headrace.trainer.spec.history_tables import history_tables


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


def remembered_rows(export: Export, schema: Schema) -> dict[str, RememberedRows]:
    """The histories and counters after an export, by table. Raises SpecError where its chain does not have them."""
    chain, sections, found = chain_of(export), history_tables(schema), {}
    for files in slot_files_of(schema):
        for each in chain:
            if not files.is_in(each):
                raise SpecError(
                    f"{each.place.address}: has no {files.kind} of slot {files.slot!r}, and predictions need them; "
                    "use a base of a stream that exports all tables, or a commit",
                    "version",
                )
        found[files.table] = RememberedRows(sections[files.table], files.group, replay(chain, files))
    return found


def check_fits(export: Export, job: TrainerJob, schema: Schema) -> None:
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
