"""Exports to a folder and to a real S3 server: what is written is read back, what fails leaves no DONE."""

import uuid

import numpy as np
import pytest

from tests.fakes.commits_of_rows import TABLE, Job, parent_of
from tests.s3_server import proxy, s3  # noqa: F401
from trainer.exports.reading import chain_of, open_export, state_at
from trainer.exports.writing import export


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "store")
    yield job
    job.close()


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "out")
    return request.getfixturevalue("s3").uri("bucket", uuid.uuid4().hex)


@pytest.fixture
def scratch(job):
    return job.store / "live" / "export-test"


def opened(answer, tmp_path):
    return open_export(answer.path, tmp_path / uuid.uuid4().hex).check()


def state(export):
    """(slot, sign) -> weight and vector."""
    found = {}
    for chunk in state_at(chain_of(export), TABLE):
        for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values.tolist(), strict=True):
            found[slot, sign] = values
    return found


def weights(rows):
    return {row: np.asarray(values, np.float32).tolist() for row, values in rows.items()}


A = {("a", n): [n, n / 2, -n, 0.1] for n in range(500)} | {("b", n): [1, 2, 3, n] for n in range(300)}


def test_a_base_and_a_delta_replayed_are_the_state(job, address, scratch, tmp_path):
    job.set(1, A)
    base = job.request(job.commit(1), "base", address)
    answer = export(base, scratch)
    assert answer.outcome == "complete" and answer.current and answer.rows == 800, answer
    assert state(opened(answer, tmp_path)) == weights(A)
    job.set(2, {("a", 1): [9, 9, 9, 9], ("c", 5): [7, 7, 7, 7]})
    job.remove(("b", 1), ("b", 2))
    job.set(3, {("b", 2): [3, 3, 3, 3]})
    delta = job.request(job.commit(3, since=1), "delta", address, parent_of(base))
    answer = export(delta, scratch)
    assert (answer.outcome, answer.rows, answer.tombstones, answer.pending) == ("complete", 3, 1, 0), answer
    now = A | {("a", 1): [9, 9, 9, 9], ("c", 5): [7, 7, 7, 7], ("b", 2): [3, 3, 3, 3]}
    del now["b", 1]
    found = opened(answer, tmp_path)
    assert state(found) == weights(now)
    assert found.tables[TABLE]["by_slot"]["b"] == {"rows": 1, "tombstones": 1}
    assert found.tables[TABLE]["model_rows"] == len(now)
    assert not scratch.exists()
