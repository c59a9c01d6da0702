"""Job specs: the trainer's checks and defaults, addresses in a spec, and what changes from one spec to the next.

Predictions are trainer.control.predictions', the sections themselves trainer.config's.
"""

from trainer.blob.address import StoreAddress, StoreKind
from trainer.blob.address import parse as parse_store_address
from trainer.exports.export_settings import EXPORTS, ExportLocation, address_of, destination_of
from trainer.models.class_check import check_class
from trainer.models.needs import shape_of
from trainer.models.registry import MODELS, check_section
from trainer.rank0.shrink_guard import has_rule
from trainer.spec.changes import changed_keys, check_set, flat_values, hot_keys, significant_keys, with_overrides
from trainer.spec.defaults import FIRST, fill_defaults
from trainer.spec.slot_rules import check_slot_rules
from trainer.status.step_clock import STALL_SHARE

__all__ = [
    "EXPORTS",
    "FIRST",
    "MODELS",
    "STALL_SHARE",
    "ExportLocation",
    "StoreAddress",
    "StoreKind",
    "address_of",
    "changed_keys",
    "check_class",
    "check_section",
    "check_set",
    "check_slot_rules",
    "destination_of",
    "fill_defaults",
    "flat_values",
    "has_rule",
    "hot_keys",
    "parse_store_address",
    "shape_of",
    "significant_keys",
    "with_overrides",
]
