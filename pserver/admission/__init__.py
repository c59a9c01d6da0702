"""Admission: the entries that decide which keys may have a row, and their counts."""

from headrace.pserver.admission.entries import Admission

__all__ = ["Admission"]
