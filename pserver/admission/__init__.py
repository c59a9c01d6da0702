"""Which keys may have a row: lists of entries that all must agree, and the counts they keep."""

from pserver.admission.deciding import Admission

__all__ = ["Admission"]
