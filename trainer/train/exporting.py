"""Exports of a job, on rank 0: built from their parts, and what only rank 0 knows of an exported version.

That is the model's description, its trace and golden predictions: model.json, golden.parquet and onnx-template.onnx
in a folder, as far as possible, and why.json, which says why one of the latter two is missing. The exporter process
continues from there.

Shapes: U unique keys of a table, W weights of a row.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.dataset.features.served_events import describe_features
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.pserver.protocol.shards import F32, Keys
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.checkpoint.committer import Committer
from headrace.trainer.config import ExportSection, TrainerJob
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.destination import STAGES
from headrace.trainer.exports.export_messages import ExportRequest, ExportSettings
from headrace.trainer.exports.exporter_process import ExporterConfig, ExporterProcess
from headrace.trainer.exports.golden import as_bytes, table_of
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.model_files import GOLDEN, TEMPLATE, WHY
from headrace.trainer.exports.reader import MODEL
from headrace.trainer.exports.row_values import as_exported
from headrace.trainer.features.deduplication import Deduplicator, EmbeddingTable, tables_of
from headrace.trainer.features.default_rows import default_rows_of, widths_of, without_marks
from headrace.trainer.features.model_inputs import inputs_of
from headrace.trainer.features.pooling import KernelPooling
from headrace.trainer.models.contract import Shape
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.retrieval_config import catalogue_files, describe_retrieval
from headrace.trainer.spec.changes import schema_of
from headrace.trainer.train.commit_state import StateHolders
from headrace.trainer.train.tracing import FrozenModel, TraceFailed, trace
from headrace.trainer.train.trainer_setup import Setup
from headrace.trainer.value_types import Dtype

log = logging.getLogger(__name__)

Look = Callable[[Mapping[str, Keys]], Mapping[str, F32]]
"""Keys by table -> (U, W) their present rows, as inference sees them: zeros where there is no row, or marks
(pserver.protocol.shards.absent) where the table learns its default row."""


class ExportStager:
    """Traces the model in its constructor. Runs on the loop's thread."""

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        job: TrainerJob,
        scratch: Path,
        tensors: Callable[[], Mapping[str, Tensor]],
        look: Look,
        retrieval: Mapping[str, Any] | None = None,
    ) -> None:
        """`tensors` returns the model's state like trainer.dense.all_reduce.AllReduceDense.tensors; `scratch` takes the
        template; `retrieval` is as in `describe`."""
        tables, tasks = job.tables, job.tasks
        self._schema, self._tables, self._tasks = schema, tables, tasks
        self._tensors, self._look, self._features = tensors, look, describe_features(job.pipe, schema)
        self._retrieval = retrieval
        self._most = max((section.golden for section in job.exports.values()), default=0)
        self._kept: deque[Samples] = deque()
        self._num_kept = 0
        self._template, self._why = scratch / TEMPLATE, ""
        self._deduplicators = [Deduplicator(table) for table in tables_of(schema, tables, None)]
        self._pooling = KernelPooling(1)
        self._frozen: FrozenModel | None = None
        try:
            self._frozen = FrozenModel(model, tasks)
            template = trace(model, Shape.of(schema, tables, [task.name for task in tasks]), tasks)
        except TraceFailed as error:
            self._why = str(error)
            log.warning("exports will have no dense.onnx: %s", error)
        else:
            scratch.mkdir(parents=True, exist_ok=True)
            _put(self._template, template)

    def saw(self, samples: Samples) -> None:
        """Remember a batch of the pass, for golden samples. Called at every step, so it copies nothing."""
        self._kept.append(samples)
        self._num_kept += len(samples)
        while self._num_kept - len(self._kept[0]) >= self._most and len(self._kept) > 1:
            self._num_kept -= len(self._kept.popleft())

    def stage(self, request: ExportRequest, folder: Path) -> None:
        """Write all that is available into `folder`, for a version whose pass is closed. Raises Unwritable."""
        section = request.section
        why = {"onnx": self._why, "golden": ""}
        self.stage_model(section, folder)
        golden, why["golden"] = self._golden(section)
        if golden is not None:
            _put(folder / GOLDEN, golden)
        _put(folder / WHY, json.dumps(why).encode())

    def stage_model(self, section: ExportSection, folder: Path) -> None:
        """Write model.json and, if there is one, the template of the graph. Raises Unwritable."""
        learnt = {name: row.tolist() for name, row in self._default_rows().items()}
        described = describe(self._schema, self._tables, self._tasks, section, learnt, self._features, self._retrieval)
        _put(folder / MODEL, json.dumps(described, indent=1, ensure_ascii=False).encode())
        if not self._why:
            os.link(self._template, folder / TEMPLATE)

    def _default_rows(self) -> dict[str, F32]:
        """The learnt default rows, as they are now."""
        return default_rows_of(self._tensors(), widths_of(self._schema, self._tables))

    def _golden(self, section: ExportSection) -> tuple[bytes | None, str]:
        """The file, or why there is none."""
        if not section.golden:
            return None, "golden = 0"
        if not self._num_kept:
            return None, "the first trainer has seen no sample since the job was started"
        if self._frozen is None:
            return None, self._why
        if lacks := sorted(
            self._frozen.model.state_dict().keys() - {n.removeprefix("model.") for n in self._tensors()}
        ):
            return None, f"{lacks[0]!r} is divided over trainers"
        joined = Samples.concat(list(self._kept))
        samples = joined.slice(max(0, len(joined) - section.golden), len(joined))
        try:
            return as_bytes(table_of(samples, self._schema, self._predicted(samples, section))), ""
        except TraceFailed as error:
            return None, str(error)

    def _predicted(self, samples: Samples, section: ExportSection) -> dict[str, F32]:
        """Predictions of the present model and rows, with rows rounded as in the export."""
        assert self._frozen is not None
        self._frozen.load({name.removeprefix("model."): value for name, value in self._tensors().items()})
        lookups = [each.lookup(samples) for each in self._deduplicators]
        rows, default_rows = self._look({look.table.name: look.keys for look in lookups}), self._default_rows()
        leaves = {
            look.table.name: self._pooling.cells(
                look, _served(rows[look.table.name], look.table, section.dtype, default_rows)
            ).detach()
            for look in lookups
        }
        return self._frozen.predict(inputs_of(self._schema, samples, lookups, leaves, torch.device("cpu")))


def _served(rows_UW: F32, table: EmbeddingTable, dtype: Dtype, default_rows: Mapping[str, F32]) -> F32:
    """Rows as a reader of the export gets them. Default rows are not rounded: model.json has them as numbers."""
    if table.name not in default_rows:
        return as_exported(rows_UW, table.first_order, dtype)
    zeros_W = np.zeros(table.width, np.float32)
    present_UW, absent_U = without_marks(rows_UW, zeros_W)
    return np.where(absent_U[:, None], default_rows[table.name], as_exported(present_UW, table.first_order, dtype))


def _put(path: Path, content: bytes) -> None:
    with writing(path):
        write_whole(REAL, path, content)


LOOK_S = 60.0
"""Longest time to read the rows of the golden predictions."""


@contextmanager
def open_exporting(
    setup: Setup, rank0: RankZero, model: nn.Module, holders: StateHolders, arithmetic: Mapping[str, str]
) -> Iterator[ExportCoordinator]:
    """The decider that exports, added to the operator; its process ends with the context.

    Traces the model, once, if the job has exports.
    """
    config, job, schema = setup.config, setup.job, setup.schema

    def look(keys: Mapping[str, Keys]) -> Mapping[str, F32]:
        return setup.shards.look(keys, Deadline.after(LOOK_S))

    def stage(request: ExportRequest, folder: Path) -> None:
        assert stager is not None, "there are streams"
        stager.stage(request, folder)

    stager = None
    if job.exports:
        scratch = config.store / STAGES / "template"
        retrieval = describe_retrieval(job.retrieval, job.model.settings)
        stager = ExportStager(model, schema, job, scratch, holders.dense.tensors, look, retrieval)
        holders.observer.watch(stager.saw)
    guards = rank0.guards
    setting = ExportSettings(
        job=job.name,
        store=config.store,
        folder=config.folder,
        timeline=rank0.beginning.timeline,
        fingerprint=arithmetic,
        timed=next(iter(job.sources.values())).event_time.kind != "none",
        streams=job.exports,
        schema=schema,
        tables=lambda: rank0.operator.job.tables,
        clicks_unmatched=lambda: holders.progress.clicks.share_unmatched,
        held=lambda: () if guards is None else guards.held,
        forks=lambda: sum(bool(found) for _, found in rank0.replay_log.compared),
        stage=stage,
        trouble=rank0.trouble,
        exclusive=nullcontext if rank0.beginning.joblog is None else rank0.beginning.joblog.exclusive,
        other_slots=_has_other_slots(rank0.beginning.commit, schema),
        catalogue=catalogue_files(job.retrieval, config.folder),
    )
    configuration = ExporterConfig(store=config.store, generation=config.generation, faults=config.faults)
    exporting = ExportCoordinator(setting, ExporterProcess(configuration), rank0.operator.note)
    rank0.operator.add(exporting)
    try:
        yield exporting
    finally:
        exporting.close()


def _has_other_slots(commit: Commit | None, schema: Schema) -> bool:
    """Whether a commit was made with other inputs of the model than those of `schema`."""
    if commit is None:
        return False
    then = schema_of(commit.state["spec"])
    one, other = ([(slot.shape, slot.group) for slot in (*each.sparse, *each.dense)] for each in (then, schema))
    return one != other


def resume_exports(exporting: ExportCoordinator, rank0: RankZero, committer: Committer) -> None:
    """Resume the exports that were cut, once everything is restored; see ExportCoordinator.begin."""
    beginning = rank0.beginning
    replayed = [operation for logged in beginning.replay for operation in logged.operations]
    version = 0 if beginning.commit is None else beginning.commit.version
    exporting.begin(committer, [*replayed, *beginning.waiting], version)
