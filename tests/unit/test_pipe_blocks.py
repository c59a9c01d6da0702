"""Blocks of events whose samples are large together are answered in parts."""

import json

import pytest
from pydantic import TypeAdapter

from headrace.dataset.features import event_rows
from headrace.dataset.pipe.columns_runner import ColumnsRunner
from headrace.dataset.pipe.segment_work import PipeInput
from headrace.dataset.spec.config import AnySlot, ColumnsPipe, EventTime
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Events, Segment

SLOTS = {
    "list": [{"name": "id", "from": "items.id"}, {"name": "x"}],
    "text": [{"name": "id", "from": "items.id"}, {"name": "t", "kind": "meta", "type": "string"}],
    "cross": [{"name": "id", "from": "items.id"}, {"name": "x"}, {"name": "c", "cross": ["id", "x"]}],
}


def run(slots, explode, folder):
    events = [
        json.dumps({"items": [{"id": 7 * n + m} for m in range(3)], "x": [n, n + 1, n + 2], "t": f"text {n}"}).encode()
        for n in range(20)
    ]
    schema = Schema.of(TypeAdapter(list[AnySlot]).validate_python(SLOTS[slots]))
    pipe = ColumnsPipe(kind="columns", explode="items" if explode else None)
    runner = ColumnsRunner(pipe, schema, EventTime(kind="none"), {}, folder)
    outcome = runner.run(PipeInput(Segment("t/0", 0, 5, 25), [Events.of(events, range(5, 25))], [], 20))
    rows = [
        (int(block.event_B[b]), *(column.values_N[slice(*column.offset_B1[b : b + 2])].tolist()
                                  for column in block.sparse.values()), *(column[b] for column in block.meta.values()))
        for block in outcome.blocks for b in range(len(block))
    ]  # fmt: skip
    return rows, len(outcome.blocks), outcome.rejections


@pytest.mark.parametrize(("slots", "explode"), [("list", True), ("text", True), ("cross", False), ("cross", True)])
def test_a_large_block_is_answered_in_parts_with_the_same_samples(tmp_path, monkeypatch, slots, explode):
    whole, one, rejections = run(slots, explode, tmp_path)
    assert one == 1 and not rejections and [row[0] for row in whole] == sorted(row[0] for row in whole)
    monkeypatch.setattr(event_rows, "MAX_BLOCK_VALUES", 40)
    monkeypatch.setattr(event_rows, "MAX_BLOCK_TEXT", 100)
    rows, parts, rejections = run(slots, explode, tmp_path)
    assert rows == whole and parts >= 4 and not rejections
