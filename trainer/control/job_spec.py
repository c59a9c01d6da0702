"""Job specs: the trainer's checks and defaults, and what changes from one spec to the next.

The sections are trainer.config's. Addresses, exports and predictions have modules of their own beside this one.
"""

from headrace.trainer.models.class_check import check_class
from headrace.trainer.models.needs import shape_of
from headrace.trainer.models.registry import ALL_MODELS, check_section
from headrace.trainer.rank0.shrink_guard import has_rule
from headrace.trainer.spec.changes import (
    SHARDS,
    TRAINERS,
    changed_keys,
    check_set,
    flat_values,
    hot_keys,
    significant_keys,
    with_overrides,
)
from headrace.trainer.spec.class_rules import check_class_rules, has_divided_classes
from headrace.trainer.spec.defaults import FIRST, fill_defaults
from headrace.trainer.spec.dense_rules import check_dense_rules
from headrace.trainer.spec.history_tables import check_histories, history_tables, remembered_of
from headrace.trainer.spec.join_tables import check_join, join_tables, windows_of
from headrace.trainer.spec.order_rules import check_order
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.spec.slot_rules import check_slot_rules
from headrace.trainer.status.step_clock import STALL_SHARE

__all__ = [
    "ALL_MODELS",
    "FIRST",
    "SHARDS",
    "STALL_SHARE",
    "TRAINERS",
    "changed_keys",
    "check_class",
    "check_class_rules",
    "check_dense_rules",
    "check_histories",
    "check_join",
    "check_order",
    "check_section",
    "check_set",
    "check_slot_rules",
    "fill_defaults",
    "flat_values",
    "has_divided_classes",
    "has_rule",
    "history_tables",
    "hot_keys",
    "join_tables",
    "remembered_of",
    "shape_of",
    "significant_keys",
    "tables_on_shards",
    "windows_of",
    "with_overrides",
]
