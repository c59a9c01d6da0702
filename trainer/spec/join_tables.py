"""The table of what waits for a join on the shards, and the checks of the section. Pure.

A row holds the sample of an impression, or a click that came before it (pserver.rows.join_kernels).
"""

from collections.abc import Iterable

from headrace.dataset.spec.config import MetaSlot
from headrace.dataset.spec.join_section import JoinSection, LearnAt
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.config import Initial, TableSection
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.pserver.row_optimizers import Sgd
from headrace.trainer.config import TrainerJob
from headrace.validation import nearest

KEYS = ("uint64", "int64", "string")
NUMBERS = ("float", "uint64", "int64")


def windows_of(join: JoinSection | None) -> dict[str, float]:
    """The table of what waits, with the seconds of the window; nothing without a join."""
    return {} if join is None else {JOIN_TABLE: join.window}


def join_tables(join: JoinSection | None) -> dict[str, TableSection]:
    """The table of what waits as shards hold it: rows whose bits no step learns."""
    return {} if join is None else {JOIN_TABLE: _section(join)}


def _section(join: JoinSection) -> TableSection:
    from headrace.pserver.rows.join_kernels import join_width_of  # late: Numba loads slowly, and few jobs have a join

    return TableSection(
        dim=join_width_of(join.max_sample_bytes),
        first_order=False,
        init=Initial.ZEROS,
        optimizer=Sgd(kind="sgd"),
        decay=1.0,
    )


def check_join(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError for a join whose slots do not fit, or with something that has none."""
    join = job.join
    if join is None:
        return
    labels = [task.label for task in job.tasks]
    if join.label not in labels:
        raise SpecError(f"{join.label!r} is not the label of a task; {nearest(join.label, labels)}", "join.label")
    _meta(schema, join.label, NUMBERS, "join.label")
    _meta(schema, join.key, KEYS, "join.key")
    if any(source.event_time.kind == "none" for source in job.sources.values()):
        raise SpecError("a join needs the time of each event: set event_time of every source", "join.window")
    if join.keep_negatives < 1:
        if job.sample.weight is None:
            raise SpecError(
                "below 1 the weights of samples correct for what is left out: set sample.weight to a meta slot, "
                "which may be 1 in every event",
                "join.keep_negatives",
            )
        _meta(schema, job.sample.weight, ("float",), "sample.weight")
    if join.learn is LearnAt.AT_ONCE:
        for number, task in enumerate(job.tasks):
            if task.label == join.label and task.loss != "bce":
                raise SpecError(
                    f'is {task.loss!r}; join.learn = "at_once" corrects probabilities: use loss = "bce", or '
                    'learn = "at_window_end"',
                    f"tasks.{number}.loss",
                )
    if join.max_ahead is not None and join.max_ahead < job.passes.max_skew:
        raise SpecError(
            f"is {join.max_ahead:g} s, less than passes.max_skew = {job.passes.max_skew:g} s, by which sources may lie "
            "apart: sound events would be rejected; raise it, or lower passes.max_skew",
            "join.max_ahead",
        )
    if schema.remembered:
        raise SpecError(
            f"slot {schema.remembered[0].name!r} is filled from earlier samples, and a job with a join fills none so: "
            "which trainer learns a sample depends on its key there, and so would what is remembered. Leave one out, "
            "or let events carry these features",
            "join",
        )
    if JOIN_TABLE in job.tables:
        raise SpecError("is the table of what waits for the join; rename it", f"tables.{JOIN_TABLE}")


def _meta(schema: Schema, name: str, types: Iterable[str], path: str) -> None:
    fitting = [slot.name for slot in schema.meta if isinstance(slot.entry, MetaSlot) and slot.entry.type in types]
    if name not in fitting:
        kinds = ", ".join(f'"{kind}"' for kind in types)
        raise SpecError(f"{name!r} is not a meta slot of type {kinds}; {nearest(name, fitting)}", path)
