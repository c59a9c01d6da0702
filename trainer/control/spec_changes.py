"""A changed job file: what each key that changed means for a job that has rows, and which weights it changes."""

from headrace.trainer.importing.other_slots import WeightChange, weights_between
from headrace.trainer.spec.change_classes import ChangeClass
from headrace.trainer.spec.changes import KeyChange, key_changes, schema_of, slots_between

__all__ = ["ChangeClass", "KeyChange", "WeightChange", "key_changes", "schema_of", "slots_between", "weights_between"]
