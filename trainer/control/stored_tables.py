"""Tables of a job that does not run: keys explained, shrinks counted and logged for the next run."""

from headrace.trainer.checkpoint.rewind import log_operation
from headrace.trainer.rank0.logged_specs import overrides_of
from headrace.trainer.rank0.parts import describe_key
from headrace.trainer.rank0.shrinks import SMALL_ROWS, Shrinks

__all__ = ["SMALL_ROWS", "Shrinks", "describe_key", "log_operation", "overrides_of"]
