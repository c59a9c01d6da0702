"""Warns of fields that slots read and no row of a Parquet source can have, at the first file of the source.

A row as JSON text has all columns of its file, so the first one tells.
"""

import logging
from collections.abc import Sequence
from typing import Any

from headrace import documents
from headrace.dataset.features.slot_rules import fields_of
from headrace.dataset.pipe.segment_work import PipeInput
from headrace.dataset.spec.config import AnyPipe, ColumnsPipe, SourceSection
from headrace.dataset.spec.event_format import EventField
from headrace.dataset.spec.feature_keys import FIELD_SEPARATOR
from headrace.dataset.spec.schema import Schema
from headrace.validation import nearest

log = logging.getLogger(__name__)


class MissingColumns:
    """Looks at the first rows of each source, once."""

    def __init__(self, pipe: AnyPipe, schema: Schema) -> None:
        """Raises SpecError if two slots disagree on a field."""
        self._fields = fields_of(pipe, schema) if isinstance(pipe, ColumnsPipe) else ()
        self._seen: set[str] = set()

    def look(self, source: str, section: SourceSection, work: PipeInput) -> None:
        """Warn if these are the first rows of a Parquet source, and they lack a column."""
        if source in self._seen or not section.first_has_all_fields:
            return
        row = next((block.value(0) for block in work.blocks if len(block)), None)
        if row is None:
            return
        self._seen.add(source)
        for words in missing_words(row, self._fields):
            file = work.segment.partition
            log.warning("%s has no column %s. Slots that read it get no value from this file", file, words)


def missing_words(row: bytes, fields: Sequence[EventField]) -> list[str]:
    """A text for each field that a row has no place for: its path, and a hint."""
    try:
        event = documents.parse_object(row, "a row")
    except documents.InvalidDocument:
        return []
    found = (_missing(event, field.names) for field in fields)
    return list(dict.fromkeys(each for each in found if each is not None))


def _missing(value: Any, names: Sequence[str], path: str = "") -> str | None:
    """The first name that is in no object here, with a hint; None if there is none, or where nobody can say."""
    while isinstance(value, list):
        if not value:
            return None
        value = value[0]
    if not names or value is None:
        return None
    known = list(value) if isinstance(value, dict) else []
    at = f"{path}{FIELD_SEPARATOR}{names[0]}" if path else names[0]
    if names[0] not in known:
        return f"{at!r}; {nearest(names[0], known)}"
    return _missing(value[names[0]], names[1:], at)
