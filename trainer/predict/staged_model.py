"""The model of a commit as rank 0 prepares it for an export, from a subprocess with torch: model.json and the graph.

python -m headrace.trainer.predict.staged_model < {"job": ..., "folder": ..., "commit": ..., "stage": ...}
-> {} or {"error": ...}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.exports.export_messages import ExportRequest
from headrace.trainer.models.torch_subprocess import answer_of, reply


def request_of_commit(job: Mapping[str, Any], folder: Path, commit: Path, scratch: Path) -> ExportRequest:
    """The request for an export of a commit in `scratch`, once the model is staged there. `folder`: the job file's.

    Raises SpecError where the model cannot be built or traced.
    """
    from headrace.config import validate
    from headrace.dataset.spec.schema import Schema
    from headrace.trainer.checkpoint.commits import read_commit
    from headrace.trainer.exports.slot_files import slot_files_of
    from headrace.trainer.retrieval_config import catalogue_files
    from headrace.trainer.spec.history_tables import history_tables

    stage, spec, found = scratch / "stage", validate(TrainerJob, job, only_known=True), read_commit(commit)
    stage.mkdir(parents=True)
    question = {"job": job, "folder": str(folder), "commit": str(commit), "stage": str(stage)}
    answer_of("headrace.trainer.predict.staged_model", question)
    schema, slots = Schema.of(spec.slots), dict[str, dict[int, str]]()
    for slot in schema.sparse:
        slots.setdefault(slot.sparse.table, {}).setdefault(slot.group, slot.name)
    return ExportRequest(
        job=spec.name,
        stream="retrieve",
        section=ExportSection(golden=0),
        kind="base",
        timeline=found.timeline,
        version=found.version,
        parent=None,
        commit=commit,
        address=str(scratch / "export"),
        stage=stage,
        tables=dict(spec.tables),
        slots={name: slots.get(name, {}) for name in spec.tables},
        groups={slot.name: slot.group for slot in schema.sparse},
        slot_files=slot_files_of(schema),
        slot_tables=history_tables(schema),
        folder=folder,
        catalogue=catalogue_files(spec.retrieval, folder),
    )


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from headrace.config import validate
    from headrace.dataset.spec.schema import Schema
    from headrace.trainer.exports.reader import DENSE
    from headrace.trainer.retrieval_config import describe_retrieval
    from headrace.trainer.train.exporting import ExportStager
    from headrace.trainer.train.model_building import build_model

    job = validate(TrainerJob, question["job"], only_known=True)
    schema, stage = Schema.of(job.slots), Path(question["stage"])
    model = build_model(job, schema, Path(question["folder"]), torch.device("cpu"))
    tensors = load_file(Path(question["commit"]) / DENSE)
    retrieval = describe_retrieval(job.retrieval, job.model.settings)
    stager = ExportStager(model, schema, job, stage / "template", lambda: tensors, lambda _: {}, retrieval)
    stager.stage_model(ExportSection(golden=0), stage)
    return {}


if __name__ == "__main__":
    reply(_answer)
