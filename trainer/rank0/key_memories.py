"""All that a job remembers of one key, for people: its histories, and its counts in each window."""

from typing import Any

import numpy as np

from dataset.spec.schema import Schema, Slot
from millrace.deadline import Deadline
from pserver.protocol.histories import counters_table_of, table_of
from pserver.protocol.shards import Shards
from pserver.rows import counter_kernels, history_kernels

ALL_TIME = "all"


def memories_of_key(shards: Shards, schema: Schema, slot: Slot, key: int, deadline: Deadline) -> dict[str, Any]:
    """By slot that the job fills by the sparse `slot` alone: the signs of a history, oldest first, or for each window
    of counters the shows and clicks up to the newest sample. Without those that remember nothing of the key."""
    found: dict[str, Any] = {}
    for each in schema.histories:
        if each.history.key == slot.name:
            row_UD = _row(shards, table_of(each.name), slot, key, deadline)
            if row_UD is not None:
                count_U, sign_UL = history_kernels.unpacked(row_UD)
                found[each.name] = {"history": sign_UL[0, : count_U[0]].tolist()}
    for each in schema.counters:
        if each.counters.keys == (slot.name,):
            row_UD = _row(shards, counters_table_of(each.name), slot, key, deadline)
            if row_UD is not None:
                found[each.name] = {"counters": _counts(row_UD, each)}
    return found


def _row(shards: Shards, table: str, slot: Slot, key: int, deadline: Deadline) -> Any:
    """(1, D) the row of a key; None if it has none."""
    known = shards.explain(table, key, slot.group, deadline)
    return np.array([known["words"]], "<u4").view(np.float32) if known["row"] else None


def _counts(row_UD: Any, slot: Slot) -> dict[str, list[int]]:
    words_C, place, found = counter_kernels.unpacked(row_UD)[0], 0, {}
    for window, window_s in zip(slot.counters.windows, slot.counters.windows_s, strict=True):
        end = place + counter_kernels.words_of(window_s)
        counts = words_C[place + bool(window_s) : end]
        found[ALL_TIME if window == ALL_TIME else f"{window_s}s"] = [int(counts[0::2].sum()), int(counts[1::2].sum())]
        place = end
    return found
