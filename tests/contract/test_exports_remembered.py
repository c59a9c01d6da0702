"""Histories and statistics of rows in exports of real commits: a base and its deltas replay to the base of the last
version, bit for bit."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.history_kernels import packed, width_of
from headrace.trainer.config import ExportSection
from headrace.trainer.exports import slot_files
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.exporter import export
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.reader import chain_of, open_export
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.exports.row_selection import CommitTableRows
from headrace.trainer.exports.slot_files import Histories, Statistics, replay, slot_files_of
from headrace.trainer.importing import export_source
from headrace.trainer.importing.export_source import ExportSource
from headrace.trainer.predict.export_commit import remembered_rows
from tests.fakes import commits_of_rows
from tests.fakes.commits_of_rows import GROUPS, Job, parent_of

LAST = 3
SECTION = TableSection(dim=width_of(LAST), first_order=False, optimizer=Sgd(kind="sgd"))
MEMORY = Histories(slot="clicked", table="history-clicked", key="a", group=GROUPS["a"], of="b", last=LAST)
SIGNS = st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=LAST)
STEPS = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 9), SIGNS, max_size=5), st.sets(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=3,
)
"""Of each version: the histories that change, by key, and the keys that are deleted."""


def row_of(signs):
    sign_UL = np.zeros((1, LAST), np.uint64)
    sign_UL[0, : len(signs)] = signs
    return packed(np.array([len(signs)]), sign_UL)[0]


def act(job, version, step):
    changed, gone = step
    job.set(version, {("a", sign): row_of(signs) for sign, signs in changed.items()})
    job.remove(*(("a", sign) for sign in sorted(gone) if ("a", sign) in job.rows))


def exported(job, commit, kind, address, parent, **more):
    update = {"tables": {}, "slots": {}, "groups": GROUPS, "slot_files": (MEMORY,), **more}
    update["slot_tables"] = {MEMORY.table: SECTION}
    request = job.request(commit, kind, address, parent).model_copy(update=update)
    answer = export(request, job.store / "live" / "export-test")
    assert answer.outcome == "complete", answer.error
    return request, answer.path


def state(path, scratch):
    """Bits by key, in order."""
    chunks = list(replay(chain_of(open_export(path, scratch)), MEMORY))
    keys = [key for chunk in chunks for key in chunk.key_R.tolist()]
    return dict(zip(keys, (row.tobytes() for chunk in chunks for row in chunk.vector_RD), strict=True))


@pytest.fixture(autouse=True)
def table_of_histories(monkeypatch):
    monkeypatch.setattr(commits_of_rows, "TABLE", MEMORY.table)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.dictionaries(st.integers(0, 9), SIGNS, min_size=1), steps=STEPS)
def test_deltas_replay_to_the_base(tmp_path_factory, first, steps):
    folder = tmp_path_factory.mktemp("job")
    job = Job(folder / "store", SECTION)
    try:
        act(job, 1, (first, set()))
        request, path = exported(job, job.commit(1), "base", str(folder / "out"), None)
        for version, step in enumerate(steps, 2):
            act(job, version, step)
            commit = job.commit(version)
            request, path = exported(job, commit, "delta", str(folder / "out"), parent_of(request))
            _, base = exported(job, commit, "base", str(folder / f"base-{version}"), None)
            assert list(state(path, folder).items()) == list(state(base, folder).items())
            told = open_export(path, folder).manifest["histories"]["clicked"]
            assert told["rows"] <= len(step[0]) and told["tombstones"] <= len(step[1]), "only what changed"
    finally:
        job.close()


def test_some_tables_and_a_parent_without_histories_say_that_they_have_none(tmp_path):
    job, address = Job(tmp_path / "store", SECTION), str(tmp_path / "out")
    act(job, 1, ({1: [5]}, set()))
    base, _ = exported(job, job.commit(1), "base", address, None, whole=False)
    act(job, 2, ({1: [5, 6]}, set()))
    _, path = exported(job, job.commit(2), "delta", address, parent_of(base))
    delta = open_export(path, tmp_path)
    assert delta.manifest["without_histories"] == ["clicked"] and not MEMORY.is_in(delta)
    assert not [name for name in delta.files if "histor" in name]
    job.close()


def test_a_file_is_what_people_read(tmp_path):
    job = Job(tmp_path / "store", SECTION)
    act(job, 1, ({7: [3, 1 << 63]}, set()))
    _, path = exported(job, job.commit(1), "base", str(tmp_path / "out"), None)
    (row,) = pq.read_table(open_export(path, tmp_path).file("histories-clicked-0.parquet")).to_pylist()
    assert (row["slot"], row["sign"], row["history"]) == ("a", 7, [3, 1 << 63])
    job.close()


# --- statistics of rows ----------------------------------------------------------------------------------------------

AGEING = TableSection(dim=1, first_order=False, optimizer=Sgd(kind="sgd"), decay=0.83, slots={"a": {"decay": 0.97}})
KNOWN = Statistics(slot="a", table="statistics-a", key="a", group=GROUPS["a"], of_table="default")
COUNT = st.floats(0, 1e6, width=32)
AGED = st.lists(
    st.tuples(
        st.integers(0, 3),  # days before it
        st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), st.tuples(COUNT, COUNT), max_size=5),
        st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=3),
    ),
    min_size=1,
    max_size=4,
)
"""Of each version: the rows that change, with show and click, and those that are deleted."""


def of_rows(job, commit, kind, address, parent=None, **more):
    request = job.request(commit, kind, address, parent)
    groups = {"groups": GROUPS, "slot_files": (KNOWN,), **more}
    request = request.model_copy(update=groups)
    answer = export(request, job.store / "live" / "export-test")
    assert answer.outcome == "complete", answer.error
    return request, answer.path


def aged(job, version, step):
    days, changed, gone = step
    job.life.tick(job.life.day + days)
    for row, (show, click) in changed.items():
        job.set(version, {row: [0.5]}, show=show, click=click)
    job.remove(*(row for row in sorted(gone) if row in job.rows))
    return job.commit(version)


def known(path, scratch):
    """Bits of show and click on the export's day, by key, in order."""
    newest = open_export(path, scratch)
    version, found = KNOWN.of_export(newest).version, {}
    for chunk in replay(chain_of(newest), KNOWN):
        values = (row.tobytes() for row in version.present(chunk.vector_RD))
        found.update(zip(chunk.key_R.tolist(), values, strict=True))
    return list(found.items())


@pytest.fixture
def table_of_rows(monkeypatch):
    monkeypatch.setattr(commits_of_rows, "TABLE", "default")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=AGED)
def test_statistics_fade_over_deltas_as_in_the_rows(tmp_path_factory, table_of_rows, steps):
    folder = tmp_path_factory.mktemp("job")
    job, request = Job(folder / "store", AGEING), None
    try:
        for version, step in enumerate(steps, 1):
            commit = aged(job, version, step)
            kind = "delta" if request else "base"
            request, path = of_rows(job, commit, kind, str(folder / "out"), parent_of(request) if request else None)
            _, base = of_rows(job, commit, "base", str(folder / f"base-{version}"))
            found = known(path, folder)
            assert found == known(base, folder)
            with CommitTableRows(commit, "default", AGEING, GROUPS, folder / "rows") as rows:
                wanted = rows.statistics_of(np.array([key for key, _ in found], np.uint64))
            assert [bits for _, bits in found] == [row.tobytes() for row in wanted]
            assert sorted(commits_of_rows.key_of(row) for row in job.rows if row[0] == "a") == sorted(dict(found))
            told = open_export(path, folder).manifest["statistics"]["a"]
            assert told["day"] == job.life.day and told["table"] == "default"
            assert kind == "base" or told["rows"] <= len(step[1]), "only what changed"
    finally:
        job.close()


def test_a_base_of_an_older_headrace_is_read_and_no_delta_builds_on_its_statistics(tmp_path, table_of_rows):
    job, address = Job(tmp_path / "store", AGEING), str(tmp_path / "out")
    request, path = of_rows(job, aged(job, 1, (2, {("a", 1): (8.0, 2.0)}, set())), "base", address)
    file = Path(path) / "manifest.json"
    told = json.loads(file.read_text())
    for name in ("day", "decay"):
        del told["statistics"]["a"][name]
    file.write_text(json.dumps(told))
    assert np.frombuffer(known(path, tmp_path)[0][1], np.float32).tolist() == [8.0, 2.0]
    _, path = of_rows(job, aged(job, 2, (1, {("a", 1): (9.0, 3.0)}, set())), "delta", address, parent_of(request))
    delta = open_export(path, tmp_path)
    assert delta.manifest["without_statistics"] == ["a"] and not KNOWN.is_in(delta)
    job.close()


@pytest.mark.parametrize(
    ("day", "decay", "said"),
    [
        (-1, [], "day"),
        (3, [[2, 0.5]], "one rate for each of its 3 days"),
        (1, [[1, "x"]], "decay"),
        (1 << 20, [], "day"),
    ],
)
def test_days_that_are_none_are_refused(tmp_path, table_of_rows, day, decay, said):
    job = Job(tmp_path / "store", AGEING)
    _, path = of_rows(job, aged(job, 1, (1, {("a", 1): (8.0, 2.0)}, set())), "base", str(tmp_path / "out"))
    job.close()
    export = open_export(path, tmp_path)
    export.manifest["statistics"]["a"].update(day=day, decay=decay)
    with pytest.raises(ExportUnusable, match=f"(?s)statistics of slot 'a': .*{said}"):
        KNOWN.of_export(export)


@pytest.mark.parametrize("chunk_rows", [2, 1 << 16])
def test_an_import_brings_the_statistics_that_a_chain_has(tmp_path, table_of_rows, monkeypatch, chunk_rows):
    """Of slot a; of slot b, of which no model is told, there are none."""
    monkeypatch.setattr(slot_files, "CHUNK_ROWS", chunk_rows)
    entries = [SparseSlot(name=slot, kind="sparse", group=GROUPS[slot]) for slot in "ab"]
    schema = Schema.of([*entries, DenseSlot(name="known", kind="dense", statistics={"of": ["a"]})])
    job, address = Job(tmp_path / "store", AGEING), str(tmp_path / "out")
    model = describe(schema, {"default": AGEING}, (), ExportSection())
    (job.store / "stage").mkdir(parents=True)
    (job.store / "stage" / "model.json").write_text(json.dumps(model))
    first = {(slot, sign): (8.0 + sign, 2.0) for slot in "ab" for sign in range(9)}
    request, _ = of_rows(job, aged(job, 1, (1, first, set())), "base", address)
    _, path = of_rows(job, aged(job, 2, (2, {("a", 3): (5.0, 1.0)}, {("a", 4)})), "delta", address, parent_of(request))
    job.close()
    export = open_export(path, tmp_path)
    brought, wanted = {}, dict(known(path, tmp_path))
    for rows in ExportSource(export, statistics=True).batches():
        for number, slot in enumerate(rows.slots[each] for each in rows.slot_R):
            value = np.array([rows.statistics["show"][number], rows.statistics["click"][number]], np.float32)
            brought[slot, int(rows.sign_R[number])] = value.tobytes()
    nothing = np.zeros(2, np.float32).tobytes()
    assert len(brought) == 17 and len(wanted) == 8
    assert brought == {row: wanted[commits_of_rows.key_of(row)] if row[0] == "a" else nothing for row in job.rows}
    assert all(rows.statistics == {} for rows in ExportSource(export).batches())


def test_an_import_of_few_rows_holds_few_statistics(monkeypatch):
    """An export leaves rows out by thresholds, and no statistics: some thousand times as many as it has rows."""
    num_chunks, chunk_rows = 200, 10_000
    every = np.arange(num_chunks * chunk_rows, dtype=np.uint64)

    def chunks(*_):
        for key_R in every.reshape(num_chunks, -1):
            row_R3 = np.stack([key_R % 7, key_R % 3, np.zeros_like(key_R)], axis=1).astype(np.float32)
            yield RowChunk(("a",), np.zeros(chunk_rows, np.int32), key_R, key_R, None, row_R3)

    monkeypatch.setattr(export_source, "replay", chunks)
    monkeypatch.setattr(export_source, "sort_order_of", lambda key_R: key_R)
    monkeypatch.setattr(Statistics, "of_export", lambda self, _: self)
    found = export_source.KnownStatistics([None], KNOWN)
    found.of(every[:1])
    tracemalloc.start()
    try:
        asked = every[[1, 5, 10_000, len(every) - 2]]
        assert found.of(asked).tolist() == [[float(key % 7), float(key % 3)] for key in asked.tolist()]
        assert tracemalloc.get_traced_memory()[1] < every.nbytes / 4
    finally:
        tracemalloc.stop()
    assert found.of(every[-1:]).tolist() == [[float(every[-1] % 7), float(every[-1] % 3)]]


def test_statistics_of_each_slot_fade_at_its_own_rate_in_predictions(tmp_path, table_of_rows):
    entries = [SparseSlot(name=slot, kind="sparse", group=GROUPS[slot]) for slot in "ab"]
    asking = DenseSlot(name="known", kind="dense", statistics={"of": ["a", "b"]})
    schema, job = Schema.of([*entries, asking]), Job(tmp_path / "store", AGEING)
    known, address = {"slot_files": slot_files_of(schema)}, str(tmp_path / "out")
    first = aged(job, 1, (0, {("a", 1): (8.0, 2.0), ("b", 1): (8.0, 2.0)}, set()))
    request, _ = of_rows(job, first, "base", address, **known)
    _, path = of_rows(job, aged(job, 2, (2, {}, set())), "delta", address, parent_of(request), **known)
    job.close()
    found = remembered_rows(open_export(path, tmp_path), schema)
    shows = {name: float(next(rows.chunks).vector_RD[0, 0]) for name, rows in found.items()}
    assert shows == {"statistics-a": pytest.approx(8 * 0.97**2), "statistics-b": pytest.approx(8 * 0.83**2)}
