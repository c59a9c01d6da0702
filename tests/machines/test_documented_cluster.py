"""Section 4 of the page about clusters, on three machines and an object store: every block, as it is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import s3_server
from tests.e2e.test_tutorial import CLUSTER, blocks
from tests.integration.stream_job import headrace
from tests.machines.external_job import Output, object_store

pytestmark = pytest.mark.long
JOB, TOKEN, KEEP, RUN, WORKER, TORCHRUN = (
    text for _, _, text in blocks(CLUSTER.partition("## 4.")[2].partition("## 5.")[0])
)
LINES = "".join(f"1 {n % 97} 2 {n % 41} {n % 13} 1 {int(n % 97 < 30)}\n" for n in range(2_000))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ALONE = 'cluster.launcher="local"', 'cluster.interface="lo"', 'cluster.listen="127.0.0.1:0"', 'store.parts="shared"'


def typed(machine, text, given=""):
    """A block that is typed into a shell of a machine; `given` follows on its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = machine.start(("bash", "-c", text), environment={**s3_server.ENVIRONMENT, "PATH": PATH}, **pipes)
    process.stdin.write(given)
    process.stdin.close()
    return Output(process)


def said(machine, text, given=""):
    shell = typed(machine, text, given)
    assert shell.end() == 0, shell.said
    return shell.said


@pytest.fixture
def world(machines, tmp_path):
    """The machines of the page, with the files that it asks for; takes the name of the job's place in the store."""
    head, *others, disk = machines(4)
    with object_store(disk) as address:

        def prepared(prefix):
            job = JOB.replace("s3://bucket/clicks", address(prefix))
            assert job != JOB
            (head.tmp / "job.toml").write_text(job)
            (tmp_path / "job.toml").write_text(JOB)
            for folder in (head.tmp, *(machine.tmp for machine in others), tmp_path):
                (folder / "lines.txt").write_text(LINES)
            token = said(head, TOKEN)
            for machine in (head, *others):
                said(machine, KEEP, token)
            return head, *others

        yield prepared


def digest_alone(folder):
    settings = (*ALONE, 'store.log_mirror="async"', f'store.mirror="{folder / "mirror"}"')
    return headrace(folder / "job.toml", *settings).report["digest"]


def test_workers_by_hand(world, tmp_path):
    head, second, third = world("hand")
    launcher = typed(head, RUN)
    launcher.until(f"4 of 4 workers: trainer-0, trainer-1, shard-0, shard-1; `{WORKER.partition(' --token')[0]}")
    workers = [typed(machine, WORKER) for machine in (head, second, second, third)]
    assert launcher.end() == 0, launcher.said
    assert [worker.end() for worker in workers] == [0] * 4
    assert digest_alone(tmp_path) in launcher.said


def test_workers_by_torchrun(world, tmp_path):
    head, second, third = world("torchrun")
    launcher = typed(head, RUN)
    launcher.until("waits for 4 of 4 workers")
    of_shards = TORCHRUN.replace("--role trainer", "--role shard").replace(head.address, second.address, 1)
    of_shards = of_shards.replace("29500", "29501")
    typed_at = [(head, TORCHRUN), (second, next_node(TORCHRUN)), (second, of_shards), (third, next_node(of_shards))]
    runs = [typed(machine, text) for machine, text in typed_at]
    assert launcher.end() == 0, launcher.said
    assert [run.end() for run in runs] == [0] * 4, [run.said for run in runs]
    assert digest_alone(tmp_path) in launcher.said


def next_node(text):
    changed = text.replace("--node-rank=0", "--node-rank=1")
    assert changed != text
    return changed
