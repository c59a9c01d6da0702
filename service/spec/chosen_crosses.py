"""A job with the crosses that it chose, and whether a new job chooses any. Pure; service.cluster.tuning lets it choose.

The pairs are ids of one slot, whose rows have a first-order weight and no vector. So they are one more term of each
logit, and no other part of the model sees them.
"""

from collections.abc import Mapping
from typing import Any

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.service.spec.job import LoadedJob, with_raw
from headrace.service.spec.tuned_settings import says_how_rows_learn, with_keys
from headrace.trainer.cross_config import CROSSES, CrossChoice
from headrace.trainer.spec.defaults import may_follow_events, rows_learn

OF_SET = 5
"""The first set of defaults in which a new job chooses crosses."""
RATE = 1.5
"""The rate of their weights by that of the slots': an id of a pair is seen less often."""
MODELS = frozenset("lr fm deepfm wide_deep deep_crossing dcn dcn_v2 dlrm finalmlp mmoe din sasrec".split())
"""Models whose logits are sums with first-order weights, whatever slots there are."""


def chooses(job: LoadedJob) -> bool:
    """Whether a new job chooses crosses, as far as its file says."""
    spec, schema = job.spec, Schema.of(job.spec.slots)
    says_more = any(says_how_rows_learn(job, name) for name in spec.tables)
    choose = spec.crosses.choose or ("auto" if job.full["defaults"] >= OF_SET and not says_more else "off")
    has_own = any(slot.entry.cross for slot in schema.sparse) or bool(schema.crossed)
    taken = CROSSES in schema.by_name or CROSSES in spec.tables
    learns = spec.model.name in MODELS and spec.tasks[0].loss == "bce" and spec.join is None
    whole = all(may_follow_events(spec, each) for each in spec.tables.values())
    whole = whole and not any(each.tables for each in spec.exports.values())
    return choose == "auto" and learns and whole and not has_own and not taken and len(schema.emitted.sparse) > 1


def under_crosses(job: LoadedJob, chosen: Mapping[str, Any] | None) -> LoadedJob:
    """The job with a choice (CrossChoice as JSON), as far as its file has the slots of a pair. Raises SpecError."""
    if chosen is None:
        return job
    whole = with_keys(job.whole(), {f"{CROSSES}.chosen": chosen})
    schema = Schema.of(job.spec.slots)
    known = {slot.name for slot in schema.emitted.sparse}
    pairs = [list(each.of) for each in validate(CrossChoice, chosen).pairs if known.issuperset(each.of)]
    if pairs and job.spec.crosses.choose != "off" and CROSSES not in schema.by_name:
        whole["slots"] = [*whole["slots"], {"name": CROSSES, "table": CROSSES, "pairs": pairs}]
        tables = whole.get("tables") or {"default": {}}
        whole["tables"] = {**tables, CROSSES: {**_table(job, schema), **tables.get(CROSSES, {})}}
    return with_raw(job, whole)


def _table(job: LoadedJob, schema: Schema) -> dict[str, Any]:
    """The table of the pairs: first-order weights alone."""
    learn = rows_learn(len(schema.sparse))
    weights = learn["first_order_optimizer"] | {"lr": round(RATE * learn["first_order_optimizer"]["lr"], 4)}
    rates = {key: weights for key in ("optimizer", "first_order_optimizer")}
    return {
        "dim": 0,
        **rates,
        "grad_scale": learn["grad_scale"],
        "in_batch": may_follow_events(job.spec, TableSection()),
    }
