"""Fills the slots with histories, counters and statistics of rows as they are at one version, for samples that are only
predicted.

Nothing is asked of a pass and nothing is remembered: every sample reads the rows of the version, so no sample sees
another one, and the order of samples does not matter. A counter's windows end at the sample's own time.

Shapes: B samples, K samples that have a key, N ids of a slot, U unique keys, D floats of a row, V numbers of counters.
"""

from collections.abc import Callable

import numpy as np

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.schema import Schema, Slot
from headrace.lists import offsets_of
from headrace.pserver.protocol.histories import HistoryAnswers, counters_table_of, statistics_of, table_of
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows import counter_kernels, history_kernels
from headrace.trainer.features.counter_columns import counter_column
from headrace.trainer.features.cross_reader import with_crosses
from headrace.trainer.features.history_reader import NO_TIME, answered, keyed, question_column, times_of, with_filled
from headrace.trainer.features.row_statistics import ids_of, statistic_column, summed_over

RowsOf = Callable[[str, int, U64], F32]
"""rows_of(table, group, keys_U): (U, D) rows of ascending unique keys of a slot group; zeros for a key without one. For
`statistics_of` a sparse slot they are its (U, 2) shows and clicks on the day of the version."""


def filled_as_of(samples: Samples, schema: Schema, rows_of: RowsOf) -> Samples:
    """The samples with every slot of `schema.filled`, from the rows of one version."""
    if schema.crossed:
        return with_crosses(filled_as_of(samples, schema.uncrossed, rows_of), schema)
    if not schema.remembered:
        return samples
    sparse = {slot.name: history_column(samples, slot, schema, rows_of) for slot in schema.histories}
    dense = {slot.name: counted_column(samples, slot, schema, rows_of) for slot in schema.counters}
    dense |= {slot.name: known_column(samples, slot, schema, rows_of) for slot in schema.statistics}
    return with_filled(samples, schema, sparse, dense)


def history_column(samples: Samples, slot: Slot, schema: Schema, rows_of: RowsOf) -> Ragged:
    """The histories of samples, oldest sign first; empty without a key, or without a row."""
    key = schema.by_name[slot.history.key]
    keyed_K, key_K, _ = keyed(samples, [key])
    keys_U, number_K = np.unique(key_K, return_inverse=True)
    count_U, sign_UL = history_kernels.unpacked(rows_of(table_of(slot.name), key.group, keys_U))
    known = HistoryAnswers(offsets_of(count_U), sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]])
    return answered(question_column(len(samples), keyed_K, number_K), known)


def counted_column(samples: Samples, slot: Slot, schema: Schema, rows_of: RowsOf) -> F32:
    """(B, C) values of counters, in the windows that end at each sample's time; zeros without a key."""
    keys = [schema.by_name[name] for name in slot.counters.keys]
    keyed_K, key_K, _ = keyed(samples, keys)
    keys_U, number_K = np.unique(key_K, return_inverse=True)
    word_UC = counter_kernels.unpacked(rows_of(counters_table_of(slot.name), keys[-1].group, keys_U))
    time_s_K, nothing_K = times_of(samples, keyed_K), np.zeros(len(keyed_K), np.int64)
    time_s_K[time_s_K == NO_TIME] = counter_kernels.NO_TIME
    window_s_W = np.array(slot.counters.windows_s, np.int64)
    count_KV = np.empty((len(keyed_K), 2 * len(window_s_W)), np.int64)
    places_K = np.arange(len(keyed_K))
    counter_kernels.count(number_K, places_K, time_s_K, nothing_K, nothing_K, window_s_W, word_UC, count_KV)
    question_B = question_column(len(samples), keyed_K, places_K)
    offset_K1 = np.arange(len(keyed_K) + 1) * count_KV.shape[1]
    return counter_column(question_B, HistoryAnswers(offset_K1, count_KV.reshape(-1).astype(np.uint64)), slot.counters)


def known_column(samples: Samples, slot: Slot, schema: Schema, rows_of: RowsOf) -> F32:
    """(B, C) values of a slot with statistics of rows; zeros without ids, and for ids without rows."""
    sums = []
    for name in slot.statistics.slots:
        of = schema.by_name[name]
        sample_N, key_N = ids_of(samples, of)
        keys_U, number_N = np.unique(key_N, return_inverse=True)
        value_U2 = rows_of(statistics_of(name), of.group, keys_U).astype(np.float64)
        sums.append(summed_over(sample_N, value_U2[number_N], len(samples)))
    return statistic_column(sums)
