"""A column that a slot names and a Parquet file lacks is told at the first file, with the nearest name."""

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import ColumnsPipe, EventTime, Opening, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline

SLOTS = ("user", "itm", "geo.citty", "geo.city", "tags.name", "none.there", "empty")


def told_of(folder, caplog, *files, **keys):
    section = FilesSource(
        kind="files", paths=("*.parquet",), format="parquet", event_time=EventTime(kind="none"), **keys
    )
    slots = [SparseSlot.model_validate({"name": f"s{n}", "from": path}) for n, path in enumerate(SLOTS)]
    source = open_source(section, Opening(folder=folder, job="job", seed=1, deadline=Deadline.after(20)))
    reader = SegmentReader(source, ColumnsPipe(kind="columns"), Schema.of(slots), section, None, folder)
    for number, file in enumerate(files, 1):
        list(reader.read(number, [Segment(file, 0, 0, 2)], PassTally()))
    reader.close()
    return [record.getMessage() for record in caplog.records if "has no column" in record.getMessage()]


def test_each_missing_column_is_told_once_with_the_nearest_name(tmp_path, caplog):
    rows = [
        {"user": 1, "item": 2, "geo": {"city": 3}, "tags": [{"name": 4}], "none": None, "empty": None},
        {"user": 1, "item": 2, "geo": None, "tags": [], "none": None, "empty": 5},
    ]
    for name in ("a", "b"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    told = told_of(tmp_path, caplog, "a.parquet", "b.parquet")
    assert [each.split(". Slots")[0] for each in told] == [
        "a.parquet has no column 'itm'; did you mean 'item'?",
        "a.parquet has no column 'geo.citty'; did you mean 'city'?",
    ]


def test_a_column_that_is_not_read_is_missing(tmp_path, caplog):
    pq.write_table(pa.table({"user": [1, 2], "itm": [3, 4], "empty": [5, 6]}), tmp_path / "a.parquet")
    told = told_of(tmp_path, caplog, "a.parquet", columns=("user", "empty"))
    assert any(each.startswith("a.parquet has no column 'itm'") for each in told)
