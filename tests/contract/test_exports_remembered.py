"""Histories in exports of real commits: a base and its deltas replay to the base of the last version, bit for bit."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.pserver.config import Sgd, TableSection
from headrace.pserver.rows.history_kernels import packed, width_of
from headrace.trainer.exports.exporter import export
from headrace.trainer.exports.reader import chain_of, open_export
from headrace.trainer.exports.slot_files import Histories, replay
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
