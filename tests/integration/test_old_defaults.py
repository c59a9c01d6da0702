"""A store that was begun under older defaults goes on and is rerun to the bit, though its job file leaves them out.

The store in tests/golden was made by the code before sets of defaults had numbers, and its trainer killed at the close
of pass 8 of 10; `end.json` is how a run of that code ended which nobody disturbed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from headrace.deadline import Deadline
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.config import WorkerConfig
from headrace.trainer.train.assembly import open_trainer
from headrace.trainer.train.device import MAKER, fingerprint
from headrace.trainer.train.report import digest_of
from tests.integration.stream_job import headrace
from tests.integration.trainer_here import closes, torch_as_before
from tests.unit.test_defaults import newer

__all__ = ["newer"]

GOLDEN = Path(__file__).parents[1] / "golden" / "store-of-defaults-1"
NUM_PASSES = 10
MADE_ON = "GenuineIntel"
"""The maker of the processor, which the store does not name."""


@pytest.fixture
def job(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "job")
    return tmp_path / "job" / "job.toml"


def same_arithmetic():
    """Whether sums here are rounded as where the store was made: closes are compared to the bit then."""
    (commit,) = Commits(GOLDEN / "store").whole()
    then, now = dict(commit.manifest.fingerprint) | {MAKER: MADE_ON}, fingerprint(torch.device("cpu"))
    return all(then[name] == now[name] for name in then if name != "threads")


def ended(job, generation):
    """The job trained to its end in this process: its digest."""
    where = {"folder": job.folder, "store": job.store, "live": job.store / "live", "socket": job.store / "role"}
    spec = job.full if same_arithmetic() else {**job.full, "commit": {"on_replay_mismatch": "warn"}}
    config = WorkerConfig(job=spec, rank=0, world=1, generation=generation, **where)
    with torch_as_before(), open_trainer(config) as trainer:
        trainer.loop.run()
        trainer.rank0.beginning.joblog.close()
        return digest_of(trainer.parts.shards, trainer.parts.dense, Deadline.after(10))


def test_an_old_store_goes_on_under_the_defaults_it_began_with(job, newer):
    logged = closes(job.parent / "store")
    assert max(logged) == 8 and Commits(job.parent / "store").whole()[-1].version == 5
    digest = ended(with_store_defaults(load_job(job)), generation=3)
    after, last = closes(job.parent / "store"), Commits(job.parent / "store").whole()[-1]
    assert max(after) == last.version == NUM_PASSES
    spec = last.state["spec"]
    assert (spec["defaults"], spec["tables"]["default"]["dim"], spec["train"]["batch_size"]) == (1, 16, 1024)
    if same_arithmetic():
        assert {number: after[number] for number in logged if number in after}.items() <= logged.items()
        assert digest == json.loads((job.parent / "end.json").read_text())["digest"]
    anew = load_job(job, ["store.path=anew"])
    anew.store.mkdir()
    assert ended(with_store_defaults(anew), generation=1) != digest
    assert Commits(anew.store).whole()[-1].state["spec"]["tables"]["default"]["dim"] == 4


@pytest.mark.long
def test_an_old_store_is_run_and_rerun_by_the_command_line(job):
    warn = () if same_arithmetic() else ('commit.on_replay_mismatch="warn"',)
    run = headrace(job, *warn)
    assert run.code == 0, run.output
    end = json.loads((job.parent / "end.json").read_text())
    assert {key: run.report[key] for key in end if key != "digest"} == {k: v for k, v in end.items() if k != "digest"}
    again = headrace(job, *warn)
    assert again.code == 0 and "older defaults" not in again.output
    if same_arithmetic():
        assert run.report["digest"] == again.report["digest"] == end["digest"]
        rerun = headrace(job, command="rerun", options=["--from", "5"])
        assert rerun.code == 0 and "5 of 5 passes are identical" in rerun.output, rerun.output
