"""An export as a commit in a scratch folder: what shards restore and a model loads. Imports no torch.

Importing is trainer.importing's work. Here it is made sure that the export is whole and of the very slots of the job:
a warm start may take what fits, a prediction may not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset.schema import Schema
from millrace import documents
from millrace.errors import SpecError
from trainer.config import TrainerJob
from trainer.exports.config import ExportSection
from trainer.exports.describe import describe
from trainer.exports.model import MODEL
from trainer.exports.reading import Export, open_export
from trainer.importing.choice import Choice, Tensors
from trainer.importing.commit import make
from trainer.importing.exported import Exported


def as_commit(address: str, job: TrainerJob, raw: Mapping[str, Any], scratch: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a commit below `scratch`, which is new, and what it is of.

    Raises ExportUnusable, ParentMissing, BadInput, SpecError.
    """
    export = open_export(address, scratch / "fetched")
    schema = Schema.of(job.slots)
    check_fits(export, job, schema)
    source = Exported(export)
    tensors = Tensors(tuple(source.dense()), {}, ())  # whether the model has these, and no others, its loading says
    choice = Choice.of(schema, job.tables, (), None)
    (scratch / "store").mkdir(parents=True)
    done = make(scratch / "store", job, raw, source, choice, tensors)
    facts = {name: export.manifest[name] for name in ("job", "timeline", "version", "kind", "name")}
    return done.commit, {"export": export.place.address, **facts}


def check_fits(export: Export, job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError where the export was made for other slots, tables or tasks than the job's."""
    model = documents.parse_object(export.file(MODEL).read_bytes(), f"{export.place.address}: {MODEL}")
    wanted = describe(schema, job.tables, job.tasks, ExportSection())
    where = export.place.address
    for what in ("slots", "tasks"):
        theirs, ours = ({each["name"]: each for each in described.get(what, ())} for described in (model, wanted))
        if differ := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
            raise SpecError(
                f"{where}: its {what} {', '.join(differ[:5])} are not as in the job; give the job's own", what
            )
    for name in wanted["tables"]:
        if not model.get("tables", {}).get(name, {}).get("exported"):
            raise SpecError(
                f"{where}: has no rows of table {name!r}, and without them nothing can be predicted; "
                "use a stream that exports all tables",
                f"tables.{name}",
            )
