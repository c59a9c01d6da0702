"""Checks between the sections of a spec. Pure. Each error names the key, what is wrong, and what is allowed.

The first error is raised as SpecError. Checks within one section belong to that section.
"""

from collections.abc import Collection
from pathlib import Path

from headrace.dataset.features.slot_rules import check_pipe_slots
from headrace.dataset.spec.config import ColumnsPipe, EventTime, MetaSlot, SlotKind, SparseSlot
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.spec.source_set import check_event_time, check_sources
from headrace.errors import SpecError
from headrace.pserver.config import DENSE_SLICES, TableSection
from headrace.relative_names import MAX_PATH_BYTES
from headrace.trainer.config import TrainerJob
from headrace.trainer.exports.destination import ExportLocation, address_of, destination_of
from headrace.trainer.guard_config import RollbackSection
from headrace.trainer.models.contract import Shape
from headrace.trainer.models.registry import check_section
from headrace.trainer.retrieval_config import check_retrieval
from headrace.trainer.spec.class_rules import check_class_rules
from headrace.trainer.spec.history_tables import check_histories
from headrace.trainer.spec.join_tables import check_join
from headrace.trainer.spec.section_rules import check_dense_rules, check_order, check_slot_rules
from headrace.validation import nearest, no_such

MAX_STORE_BYTES = MAX_PATH_BYTES - 511
"""Longest path of a store: a file system takes MAX_PATH_BYTES, and files of a store have longer ones."""

NUMBER = ("float", "uint64", "int64")


def check_references(job: TrainerJob) -> None:
    """Raise SpecError at the first reference to something that does not exist or does not fit."""
    schema = Schema.of(job.slots)
    if not schema.sparse and not schema.dense:
        raise SpecError("all slots are meta: the model would have no input", "slots")
    _check_tasks(job, schema)
    _check_sample_and_metrics(job, schema)
    _check_tables(job, schema)
    check_histories(job, schema)
    check_join(job, schema)
    check_order(job, schema)
    check_pipe_slots(job.pipe, job.slots)
    check_sources(job.sources)
    _check_event_time(job, schema)
    _check_exports(job)
    _check_guards(job, schema)
    check_dense_rules(job)
    _check_mode(job)
    check_section(job.model, Shape.of(schema, job.tables, [task.name for task in job.tasks]))
    check_class_rules(job)
    check_retrieval(job.retrieval, job.model.name, job.model.settings)
    if job.train.amp == "float16" and job.train.device == "cpu":
        raise SpecError('amp = "float16" needs a GPU; use "bfloat16" or "off" on a CPU', "train.amp")


def _number_slot(schema: Schema, name: str, path: str) -> None:
    """Raise SpecError unless `name` is a meta slot that holds a number."""
    slot = _slot(schema, name, path, (SlotKind.META,))
    assert isinstance(slot.entry, MetaSlot)
    if slot.entry.type not in NUMBER:
        raise SpecError(f"slot {name!r} has type = {slot.entry.type!r}; a number is needed", path)


def _slot(schema: Schema, name: str, path: str, kinds: Collection[SlotKind]) -> Slot:
    """The slot `name`. Raises SpecError unless it is of one of `kinds`."""
    fitting = [slot.name for slot in schema.slots if slot.kind in kinds]
    wanted = " or ".join(kind.value for kind in kinds)
    slot = schema.by_name.get(name)
    if slot is None:
        raise SpecError(f"there is no slot {name!r}; a {wanted} slot is needed; {nearest(name, fitting)}", path)
    if slot.kind not in kinds:
        raise SpecError(f"slot {name!r} is {slot.kind.value}; a {wanted} slot is needed", path)
    return slot


def _check_tasks(job: TrainerJob, schema: Schema) -> None:
    names: set[str] = set()
    for number, task in enumerate(job.tasks):
        if task.name in names:
            raise SpecError(f"task {task.name!r} is declared twice", f"tasks.{number}.name")
        names.add(task.name)
        _number_slot(schema, task.label, f"tasks.{number}.label")
        if task.mask is not None:
            _number_slot(schema, task.mask, f"tasks.{number}.mask")


def _check_sample_and_metrics(job: TrainerJob, schema: Schema) -> None:
    groups = (SlotKind.META, SlotKind.SPARSE)
    if job.sample.group is not None:
        _slot(schema, job.sample.group, "sample.group", groups)
    if job.sample.weight is not None:
        _number_slot(schema, job.sample.weight, "sample.weight")
    if job.metrics.gauc_by is not None:
        _slot(schema, job.metrics.gauc_by, "metrics.gauc_by", groups)
    for number, name in enumerate(job.metrics.slices):
        _slot(schema, name, f"metrics.slices.{number}", groups)


def _check_tables(job: TrainerJob, schema: Schema) -> None:
    for number, entry in enumerate(job.slots):
        if isinstance(entry, SparseSlot) and entry.table not in job.tables:
            raise SpecError(no_such("table", entry.table, job.tables), f"slots.{number}.table")
    used = {slot.sparse.table for slot in schema.sparse}
    for name, table in job.tables.items():
        path = f"tables.{name}"
        if name == DENSE_SLICES and job.dense.kind.on_shards:
            raise SpecError(
                'dense.strategy = "shards" keeps dense parameters in a table of this name; rename this one', path
            )
        if name not in used and "tables" in job.model_fields_set:
            raise SpecError("no slot uses this table; remove it, or name it in a slot", path)
        if table.dim == 0 and not table.first_order:
            raise SpecError("dim = 0 and first_order = false leave a row without a weight", path)
        _check_first_order(table, f"{path}.first_order_optimizer")
        for key, slot in (("show", table.show), ("click", table.click)):
            if slot is not None:
                _number_slot(schema, slot, f"{path}.{key}")
    check_slot_rules(job.tables, schema)


def _check_first_order(table: TableSection, path: str) -> None:
    ours, other = table.optimizer, table.first_order_optimizer
    if other is None:
        return
    if not table.first_order:
        raise SpecError("first_order = false leaves rows without a first-order weight; remove this section", path)
    if other.kind != ours.kind:
        raise SpecError(f"is {other.kind!r}; the table's optimizer is {ours.kind!r}", f"{path}.kind")
    for key in sorted({*ours.shared} & other.model_fields_set):
        given, used = getattr(other, key), getattr(ours, key)
        if given != used:
            raise SpecError(
                f"is {given!r}, but the table's optimizer has {used!r}, which holds for both; remove this key, or set "
                f"that of the optimizer",
                f"{path}.{key}",
            )


def _check_mode(job: TrainerJob) -> None:
    policy = job.train.policy
    policy.check_optimizers(job.dense.optimizer.of_rows(), job.tables)
    if policy.copies_rows and job.metrics.infer_first:
        raise SpecError(
            f'does not work with train.mode = "{job.train.mode}": it predicts with rows of the shards',
            "metrics.infer_first",
        )


def _check_exports(job: TrainerJob) -> None:
    if job.exports and not job.train.learn:
        raise SpecError(
            "with train.learn = false the model never changes, so all exports would be equal; leave exports out "
            "(--set exports={})",
            "exports",
        )
    timed = next(iter(job.sources.values())).event_time.kind != "none"
    clearing: str | None = None
    for name, stream in job.exports.items():
        path = f"exports.{name}"
        for number, table in enumerate(stream.tables):
            if table not in job.tables:
                raise SpecError(no_such("table", table, job.tables), f"{path}.tables.{number}")
        if stream.clock == "event" and not timed:
            raise SpecError('the source has no event_time; use "wall"', f"{path}.clock")
        if stream.delta_threshold > 0:
            if clearing is not None:
                raise SpecError(
                    f"stream {clearing!r} has one above 0 already, and its exports reset the count; only one may",
                    f"{path}.delta_threshold",
                )
            clearing = name
        measured = job.retrieval is not None and job.retrieval.measure
        if (stream.gates.min_recall is not None or stream.gates.beats_popular) and not measured:
            raise SpecError("recall is measured in jobs with [retrieval] and measure above 0", f"{path}.gates")
        if stream.rollback is not None:
            _check_rollback(job, stream.rollback, f"{path}.rollback")


def _check_rollback(job: TrainerJob, rollback: RollbackSection, path: str) -> None:
    """The watched metric exists."""
    tasks = {task.name: task for task in job.tasks}
    if rollback.task is not None and rollback.task not in tasks:
        raise SpecError(no_such("task", rollback.task, tasks), f"{path}.task")
    task = tasks[rollback.task] if rollback.task is not None else job.tasks[0]
    if task.loss != "bce":
        raise SpecError(f'is of probabilities, and task {task.name!r} has loss = "{task.loss}"', f"{path}.metric")
    if rollback.metric == "gauc" and job.metrics.gauc_by is None:
        raise SpecError("needs metrics.gauc_by", f"{path}.metric")


def _check_guards(job: TrainerJob, schema: Schema) -> None:
    """Guards are of sparse slots."""
    for name in () if job.guards is None else job.guards.slots:
        _slot(schema, name, f"guards.slots.{name}", (SlotKind.SPARSE,))


def check_places(job: TrainerJob, store: Path, folder: Path) -> None:
    """Raise SpecError for an impossible place of the store, mirror or exports, or one that two streams share.

    Relative paths start at `folder`.
    """
    known: dict[ExportLocation, str] = {}
    _check_lengths(job, store, folder)
    for name, stream in job.exports.items():
        try:
            place = destination_of(address_of(stream, name, store, folder))
        except (ValueError, RuntimeError) as error:  # the latter of "~nobody"
            raise SpecError(str(error), f"exports.{name}.path") from None
        other = known.setdefault(place, name)
        if other != name:
            ours, theirs = (other, name) if stream.path is None else (name, other)
            raise SpecError(
                f"leads to {place}, as stream {theirs!r} does: each needs its own destination, for its current.json",
                f"exports.{ours}.path",
            )


def _check_lengths(job: TrainerJob, store: Path, folder: Path) -> None:
    """Raise SpecError for a path that a file system would refuse once the job runs."""
    if (size := len(str(store).encode())) > MAX_STORE_BYTES:
        raise SpecError(f"leads to a path of {size} bytes; a store has at most {MAX_STORE_BYTES}", "store.path")
    if job.store.mirror is not None:
        try:
            destination_of(job.store.mirror if "://" in job.store.mirror else str(folder / job.store.mirror))
        except (ValueError, RuntimeError) as error:
            raise SpecError(str(error), "store.mirror") from None


def _check_event_time(job: TrainerJob, schema: Schema) -> None:
    for name, source in job.sources.items():
        time: EventTime = source.event_time
        path = f"sources.{name}.event_time"
        if time.slot is not None:
            _number_slot(schema, time.slot, f"{path}.slot")
        check_event_time(time, job.pipe.traced, schema, path)
        if time.field is not None and isinstance(job.pipe, ColumnsPipe) and job.pipe.format != "json":
            text = (
                f'is a field of JSON, and pipe.format = "{job.pipe.format}"; name a meta slot of the time: slot = "..."'
            )
            raise SpecError(text, f"{path}.field")
        if time.kind == "record" and source.no_record_times:
            raise SpecError(f'{source.no_record_times}; name a field or a slot, or kind = "none"', path)
