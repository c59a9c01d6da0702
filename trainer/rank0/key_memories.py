"""All that a job remembers of one key, for people: its histories, and its counts in each window."""

from typing import Any

import numpy as np

from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.schema import Schema, Slot
from headrace.deadline import Deadline
from headrace.pserver.protocol.histories import counters_table_of, table_of
from headrace.pserver.protocol.shards import F32, Shards
from headrace.pserver.rows import counter_kernels, history_kernels
from headrace.pserver.server.commands import Explain

ALL_TIME = "all"
UNITS_S = (("d", 86_400), ("h", 3_600), ("m", 60))


def memories_of_key(shards: Shards, schema: Schema, slot: Slot, key: int, deadline: Deadline) -> dict[str, Any]:
    """By slot that the job fills by the sparse `slot` alone: the signs of a history, oldest first, or for each window
    and half-life of counters the shows and clicks up to the newest sample. Slots that remember nothing of the key are
    left out."""
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
                found[each.name] = {"counters": counts_of_row(row_UD, each.counters)}
    return found


def _row(shards: Shards, table: str, slot: Slot, key: int, deadline: Deadline) -> F32 | None:
    """(1, D) the row of a key; None if it has none."""
    known = shards.call(Explain(table, key, slot.group), deadline)
    return np.array([known["words"]], "<u4").view(np.float32) if known["row"] else None


def counts_of_row(row_UD: F32, counters: CountersSection) -> dict[str, list[float]]:
    """Shows and clicks of one row, (1, D), by window or half-life."""
    words_C, place, found = counter_kernels.unpacked(row_UD)[0], 0, dict[str, list[float]]()
    for window_s in counters.windows_s:
        end = place + counter_kernels.words_of(window_s)
        counts = words_C[place + bool(window_s) : end]
        shows, clicks = int(counts[0::2].sum()), int(counts[1::2].sum())
        if window_s < 0:
            found[f"half-life {_length(-window_s)}"] = [shows / counter_kernels.UNIT, clicks / counter_kernels.UNIT]
        else:
            found[_length(window_s) if window_s else ALL_TIME] = [shows, clicks]
        place = end
    return found


def _length(minutes_s: int) -> str:
    """Whole minutes as a job file has them: "1h"."""
    unit, unit_s = next(each for each in UNITS_S if minutes_s % each[1] == 0)
    return f"{minutes_s // unit_s}{unit}"
