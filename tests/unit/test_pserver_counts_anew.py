"""An admission threshold beyond the range of its counters restarts the counts, with a warning."""

import logging

import pytest

from headrace.pserver.config import TableSection
from headrace.pserver.protocol.table_operations import SetTables
from headrace.pserver.tables.table import ShardTable


def section(n):
    return TableSection(dim=2, admission=[{"kind": "count", "n": n}])


@pytest.mark.parametrize(("n", "anew"), [(4, False), (3000, True)])
def test_counts_that_begin_anew_are_told_of(caplog, n, anew):
    table = ShardTable("t", section(3), seed=1)
    with caplog.at_level(logging.WARNING):
        table.operate(SetTables(tables={"t": section(n).model_dump(mode="json")}), 1)
    assert ("counts differently now and starts anew" in caplog.text) == anew
