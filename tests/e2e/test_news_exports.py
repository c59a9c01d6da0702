"""The news job, its tables alive, exported by the hour of event time: its deltas replay to a base, bit for bit.

What is read of the exports is Parquet and JSON alone: no code of Headrace's.
"""

import json
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_examples import EXAMPLES, NEWS, first_lines, news_data, paths, report_of

ALIVE = (
    'tables.default.admission=[{kind="count",n=2}]',
    "tables.default.delete_below=0.15",
    "tables.default.delete_after_days=4",
    "tables.default.max_shrink_fraction=1.0",
    "tables.default.slots={user={admission=[],delete_below=0.0},article={decay=0.5}}",
)
HOURLY = (
    "passes.max_events=100",
    'exports.hourly={delta="1h",on_late="wait"}',
    "exports.whole={base='24h',on_late='wait',keep=100}",
)


def manifests(folder):
    """Of all complete exports of a stream, in order."""
    found = [json.loads((done.parent / "manifest.json").read_text()) for done in folder.glob("t1/*/_DONE")]
    return sorted(found, key=lambda told: told["version"])


def keys_of(file):
    return pq.read_table(file, columns=["key"])["key"].to_pylist()


def rows_of(folder):
    """The bytes of each row by key: sign, weight and vector, with the name of its slot."""
    found = {}
    for file in sorted(folder.glob("rows-default-*.parquet")):
        table = pq.read_table(file).combine_chunks()
        width = table.schema.field("vector").type.list_size
        columns = [
            table["sign"].to_numpy().view(np.uint8).reshape(-1, 8),
            table["weight"].to_numpy().view(np.uint8).reshape(-1, 4),
            table["vector"].combine_chunks().flatten().to_numpy().view(np.uint8).reshape(-1, 4 * width),
        ]
        values = np.concatenate(columns, axis=1)
        for key, slot, row in zip(table["key"].to_pylist(), table["slot"].to_pylist(), values, strict=True):
            assert key not in found, "a key is there once"
            found[key] = slot, row.tobytes()
    return found


def replayed(folder, chain):
    """The law's left side: the rows after each export of a chain; the same dictionary each time."""
    rows = {}
    for told in chain:
        export = folder / "t1" / told["name"]
        gone = [key for file in export.glob("tombstones-default-*.parquet") for key in keys_of(file)]
        changed = rows_of(export)
        assert not changed.keys() & set(gone), "a key is in one file"
        for key in gone:
            rows.pop(key, None)
        rows |= changed
        assert len(rows) == told["tables"]["default"]["model_rows"], told["name"]
        yield told, rows


def check_the_law(tmp_path, events, num_deltas):
    """Run it: deltas by the hour, and a base after each midnight and at the end."""
    begun_s = time.monotonic()
    store = tmp_path / "store"
    words = (paths("impressions", events), *ALIVE, *HOURLY)
    report = report_of(EXAMPLES / "news" / "job.toml", store, *words, limit_s=900)
    trained_s = time.monotonic() - begun_s
    hourly, whole = (store / "exports" / stream / "news" for stream in ("hourly", "whole"))
    chain, bases = manifests(hourly), manifests(whole)
    assert [told["kind"] for told in chain] == ["base", *["delta"] * (len(chain) - 1)] and len(chain) > num_deltas
    assert [told["parent"]["name"] for told in chain[1:]] == [told["name"] for told in chain[:-1]]
    most, compared = 0, 0
    for told, rows in replayed(hourly, chain):
        most = max(most, len(rows))
        for base in bases:
            if base["version"] == told["version"] or (told is chain[-1] and base["positions"] == told["positions"]):
                assert rows == rows_of(whole / "t1" / base["name"]), f"{told['name']} and {base['name']}"
                compared += 1
    assert compared == len(bases) == bases[-1]["day"] + 1 and len(rows) > 1000
    counts = [told["tables"]["default"] for told in chain[1:]]
    went, changed = sum(each["tombstones"] for each in counts), sum(each["rows"] for each in counts)
    assert went > 0, "some went"
    print(
        f"{report['events']:,} events: {len(counts)} deltas of {changed:,} rows and {went:,} tombstones, compared with "
        f"{compared} bases; {len(rows):,} rows in the end, {most:,} at most; run in {trained_s:.1f} s, "
        f"replayed in {time.monotonic() - begun_s - trained_s:.1f} s"
    )


@pytest.mark.long
@pytest.mark.data
@pytest.mark.timeout(300)
@news_data
def test_a_day_and_a_night_of_news_replay_to_a_base(tmp_path):
    check_the_law(tmp_path, first_lines(NEWS, 3_500, tmp_path / "part.jsonl.gz"), num_deltas=12)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(1200)
@news_data
def test_fourteen_days_of_news_replay_to_a_base(tmp_path):
    check_the_law(tmp_path, NEWS, num_deltas=200)
