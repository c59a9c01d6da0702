"""Jobs whose trainers compute on a GPU: the same bits at every run, after kills, and with NCCL between trainers.

Skipped where torch sees no GPU.
"""

import os
import re
import signal

import pytest
import torch

from headrace.service.spec.launchers import EXTERNAL
from tests.fakes.agents import AgentProcess
from tests.fakes.devices import machine_of_its_own, needs_gpu
from tests.faults.test_dense_kills import assert_deaths_change_nothing, ten_deaths
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

pytestmark = [pytest.mark.long, pytest.mark.timeout(240), needs_gpu]

CUDA, CPU = 'train.device="cuda"', 'train.device="cpu"'
FLOAT16 = ('train.amp="float16"', "train.loss_scale={initial=1024.0, growth_every=4}")
DEEP = changed(SPEC, {"model.settings": {"hidden": [32, 16], "dropout": 0.2}, "passes.max_events": 150})
WAYS = {
    "float32": (),
    "float16": FLOAT16,
    "bfloat16": ('train.amp="bfloat16"',),
    "recompute": ("dense.recompute={blocks='all'}",),
    "offload": ("dense.offload='all'",),
    "dense on shards": ("dense={strategy='shards', slice_floats=1000}",),
}


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, spec=DEEP)


def learnt(job, name, *settings):
    ended = headrace(job, *settings, store=name, timeout_s=200)
    assert ended.code == 0, ended.output
    return ended.report


@pytest.mark.parametrize("way", WAYS)
def test_two_runs_on_a_gpu_have_the_same_bits(job, way):
    first, again = (learnt(job, name, CUDA, *WAYS[way]) for name in ("first", "again"))
    assert first["digest"] == again["digest"] and first["metrics"] == again["metrics"]


@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_saved_activations_change_no_bits(job, way):
    kept, saved = learnt(job, "kept", CUDA), learnt(job, "saved", CUDA, *WAYS[way])
    assert kept["digest"] == saved["digest"]


@pytest.mark.parametrize("way", ["float32", "float16", "dense on shards"])
def test_a_gpu_learns_what_a_cpu_learns(job, way):
    """Without dropout, whose draws differ between devices."""
    plain = "model.settings={hidden=[32, 16]}"
    on_cpu = learnt(job, "cpu", CPU, plain, *(WAYS[way] if way != "float16" else ()))
    on_gpu = learnt(job, "gpu", CUDA, plain, *WAYS[way])
    aucs = [each["metrics"]["life"]["ctr"]["auc"] for each in (on_cpu, on_gpu)]
    assert aucs[0] == pytest.approx(aucs[1], abs=0.01 if way == "float16" else 1e-4)
    assert on_cpu["digest"] != on_gpu["digest"]


def test_more_trainers_than_gpus_are_refused(job):
    trainers = torch.cuda.device_count() + 1
    ended = headrace(job, CUDA, f"cluster={{trainers={trainers}, shards=1}}")
    assert ended.code == 2, ended.output
    assert "this machine has more trainers than GPUs" in ended.output


@pytest.mark.parametrize("amp", [(), FLOAT16], ids=["float32", "float16"])
def test_ten_deaths_on_a_gpu_change_nothing(tmp_path, amp):
    write_job(tmp_path, num_lines=500)
    assert_deaths_change_nothing(tmp_path, (CUDA, *amp), 1, ten_deaths(1))


# -- several trainers, by NCCL


STRATEGIES = {
    "all_reduce": (),
    "overlap": ("dense={overlap=true, bucket_bytes='1KiB'}",),
    "sharded": ("dense={strategy='sharded', clip_norm=0.5}",),
    "local_sgd": ("dense={strategy='local_sgd', k_steps=3}",),
    "fp16": ("dense={compression='fp16'}",),
    "dgc": ("dense={compression='dgc', dgc={sparsity=0.9}, optimizer={kind='sgd', momentum=0.9}}",),
    "powersgd": ("dense={compression='powersgd', powersgd={rank=1}}",),
    "float16": FLOAT16,
}


class Trainers:
    """A job of two trainers and a shard, whose workers share the GPU; runs of it, one after another."""

    def __init__(self, job):
        self.job, self.running, self.agents = job, [], []

    def run(self, name, *settings, kill_after=None):
        """Its report; `kill_after`: events after which a trainer is killed."""
        folder = self.job.parent / name
        folder.mkdir()
        cluster = ("cluster={trainers=2, shards=1, node_timeout='3s'}", f"cluster.launcher={EXTERNAL}")
        running = RunningJob(self.job, folder, *cluster, CUDA, "commit.every_passes=1", *settings)
        self.running.append(running)
        address = re.search(r"--join (\S+)", running.until_said("waits for 3 of 3 workers"))[1]
        for number in range(3):
            token = running.store / "identity" / "join_token"
            output, place = folder / f"agent-{number}", {"RANK": str(number), "WORLD_SIZE": "3"}
            self.agents.append(AgentProcess(address, token, output, **place, **machine_of_its_own(number)))
        if kill_after is not None:
            running.until_events(kill_after, 120)
            for pid in self.agents[-2].children():
                os.kill(pid, signal.SIGKILL)
            running.until_said("restarting, 1 of 5")
        code, said = running.end(180)
        assert code == 0, said
        assert [agent.process.wait(40) for agent in self.agents[-3:]] == [0] * 3, [each.said for each in self.agents]
        return running.report

    def end(self):
        for running in self.running:
            running.kill()
        for agent in self.agents:
            agent.kill()


@pytest.fixture
def trainers(job):
    made = Trainers(job)
    yield made
    made.end()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_runs_with_nccl_have_the_same_bits(trainers, strategy):
    first, again = (trainers.run(name, *STRATEGIES[strategy]) for name in ("first", "again"))
    assert first["digest"] == again["digest"] and first["metrics"] == again["metrics"]


def test_a_trainer_killed_among_sums_by_nccl_changes_nothing(trainers):
    """Eighty passes, each of which commits, so that the job does not end before the kill."""
    write_job(trainers.job.parent, num_lines=4000, spec=DEEP)
    calm = trainers.run("calm", "train.batch_size=8")
    killed = trainers.run("killed", "train.batch_size=8", kill_after=300)
    assert calm["digest"] == killed["digest"] and calm["metrics"] == killed["metrics"]
