"""`store.parts = "shared"` on machines of IPv4 or IPv6: a store that all of them see, and one that they do not."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.lifecycle import ExitCode
from tests.contract.predict_world import content
from tests.integration.stream_job import headrace, write_job
from tests.machines.external_job import ExternalJob
from tests.machines.test_external import TWO_BY_TWO, compared
from tests.machines.test_predictions import PREDICTED, toml
from tests.machines.test_secure_wire import SCAN

pytestmark = pytest.mark.long
SHARED = 'store.parts="shared"', 'store.log_mirror="async"'
EVERY_3 = 'commit={every="600s", every_passes=3, keep=2}'


def report_of(store):
    return json.loads((store / "report.json").read_text())


@pytest.fixture
def seen_by_all():
    """A folder of the system, which is no part of any machine's /tmp."""
    with tempfile.TemporaryDirectory(prefix="headrace-", dir="/var/tmp") as path:
        yield Path(path)


def test_a_shard_whose_machine_does_not_see_the_store_ends_the_job_with_the_reason(machines):
    head, other = machines(2)
    write_job(head.tmp)
    with ExternalJob(head, "mirror", *SHARED, trainers=1, shards=1) as job:
        token, launcher = job.token(), job.run()
        launcher.until("waits for 2 of 2 workers")
        agents = [job.agent(machine, token=token) for machine in (head, other)]
        assert launcher.end() == ExitCode.BAD_CONFIG, launcher.said
        assert [agent.end() for agent in agents] == [ExitCode.BAD_CONFIG] * 2
    words = "store.path: shard-0 on m1 does not see /tmp/store of the head (No such file or directory), and with"
    assert words in launcher.said and 'or set store.parts = "object"' in launcher.said
    assert "generation 2" not in job.said, "another try would end the same way"
    assert not (head.tmp / "store" / "shared").exists()


def test_machines_that_see_one_store_have_the_bits_of_loopback(machines, tmp_path, seen_by_all):
    """So have their predictions, in a folder that all of them see."""
    write_job(tmp_path)
    predicted = toml({**PREDICTED, "output": "out"})
    expected = headrace(tmp_path / "job.toml", EVERY_3, f"predict={predicted}", timeout_s=300).report
    head, other = machines(2)
    for machine in (head, other):
        write_job(machine.tmp)
    store, out = seen_by_all / "store", seen_by_all / "out"
    predicted = toml({**PREDICTED, "output": str(out), "on": "cluster"})
    settings = *SHARED, EVERY_3, f"store.path={store}", f"predict={predicted}"
    with ExternalJob(head, "mirror", *settings, trainers=1, shards=1) as job:
        token, launcher = job.token(), job.run()
        launcher.until("waits for 2 of 2 workers")
        agents = [job.agent(machine, token=token) for machine in (other, head)]
        assert launcher.end(200) == 0, launcher.said
        assert [agent.end() for agent in agents] == [0, 0]
    assert compared(report_of(store)) == compared(expected)
    assert [*store.glob("commits/*/shard-0")], "a shard of another machine wrote its part there"
    assert content(out) == content(tmp_path / "out")
    assert "samples predicted" in launcher.said, "by the agents that have trained"


def test_machines_with_ipv6_alone_have_the_bits_of_loopback(machines, tmp_path, seen_by_all):
    write_job(tmp_path)
    expected = headrace(tmp_path / "job.toml", EVERY_3, *TWO_BY_TWO).report
    three = machines(3)
    for machine in three:
        machine.use_ipv6()
        write_job(machine.tmp)
    head, second, third = three
    store = seen_by_all / "store"
    with ExternalJob(head, "mirror", *SHARED, EVERY_3, f"store.path={store}") as job:
        token, launcher = job.token(), job.run()
        launcher.until(
            "waits for 4 of 4 workers: trainer-0, trainer-1, shard-0, shard-1; `headrace worker --join [fd77::1"
        )
        assert third.call(sys.executable, "-c", SCAN, job.address) == ""
        places = ((third, "shard"), (second, "shard"), (second, "trainer"), (head, "trainer"))
        agents = [job.agent(machine, "--role", role, token=token) for machine, role in places]
        assert launcher.end() == 0, launcher.said
        assert [agent.end() for agent in agents] == [0] * 4
    assert "serves at [fd77::12]:" in launcher.said and "refused fd77::12: " in launcher.said
    assert compared(report_of(store)) == compared(expected)
